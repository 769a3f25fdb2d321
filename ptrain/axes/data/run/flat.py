"""Flat units: any tuple of modes on the data axes, a handler per state.

Each unit's tensors are views of one flat padded buffer. Theta keeps the buffer, or a shard of it on
any tier that is made whole for use and freed after (`Parameters`); G lives in a buffer of the same
layout, filled in the backward pass and reduced when the unit's is complete (`Gradients`); the
update works on the shard that Omega is cut to (`FlatTarget`), or on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ptrain.axes.data.form import ELEMENTWISE
from ptrain.axes.data.run.flat_gradients import Gradients
from ptrain.axes.data.run.flat_parameters import Dtypes, Parameters
from ptrain.axes.data.run.flat_target import FlatState, FlatTarget
from ptrain.axes.data.run.flat_tensors import FlatTensorTarget, UnitUpdate
from ptrain.axes.data.run.layout import FlatLayout
from ptrain.axes.data.run.local_part import Parameter, stored_part
from ptrain.axes.data.run.target import Target
from ptrain.axes.data.run.whole import OfWholeModel
from ptrain.costs import State
from ptrain.models.again import runs_again
from ptrain.models.units import ROOT
from ptrain.plan.step import FlatUnits, Plan, Units
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.batch import GradientSync
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec
from ptrain.timeline import Kind


class Order:
    """The units in the order of their first use, known from the second forward pass on: what is
    brought to the device ahead of its use."""

    def __init__(self, step: FlatUnits) -> None:
        self.ahead = step.prefetch
        self.is_on_file = step.parameters_tier is Tier.FILE
        self.used: list[Parameters] = []
        self.is_known = False

    def gather(self, unit: Parameters, *, is_forward: bool) -> None:
        """Gather a unit, and begin with those that follow in this direction."""
        if is_forward and not self.is_known:
            self._note(unit)
        unit.gather()
        if not self.is_known or not (self.ahead or self.is_on_file) or unit not in self.used:
            return
        place = self.used.index(unit)
        following = self.used[place + 1 :] if is_forward else self.used[:place][::-1]
        for other in following[: self.ahead]:
            other.prefetch()
        for other in following[self.ahead : self.ahead + 1]:
            if not other.is_gathered:
                other.tiers.ahead(other.stored)

    def _note(self, unit: Parameters) -> None:
        if self.used and unit is self.used[0]:
            self.is_known = True
        elif unit not in self.used:
            self.used.append(unit)


class Flight:
    """The one reduction that runs beside the backward pass."""

    def __init__(self) -> None:
        self._under_way: Gradients | None = None

    def complete(self) -> None:
        """Wait for it."""
        if self._under_way is not None:
            self._under_way.complete()
        self._under_way = None

    def begin(self, gradients: Gradients) -> None:
        self._under_way = gradients


class FlatUnit:
    """One unit with its hooks: gather before use, reduce when its gradients are complete."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        state: FlatState,
        order: Order,
        flight: Flight,
        *,
        is_root: bool,
    ) -> None:
        self.state = state
        self.parameters = state.parameters
        self.gradients = state.gradients
        self.sync = state.step.sync
        self.is_released = bool(self.sync.after_forward(is_root=is_root))  # after forward
        self.order = order
        self.flight = flight
        self.consume: Callable[[], None] | None = None
        self.is_last = True
        self.pending = 0
        modules[0].register_forward_pre_hook(self._before_forward)
        modules[-1].register_forward_hook(self._after_forward)
        for _, parameter in self.parameters.named:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self.order.gather(self.parameters, is_forward=not runs_again())

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if runs_again():
            return  # its backward pass is next, which has its hooks
        if torch.is_grad_enabled():
            # what is only passed through gets its gradient when the unit's backward is over
            passed = {id(tensor) for tensor in _tensors(args)}
            for tensor in _tensors(output):
                if tensor.requires_grad and id(tensor) not in passed:
                    tensor.register_hook(self._before_backward)
        if self.is_released:
            self.parameters.release()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.order.gather(self.parameters, is_forward=False)
        if self.pending == 0:
            self.pending = len(self.parameters.named)
            self.gradients.open()

    def _accumulated(self, parameter: Parameter) -> None:
        self.gradients.accumulated(parameter)
        self.pending -= 1
        if self.pending == 0:
            self.finish()

    def begin_weights(self) -> None:
        """Gradients of weights alone are to come, which autograd gives to nobody's hook."""
        self.gradients.open()

    def end_weights(self) -> None:
        """They are there."""
        with torch.no_grad():
            for _, parameter in self.parameters.named:
                self.gradients.accumulated(parameter)
            self._finish()

    def finish(self) -> None:
        """The unit's backward is complete (or the pass is over and some parameter had no part)."""
        with torch.no_grad():
            self._finish()

    def _finish(self) -> None:
        self.pending = 0
        is_due = self.is_last or self.sync.gradients is GradientSync.EVERY
        if is_due:
            self.flight.complete()
        self.gradients.finish(is_last=self.is_last, is_due=is_due)
        self.flight.begin(self.gradients)
        if self.consume is not None:
            self.gradients.for_update()
        if self.is_last or self.sync.reshard_after_backward:
            self.parameters.release()
        if self.consume is not None:
            self.consume()
            self.gradients.clear()


class FlatWrap(OfWholeModel):
    """All units of one model under one plan step."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, registry: Registry) -> None:
        step = plan.wrap
        assert isinstance(step, FlatUnits)
        self.module = model
        self.step = step
        self.units: list[FlatUnit] = []
        self.flight = Flight()
        tiers = Tiers(mesh.world.device, registry, step.path)
        dtypes = Dtypes.of(plan.update.layout, step)
        cut = step.parameters + step.optimizer + step.gradients
        order = Order(step)
        for modules, parameters in parameters_by_unit(model, plan.units):
            named = [(name, stored_part(parameter)) for name, parameter in parameters]
            numel = sum(parameter.numel() for _, parameter in named)
            layout = FlatLayout.over(mesh, numel, cut, registry, step.reduce_scatter)
            state = FlatState(Parameters(named, layout, step, dtypes, tiers), step)
            members = [model.get_submodule(name) for name in modules]
            unit = FlatUnit(members, state, order, self.flight, is_root=modules == (ROOT,))
            self.units.append(unit)
        for unit, following in zip(self.units, self.units[1:], strict=False):
            unit.state.following = following.state
        self._targets = [
            _targets(unit.state, whole_tensors=plan.update.optimizer not in ELEMENTWISE)
            for unit in self.units
        ]

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """One forward and backward pass; the last one reduces and reshards whatever the policy."""
        for unit in self.units:
            unit.is_last = is_last
        yield
        for unit in self.units:
            if unit.pending:
                unit.finish()
        self.flight.complete()
        if is_last:
            self.end_evaluation()

    def forward_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        if kind is Kind.BACKWARD:
            with self.micro_batch(is_last):
                yield
            return
        for unit in self.units if kind is Kind.WEIGHT else ():
            unit.is_last = is_last
            unit.begin_weights()
        yield
        for unit in self.units[::-1] if kind is Kind.WEIGHT else ():
            unit.end_weights()
        self.flight.complete()
        if is_last:
            self.end_evaluation()

    def end_evaluation(self) -> None:
        """What was gathered and not used is stale after an update."""
        for unit in self.units:
            unit.parameters.release()

    def reduce_gradients(self) -> None:
        for unit in self.units:
            unit.gradients.for_update()

    def consume_with(self, update: Callable[[int], None]) -> None:
        """G = M: `update(i)` updates the i-th group of targets, as soon as its gradients are
        complete."""
        for index, unit in enumerate(self.units):
            unit.consume = _call(update, index)

    def finish_update(self) -> None:
        """Complete the gathers that the update left running."""
        for unit in self.units:
            unit.parameters.finish_update()

    def clear_gradients(self) -> None:
        for unit in self.units:
            unit.gradients.clear()

    def targets(self) -> Sequence[Sequence[Target]]:
        """A group per unit, so that no more than one unit's parameters are gathered at once."""
        return self._targets

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> None:
        """The update is everybody's."""

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for unit in self.units:
            yield unit.parameters.state, unit.parameters.stored
            for held in unit.gradients.held():
                yield State.GRADIENTS, held


def _targets(state: FlatState, *, whole_tensors: bool) -> Sequence[Target]:
    if not whole_tensors:
        return [FlatTarget(state)]
    update = UnitUpdate(state)
    return [FlatTensorTarget(update, index) for index in range(update.num_tensors)]


def _call(update: Callable[[int], None], index: int) -> Callable[[], None]:
    return lambda: update(index)


def parameters_by_unit(
    model: nn.Module, units: Units
) -> Iterator[tuple[tuple[str, ...], list[tuple[str, nn.Parameter]]]]:
    """Each unit with the parameters that no unit before it has; units with none are left out."""
    seen: set[int] = set()
    for modules in units:
        named = [
            (f"{name}." * bool(name) + local, parameter)
            for name in modules
            for local, parameter in model.get_submodule(name).named_parameters()
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in named)
        if named:
            yield modules, named


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
