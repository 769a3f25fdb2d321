"""Flat units of a module, and the interface of all wraps.

Each unit's tensors are views of one flat padded buffer. `axes.data.units` defines the operations on
it within a step; autograd and module hooks in this module call them.
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

from ptrain.axes.data.cuts import ShardLayout
from ptrain.axes.data.run.flat_target import (
    FlatFrozen,
    FlatState,
    FlatTarget,
    FlatTensorTarget,
    FrozenTarget,
    LocalRowWriter,
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
from ptrain.axes.data.units import ModelRuntime, UnitParts, UnitRuntime, UnitUse, buckets_of
from ptrain.axes.data.update import TensorsUpdate
from ptrain.cost import State
from ptrain.facts.stages import Units
from ptrain.models.ledger import is_recomputing
from ptrain.models.parting import when_left
from ptrain.models.units import ROOT, NamedUnit, named_units
from ptrain.optimizers.update import Scale
from ptrain.runtime.comm import Mesh, TagRegistry
from ptrain.runtime.interface import OptimizerLeaf
from ptrain.runtime.torch import TorchRuntime
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind


class Hooks:
    """The hooks on one unit's modules."""

    def __init__(self, unit: UnitUse[torch.Tensor], modules: Sequence[nn.Module]) -> None:
        self.unit = unit
        # watching inputs changes the operators that run, so it is done only if needed
        self._is_left = unit.frozen is not None and unit.frozen.is_transient
        # a unit's modules run in order: gather before the first, free after the last
        modules[0].register_forward_pre_hook(self._before_forward, with_kwargs=True)
        modules[-1].register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the unit, also if backward recomputes it."""
        is_again = is_recomputing()
        with torch.no_grad():
            self.unit.before_forward(is_again=is_again)
        if is_again or not self._is_left:
            return None
        return when_left((args, kwargs), self._after_backward)

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Free the unit after forward, and register hooks on the gradients of its outputs."""
        if is_recomputing():
            return  # recomputed in backward, whose hooks are in place
        if torch.is_grad_enabled():
            # an input that is passed through gets its gradient only after the unit's backward
            passed = {id(tensor) for tensor in _nested_tensors(args)}
            for tensor in _nested_tensors(output):
                if tensor.requires_grad and id(tensor) not in passed:
                    tensor.register_hook(self._before_backward)
        self.unit.after_forward()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        """Gather the unit when the first gradient of an output arrives."""
        with torch.no_grad():
            self.unit.before_backward()

    def _after_backward(self) -> None:
        """Free frozen parameters when backward has left the unit."""
        with torch.no_grad():
            self.unit.after_backward()


def _register_accumulation_hooks(
    unit: UnitRuntime[torch.Tensor], members: ParameterMembers
) -> None:
    """Call the unit when autograd has accumulated the gradient of a parameter."""
    # a weak reference: autograd keeps hooks in C++, invisible to the garbage collector, and the
    # unit keeps its parameters
    own = ref(unit)
    for index, (_, parameter) in enumerate(members.named):
        parameter.register_post_accumulate_grad_hook(partial(_on_accumulated, own, index))


def _on_accumulated(unit: ref[UnitRuntime[torch.Tensor]], index: int, parameter: object) -> None:
    """Handle a gradient that autograd has accumulated.

    Hooks run with gradients disabled in a backward pass that creates no graph. Disabling them again
    would be a third of the cost per tensor.
    """
    if (own := unit()) is not None:
        own.handle_gradient(index)


class WrappedModel:
    """The interface of all wraps. Defaults are for a full model, or a single stage."""

    module: nn.Module

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a forward pass and the backward pass that follows it."""
        return nullcontext()

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose backward pass is not the next pass."""
        return nullcontext()

    def backward_pass(self, kind: Kind, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of that backward pass, or of one half of it.

        Args:
            kind: The full pass, or the half for inputs or for weights.
            is_last: The step's gradients are complete after it.
        """
        return nullcontext()

    def begin_passes(self) -> None:
        """Start the gathers that a step's passes in a pipeline would wait for."""

    def finish_collectives(self) -> None:
        """Wait for the collectives of this stage's last pass, before the rank's next pass."""

    def end_passes(self) -> None:
        """Wait for the collectives that the passes left."""

    def end_evaluation(self) -> None:
        """Free gathered parameters, which would be stale after an update."""

    def consume_with(self, update: Callable[[int], None]) -> None:
        """Call `update(i)` once the gradients of the i-th group are complete (G = M)."""
        raise AssertionError("gradients are updated from in backward by flat units alone")

    def reduce_gradients(self) -> None:
        """Bring gradients into the layout of the optimizer."""

    def finish_update(self) -> None:
        """Wait for collectives that run after an update."""

    def clear_gradients(self) -> None:
        """Drop or zero all gradients."""
        raise NotImplementedError

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        """Return the update targets in groups, one group per unit."""
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all targets; one tensor may contain several gradients."""
        return gradients_of(self.targets())

    def copied_targets(self) -> Sequence[NamedTarget]:
        """Return the targets of tensors that another stage owns, and counts."""
        return ()

    def canonical_name(self, name: str) -> str:
        """Return the model's name of a tensor or of its optimizer state (`head.weight.exp_avg`)."""
        return name

    def with_wrap_names(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return tensors with the model's names under the wrap's names, too."""
        return dict(named)

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> WrapOptimizer | None:
        """Return the optimizer of the wrap, None if the standard update is used."""
        return None

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield stored parameters and gradients with their states."""
        raise NotImplementedError


class FlatWrap(WrappedModel):
    """The wrap of a model in flat units."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        registry: TagRegistry,
        write: RowWriter | None = None,
    ) -> None:
        """Move the parameters to flat buffers, and register all hooks.

        Args:
            model: The module to wrap.
            plan: The plan, with flat units.
            mesh: The process groups.
            registry: The tags of storages.
            write: Writes initial values, for parameters that have none. It is called unit by unit,
                for the elements that this rank stores.
        """
        step = plan.wrap
        assert isinstance(step, FlatUnits)
        self.module = model
        self.step = step
        room = TorchRuntime(mesh, registry, step.path)
        # A rule that is not elementwise, such as Muon, needs each tensor in full.
        self._by_tensor = not plan.spec.optimizer.is_elementwise
        self._targets: list[Sequence[NamedTarget]] = []
        self._quantized: list[torch.Tensor] = []  # full on every rank, in no buffer
        wrapped = list(parameters_by_unit(model, plan.units))
        buckets = buckets_of(plan, [(modules, _num_trained(named)) for modules, named in wrapped])
        parts = [
            self._create_unit([wrapped[place] for place in bucket], plan, room, write)
            for bucket in buckets
        ]
        self.units = ModelRuntime(parts, step, is_pipelined=plan.pipeline is not None)
        self.hooks = [
            Hooks(unit, [model.get_submodule(name) for name in wrapped[place][0]])
            for unit, bucket in zip(self.units.all, buckets, strict=True)
            for place in bucket
        ]
        for unit in self.units.trained:
            assert isinstance(unit.state, FlatState), "made here"
            _register_accumulation_hooks(unit, unit.state.tensors)

    def _create_unit(
        self,
        joined: Sequence[NamedUnit],
        plan: Plan,
        room: TorchRuntime,
        write: RowWriter | None,
    ) -> UnitParts[torch.Tensor]:
        """Create the state of the units in one bucket."""
        parameters = [pair for _, named in joined for pair in named]
        modules, _ = joined[-1]
        own, layout = plan.wrap_of(modules), plan.update.layout
        assert isinstance(own, FlatUnits)
        trained = [(name, stored_part(p)) for name, p in parameters if p.requires_grad]
        others = [(name, p) for name, p in parameters if not p.requires_grad]
        frozen = [(name, stored_part(p)) for name, p in others if p.is_floating_point()]
        quantized = [(name, p) for name, p in others if not p.is_floating_point()]
        state = FlatState(*_buffer_of(trained, own, room, write), layout, room) if trained else None
        step = own.of_frozen
        kept = FlatFrozen(*_buffer_of(frozen, step, room, write), layout, room) if frozen else None
        targets: list[NamedTarget] = []
        if state is not None:
            targets += _targets(state, whole_tensors=self._by_tensor)
        if kept is not None:
            targets.append(FrozenTarget(kept))
        targets += [ParameterTarget(*pair) for pair in quantized]
        self._quantized += [_fill_parameter(*pair, write) for pair in quantized]
        self._targets.append(targets)
        return UnitParts(
            trained=state,
            frozen=None if kept is None else kept.parameters,
            step=own,
            is_root=modules == (ROOT,),
        )

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Temporarily run one forward and backward pass.

        The last one reduces and reshards whatever the policy is.
        """
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
    def finish_collectives(self) -> None:
        self.units.finish_reduction()

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
        """Return one group of targets per unit, so that one unit at a time is gathered."""
        return self._targets

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        yield from self.units.storages()
        yield from ((State.PARAMETERS, tensor) for tensor in self._quantized)


def _buffer_of(
    named: Sequence[tuple[str, Parameter]],
    step: FlatUnits,
    room: TorchRuntime,
    write: RowWriter | None,
) -> tuple[ParameterMembers, ShardLayout[torch.Tensor], FlatUnits]:
    """Return the parameters that share a buffer, its layout, and the plan step for it."""
    members = ParameterMembers(named)
    numel = sum(parameter.numel() for _, parameter in members.named)
    cuts = ShardLayout(
        room, numel, step.parameters + step.optimizer + step.gradients, step.reduce_scatter
    )
    if write is not None:
        # A rank then fills only the rows that it stores.
        members.values = LocalRowWriter(write, tuple(cuts.shard_ranges(step.parameters)))
    return members, cuts, step


def _fill_parameter(name: str, parameter: nn.Parameter, write: RowWriter | None) -> torch.Tensor:
    """Fill and return a parameter that stays outside of the buffers, with its initial values."""
    tensor = parameter.detach()
    if write is not None:
        tensor.untyped_storage().resize_(tensor.nbytes)
        write(name, parameter, 0, tensor)
    return tensor


def _targets(state: FlatState, *, whole_tensors: bool) -> Sequence[NamedTarget]:
    """Return the targets of a unit: its shard, or each of its tensors."""
    whole = FlatTarget(state)
    if not whole_tensors:
        return [whole]
    update = TensorsUpdate(state)
    return [FlatTensorTarget(update, whole, index) for index in range(len(state.named))]


def _num_trained(parameters: Sequence[tuple[str, nn.Parameter]]) -> int:
    """Return the number of trained elements that this rank stores of the parameters."""
    return sum(stored_part(own).numel() for _, own in parameters if own.requires_grad)


def parameters_by_unit(model: nn.Module, units: Units) -> Iterator[NamedUnit]:
    """Return each unit with its parameters, except earlier units'.

    Units without any are left out.
    """
    return (unit for unit in named_units(model, units) if unit[1])


def _nested_tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested structure."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _nested_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _nested_tensors(value)


class WrapOptimizer(Protocol):
    """An optimizer that is part of a wrap, which decides where its state is stored."""

    def step(self, lr: float, scaling: Scale[torch.Tensor] | None = None) -> None:
        """Update all parameters with this learning rate, unless `scaling` skips it."""

    def tensors(self) -> Iterator[tuple[NamedTarget, dict[str, torch.Tensor]]]:
        """Yield each target with its optimizer state by name."""
        ...

    def leaves(self) -> Iterator[tuple[NamedTarget, OptimizerLeaf[torch.Tensor], slice]]:
        """Yield each target with its leaves in torch's optimizers, and each leaf's elements."""
        ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class ParameterWrap(WrappedModel):
    """A wrap whose parameters stay in the module; on a single device it does all that is needed."""

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
        """Return one group of targets per unit.

        They are read from the module once, before it runs: while FSDP2 has unsharded a unit, the
        module has other parameters than the rank stores.
        """
        if not self._groups:
            self._groups = [
                [
                    ParameterTarget(
                        name,
                        parameter,
                        # a quantized weight is no master
                        owns_master=self.owns_masters and parameter.is_floating_point(),
                    )
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
