"""Flat units of a module: any tuple of modes on the data axes, a handler per state.

Each unit's tensors are views of one flat padded buffer. What becomes of it in a step is
`axes.data.units`; here autograd's hooks say when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from weakref import ref

import torch
from torch import nn

from ptrain.axes.data.cuts import Cuts
from ptrain.axes.data.form import ELEMENTWISE
from ptrain.axes.data.run.flat_target import FlatState, FlatTarget, FlatTensorTarget
from ptrain.axes.data.run.local_part import stored_part
from ptrain.axes.data.run.members import OwnRows, ParameterMembers, RowWriter
from ptrain.axes.data.run.target import NamedTarget
from ptrain.axes.data.run.whole import OfWholeModel
from ptrain.axes.data.units import ModelLife, UnitLife
from ptrain.axes.data.update import TensorsUpdate
from ptrain.costs import State
from ptrain.models.recomputing import runs_again
from ptrain.models.units import ROOT
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.torch import TorchRoom
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.step import Plan
from ptrain.steps.step import Units as UnitModules
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind


class Hooks:
    """One unit at the hooks of its modules and parameters."""

    def __init__(
        self, unit: UnitLife[torch.Tensor], modules: Sequence[nn.Module], members: ParameterMembers
    ) -> None:
        self.unit = unit
        modules[0].register_forward_pre_hook(self._before_forward)
        modules[-1].register_forward_hook(self._after_forward)
        own = ref(self)  # autograd keeps it where no collector looks, and the unit its parameters
        for index, (_, parameter) in enumerate(members.named):
            parameter.register_post_accumulate_grad_hook(partial(_accumulated, own, index))

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        with torch.no_grad():
            self.unit.before_forward(is_again=runs_again())

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if runs_again():
            return  # its backward pass is next, which has its hooks
        if torch.is_grad_enabled():
            # what is only passed through gets its gradient when the unit's backward is over
            passed = {id(tensor) for tensor in _tensors(args)}
            for tensor in _tensors(output):
                if tensor.requires_grad and id(tensor) not in passed:
                    tensor.register_hook(self._before_backward)
        self.unit.after_forward()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            self.unit.before_backward()


def _accumulated(hooks: ref[Hooks], index: int, parameter: object) -> None:
    if (own := hooks()) is not None:
        with torch.no_grad():
            own.unit.accumulated(index)


class FlatWrap(OfWholeModel):
    """All units of one model under one plan step. `write`: what gives the parameters values, where
    they have none: of a unit, when its turn comes, those that this rank keeps."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        registry: Registry,
        write: RowWriter | None = None,
    ) -> None:
        step = plan.wrap
        assert isinstance(step, FlatUnits)
        self.module = model
        self.step = step
        room = TorchRoom(mesh, registry, step.path)
        wrapped = list(parameters_by_unit(model, plan.units))
        states, members = [], []
        for modules, parameters in wrapped:
            own = plan.wrap_of(modules)
            assert isinstance(own, FlatUnits)
            tensors = ParameterMembers(
                [(name, stored_part(parameter)) for name, parameter in parameters]
            )
            numel = sum(parameter.numel() for _, parameter in tensors.named)
            cut = own.parameters + own.optimizer + own.gradients
            cuts = Cuts(room, numel, cut, own.reduce_scatter)
            if write is not None:
                tensors.values = OwnRows(write, tuple(cuts.stretches(own.parameters)))
            states.append(FlatState(tensors, cuts, own, plan.update.layout, room))
            members.append(tensors)
        self.units = ModelLife(states, [modules == (ROOT,) for modules, _ in wrapped], step)
        self.hooks = [
            Hooks(unit, [model.get_submodule(name) for name in modules], tensors)
            for unit, (modules, _), tensors in zip(self.units.all, wrapped, members, strict=True)
        ]
        by_tensor = plan.update.optimizer not in ELEMENTWISE
        self._targets = [_targets(state, whole_tensors=by_tensor) for state in states]

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """One forward and backward pass; the last one reduces and reshards whatever the policy."""
        self.units.begin_pass(is_last=is_last)
        yield
        with torch.no_grad():
            self.units.end_pass(is_last=is_last)

    def forward_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        if kind is Kind.BACKWARD:
            with self.micro_batch(is_last):
                yield
            return
        self.units.begin_half(kind, is_last=is_last)
        yield
        with torch.no_grad():
            self.units.end_half(kind, is_last=is_last)

    def end_evaluation(self) -> None:
        """What was gathered and not used is stale after an update."""
        self.units.release()

    def reduce_gradients(self) -> None:
        self.units.for_update()

    def consume_with(self, update: Callable[[int], None]) -> None:
        """G = M: `update(i)` updates the i-th group of targets, as soon as its gradients are
        complete."""
        self.units.consume_with(update)

    def finish_update(self) -> None:
        self.units.finish_update()

    def clear_gradients(self) -> None:
        self.units.clear_gradients()

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        """A group per unit, so that no more than one unit's parameters are gathered at once."""
        return self._targets

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> None:
        """The update is everybody's."""

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        return self.units.storages()


def _targets(state: FlatState, *, whole_tensors: bool) -> Sequence[NamedTarget]:
    whole = FlatTarget(state)
    if not whole_tensors:
        return [whole]
    update = TensorsUpdate(state)
    return [FlatTensorTarget(update, whole, index) for index in range(len(state.named))]


def parameters_by_unit(
    model: nn.Module, units: UnitModules
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
