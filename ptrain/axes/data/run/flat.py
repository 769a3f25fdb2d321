"""Flat units of a module, for any tuple of modes on the data axes with a handler per state; and
what the program needs of every wrap that leaves parameters in the module.

Each unit's tensors are views of one flat padded buffer. `axes.data.units` says what becomes of it
in a step; here autograd's hooks say when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from ptrain.axes.data.cuts import Cuts
from ptrain.axes.data.run.flat_target import (
    FlatFrozen,
    FlatState,
    FlatTarget,
    FlatTensorTarget,
    FrozenTarget,
    OwnRows,
    ParameterMembers,
    RowWriter,
)
from ptrain.axes.data.run.target import (
    Named,
    NamedTarget,
    Parameter,
    ParameterTarget,
    gradients_of,
    stored_part,
)
from ptrain.axes.data.units import ModelLife, UnitLife, UnitParts, UnitUse, buckets_of
from ptrain.axes.data.update import TensorsUpdate
from ptrain.cost import State
from ptrain.facts.stages import Units
from ptrain.facts.stages import Units as UnitModules
from ptrain.models.parting import when_left
from ptrain.models.units import ROOT
from ptrain.models.watch import runs_again
from ptrain.optimizers.update import Scale
from ptrain.rooms.comm import Mesh, Registry
from ptrain.rooms.room import OptimizerLeaf
from ptrain.rooms.torch import TorchRoom
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.precision import Layout
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind

NamedUnit = tuple[tuple[str, ...], list[tuple[str, nn.Parameter]]]  # its modules and parameters


class Hooks:
    """One unit at the hooks of its modules."""

    def __init__(self, unit: UnitUse[torch.Tensor], modules: Sequence[nn.Module]) -> None:
        self.unit = unit
        # whose inputs are watched runs other operators: where nothing waits for it they are not
        self._is_left = unit.frozen is not None and unit.frozen.is_transient
        modules[0].register_forward_pre_hook(self._before_forward, with_kwargs=True)
        modules[-1].register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_again = runs_again()
        with torch.no_grad():
            self.unit.before_forward(is_again=is_again)
        if is_again or not self._is_left:
            return None
        return when_left((args, kwargs), self._after_backward)

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

    def _after_backward(self) -> None:
        with torch.no_grad():
            self.unit.after_backward()


def _watch(unit: UnitLife[torch.Tensor], members: ParameterMembers) -> None:
    """Tell a unit when autograd has the gradients of its parameters."""
    own = ref(unit)  # autograd keeps it where no collector looks, and the unit its parameters
    for index, (_, parameter) in enumerate(members.named):
        parameter.register_post_accumulate_grad_hook(partial(_accumulated, own, index))


def _accumulated(unit: ref[UnitLife[torch.Tensor]], index: int, parameter: object) -> None:
    """A backward pass that builds no graph of itself runs its hooks without gradients: to switch
    them off again would be a third of what this costs for every tensor."""
    if (own := unit()) is not None:
        own.accumulated(index)


class WrappedModel:
    """What the program needs of a wrap. One of a whole model, or of a stage by itself, has each
    tensor once, under the model's name; what it need not do it answers as here."""

    module: nn.Module

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Around a forward and a backward pass, one after the other."""
        return nullcontext()

    def forward_pass(self) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch whose backward pass is not the next one."""
        return nullcontext()

    def backward_pass(self, kind: Kind, is_last: bool) -> AbstractContextManager[None]:
        """Around its backward pass, or one half of it. `is_last`: the step's gradients are complete
        after it."""
        return nullcontext()

    def begin_passes(self) -> None:
        """Before the passes of a step in a pipeline: begin what they would wait for."""

    def settle(self) -> None:
        """Before the next pass of the rank: wait for what this stage's pass has to."""

    def end_passes(self) -> None:
        """After them: wait for what they began."""

    def end_evaluation(self) -> None:
        """Release what was gathered and not used: it is stale after an update."""

    def consume_with(self, update: Callable[[int], None]) -> None:
        """G = M: let `update(i)` update the i-th group of targets, as soon as its gradients are
        complete."""
        raise AssertionError("gradients are updated from in backward by flat units alone")

    def reduce_gradients(self) -> None:
        """Bring the gradients to where the optimizer wants them."""

    def finish_update(self) -> None:
        """Wait for what is on its way after an update."""

    def clear_gradients(self) -> None:
        raise NotImplementedError

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all targets: those of many may lie in one tensor."""
        return gradients_of(self.targets())

    def copies(self) -> Sequence[NamedTarget]:
        """Return the targets of tensors that another stage has itself, where they are counted."""
        return ()

    def canonical_name(self, name: str) -> str:
        """The model's name of a tensor, or of its optimizer state (`head.weight.exp_avg`)."""
        return name

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Tensors by the model's names, under the names that the wrap has for them too."""
        return dict(named)

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> OwnUpdate | None:
        """Return the optimizer that is part of the wrap; None if the update is everybody's."""
        return None

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        raise NotImplementedError


class FlatWrap(WrappedModel):
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
        self._by_tensor = not OPTIMIZERS[plan.update.optimizer].is_elementwise
        self._targets: list[Sequence[NamedTarget]] = []
        wrapped = list(parameters_by_unit(model, plan.units))
        buckets = buckets_of(plan, [(modules, _trained(named)) for modules, named in wrapped])
        parts = [
            self._parts([wrapped[place] for place in bucket], plan, room, write)
            for bucket in buckets
        ]
        self.units = ModelLife(parts, step, is_pipelined=plan.pipeline is not None)
        self.hooks = [
            Hooks(unit, [model.get_submodule(name) for name in wrapped[place][0]])
            for unit, bucket in zip(self.units.all, buckets, strict=True)
            for place in bucket
        ]
        for unit in self.units.trained:
            assert isinstance(unit.state, FlatState), "made here"
            _watch(unit, unit.state.tensors)

    def _parts(
        self,
        joined: Sequence[NamedUnit],
        plan: Plan,
        room: TorchRoom,
        write: RowWriter | None,
    ) -> UnitParts[torch.Tensor]:
        parameters = [pair for _, named in joined for pair in named]
        modules, _ = joined[-1]
        own, layout = plan.wrap_of(modules), plan.update.layout
        assert isinstance(own, FlatUnits)
        trained = [(name, stored_part(p)) for name, p in parameters if p.requires_grad]
        frozen = [(name, stored_part(p)) for name, p in parameters if not p.requires_grad]
        state = FlatState(*_buffer(trained, own, room, write), layout, room) if trained else None
        step = own.of_frozen
        kept = FlatFrozen(*_buffer(frozen, step, room, write), layout, room) if frozen else None
        targets: list[NamedTarget] = []
        if state is not None:
            targets += _targets(state, whole_tensors=self._by_tensor)
        if kept is not None:
            targets.append(FrozenTarget(kept))
        self._targets.append(targets)
        return UnitParts(
            trained=state,
            frozen=None if kept is None else kept.parameters,
            step=own,
            is_root=modules == (ROOT,),
        )

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """One forward and backward pass; the last one reduces and reshards whatever the policy."""
        self.units.begin_pass(is_last=is_last)
        yield
        with torch.no_grad():
            self.units.end_pass(is_last=is_last)

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

    @torch.no_grad()
    def begin_passes(self) -> None:
        self.units.begin_passes()

    @torch.no_grad()
    def settle(self) -> None:
        self.units.settle()

    @torch.no_grad()
    def end_passes(self) -> None:
        self.units.end_passes()

    def end_evaluation(self) -> None:
        self.units.release()

    def reduce_gradients(self) -> None:
        self.units.for_update()

    def consume_with(self, update: Callable[[int], None]) -> None:
        self.units.consume_with(update)

    def finish_update(self) -> None:
        self.units.finish_update()

    def clear_gradients(self) -> None:
        self.units.clear_gradients()

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        """A group per unit, so that no more than one unit's parameters are gathered at once."""
        return self._targets

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        return self.units.storages()


def _buffer(
    named: Sequence[tuple[str, Parameter]],
    step: FlatUnits,
    room: TorchRoom,
    write: RowWriter | None,
) -> tuple[ParameterMembers, Cuts[torch.Tensor], FlatUnits]:
    """Return tensors that have a buffer together, how it is cut, and the step that says so."""
    members = ParameterMembers(named)
    numel = sum(parameter.numel() for _, parameter in members.named)
    cuts = Cuts(room, numel, step.parameters + step.optimizer + step.gradients, step.reduce_scatter)
    if write is not None:
        members.values = OwnRows(write, tuple(cuts.stretches(step.parameters)))
    return members, cuts, step


def _targets(state: FlatState, *, whole_tensors: bool) -> Sequence[NamedTarget]:
    whole = FlatTarget(state)
    if not whole_tensors:
        return [whole]
    update = TensorsUpdate(state)
    return [FlatTensorTarget(update, whole, index) for index in range(len(state.named))]


def _trained(parameters: Sequence[tuple[str, nn.Parameter]]) -> int:
    """Return the trained elements that this rank stores of them."""
    return sum(stored_part(own).numel() for _, own in parameters if own.requires_grad)


def parameters_by_unit(model: nn.Module, units: UnitModules) -> Iterator[NamedUnit]:
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


class OwnUpdate(Protocol):
    """An optimizer that is part of a wrap: it says where its state lives."""

    def step(self, lr: float, scaling: Scale[torch.Tensor] | None = None) -> None:
        """One update with this learning rate, none where `scaling` says so on the device; the
        parameters are whole when it is over."""

    def tensors(self) -> Iterator[tuple[NamedTarget, dict[str, torch.Tensor]]]:
        """Each target with its optimizer state by name."""
        ...

    def leaves(self) -> Iterator[tuple[NamedTarget, OptimizerLeaf[torch.Tensor]]]:
        """Each target with the leaf that torch's optimizer knows it by."""
        ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class ParameterWrap(WrappedModel):
    """A module whose parameters stay where they are; on one device, all that is needed."""

    def __init__(self, model: nn.Module, units: Units, *, owns_masters: bool = False) -> None:
        self.module = model
        self.model = model
        self.unit_names = units
        self.owns_masters = owns_masters
        self._groups: list[list[ParameterTarget]] = []

    def clear_gradients(self) -> None:
        for target in self._targets():
            target.parameter.grad = None

    def targets(self) -> list[list[ParameterTarget]]:
        """Return a group of targets for each unit. They are read off the module once, before it
        runs: while a unit is gathered, the module's parameters are not those that the rank
        stores."""
        if not self._groups:
            self._groups = [
                [
                    ParameterTarget(name, parameter, owns_master=self.owns_masters)
                    for name, parameter in named
                ]
                for _, named in parameters_by_unit(self.model, self.unit_names)
            ]
        return self._groups

    def _targets(self) -> Iterator[ParameterTarget]:
        return chain.from_iterable(self.targets())

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for target in self._targets():
            yield State.PARAMETERS, target.value()
            if target.gradient is not None:
                yield State.GRADIENTS, target.gradient
