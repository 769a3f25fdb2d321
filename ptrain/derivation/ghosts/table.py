"""Selects the simulation of a plan's wrap: the only place that distinguishes kinds of wraps.

It also has the wrappings of flat units, which `derivation.flat` simulates, and of FSDP2. FSDP2
shards tensors by rows, padded to equal shards, or along a later dimension. `ghosts.fsdp2` simulates
one unit of each kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum, auto
from functools import cached_property
from typing import assert_never

from ptrain.axes.data.cost import GatherCounts, count_reductions, local_rows, padded_flat
from ptrain.cost import Collective, Footprint, Phase, State, Traffic, TrafficKey
from ptrain.derivation.flat import (
    SCALE_BYTES,
    Flat,
    cut_axes,
    flat_step_of,
    joined_units,
    places_of,
)
from ptrain.derivation.ghosts.fsdp2 import FullySharded, UnitShards, index_over, shards_of
from ptrain.derivation.ghosts.in_place import InPlace, OneDevice, Replicas, SpreadUpdate
from ptrain.derivation.ghosts.wrapping import (
    Times,
    WrapContext,
    Wrapping,
    accumulation_notes,
    kept_root,
    micro_batches,
    state_rows,
)
from ptrain.derivation.tape import Account, Scene, Tape
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.optimizers.groups import rules_of_unit
from ptrain.runtime.ghost import Ghost
from ptrain.runtime.interface import Shape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from ptrain.timeline import Complete, Timeline
from ptrain.units import group_by_key

# Memory and traffic of flat units in one steady step: one unit of each kind is simulated, and its
# figures count for all units of its kind.


Sizes = Counter[tuple[State, Tier]]

_NOTHING = Timeline(forward=(), backward=())  # a unit's traffic does not depend on others
_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def _footprints(sizes: Sizes) -> Iterator[Footprint]:
    """Yield the rows of parameters, optimizer state and gradients."""
    for state in _STATES:
        yield Footprint(
            state=state,
            rank=0,
            device_bytes=sizes[state, Tier.DEVICE],
            host_bytes=sizes[state, Tier.HOST],
            file_bytes=sizes[state, Tier.FILE],
        )


def _unit_kinds(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[tuple[UnitFacts, int]]:
    """Yield one unit of each kind, with the number of equal units."""
    kinds = group_by_key(
        ((_unit_kind(spec, unit), plan.is_apart(unit.modules), facts.is_passed_by(unit)), unit)
        for unit in joined_units(plan, facts.units)
        if unit.numel
    )
    return ((units[0], len(units)) for units in kinds.values())


def _unit_kind(spec: Spec, unit: UnitFacts) -> Hashable:
    sizes = unit.numel, unit.trained_numel, unit.quantized_numel
    if spec.optimizer.is_elementwise and spec.optimizer.is_uniform:
        return (unit.is_root, unit.stays_by_default, *sizes)
    rules = rules_of_unit(spec.optimizer, unit)
    return (unit.is_root, unit.stays_by_default, unit.trained_shapes, *sizes, rules)


def _play_unit(
    spec: Spec,
    plan: Plan,
    wrap: FlatUnits,
    facts: ModelFacts,
    unit: UnitFacts,
    account: Account,
) -> Sizes:
    """Simulate a step of a unit and return the bytes it keeps.

    Gradients are counted at the end of the last backward pass, other states at the end of the step.
    """
    tape = Tape(account=account)
    scene = Scene(tape=tape, spec=spec, facts=facts, plan=plan, timeline=_NOTHING)
    flat = Flat(scene, wrap, chosen=[unit])
    times = account.times
    for is_first, is_last, repeated in micro_batches(plan.accumulate.micro_batches):
        account.times = times * repeated
        flat.begin(is_first=is_first, is_last=is_last)
        tape.enter(Phase.FORWARD)
        flat.enter(0)
        flat.leave(0)
        tape.enter(Phase.BACKWARD)
        if not facts.is_passed_by(unit):
            flat.before_backward(0)
        flat.end()
        flat.end_passes()
    account.times = times
    gradients = _sum_storages(pair for pair in flat.storages() if pair[0] is State.GRADIENTS)
    tape.enter(Phase.UPDATE)
    flat.reduce()
    flat.update(0)
    flat.finish_update()
    return gradients + _sum_storages(flat.storages())


def _sum_storages(held: Iterable[tuple[State, Ghost]]) -> Sizes:
    """Return the bytes of storages by state and tier, each storage counted once."""
    storages = {id(ghost.storage): (state, ghost.storage) for state, ghost in held}
    sizes = Sizes()
    for state, storage in storages.values():
        sizes[state, storage.tier] += storage.size
    return sizes


def flat_buffers(spec: Spec, plan: Plan, facts: ModelFacts) -> Counter[int]:
    """Return the elements of the units' flat buffers.

    Args:
        spec: A resolved spec.
        plan: A plan of flat units.
        facts: The facts of the model or stage.

    Returns:
        The number of buffers by size. Sizes are elements, padded for all axes that shard any state.
        Trained and frozen parameters have separate buffers.
    """
    buffers = Counter[int]()
    for unit in joined_units(plan, facts.units):
        step = flat_step_of(plan, unit)
        trained = unit.trained_numel
        frozen = unit.numel - trained - unit.quantized_numel
        for numel, own in ((trained, step), (frozen, step.of_frozen)):
            buffers[padded_flat(numel, ranks_over(spec, cut_axes(own)))] += bool(numel)
    return +buffers


def _scalar_copies(collective: Collective, calls: int, size: int) -> Traffic:
    key = TrafficKey(axes=(), collective=collective, state=State.GRADIENTS, phase=Phase.UPDATE)
    return Traffic(key=key, calls=calls, payload_bytes=calls * size, sent_bytes=0)


class Units(Wrapping):
    """A model that is wrapped in flat units."""

    def __init__(self, wrapped: WrapContext, step: FlatUnits) -> None:
        self.wrapped, self.step = wrapped, step
        units = wrapped.facts.units
        is_joined = len(places_of(wrapped.plan, units)) < len(units)
        # A unit affects the previous unit, whose reduction it awaits, the prefetched units, and the
        # unit that is read from a file. Joined units are gathered together: their reach is unknown.
        self.reach = None if is_joined else 1 + step.prefetch + step.reads_files

    @cached_property
    def _rows(self) -> tuple[tuple[Footprint, ...], tuple[Traffic, ...]]:
        """The memory rows, which are equal on all ranks, and the traffic and copies."""
        spec, plan, facts = self.wrapped
        sizes, sent = Sizes(), list[Traffic]()
        for unit, times in _unit_kinds(spec, plan, facts):
            account = Account(spec, times)
            for key, size in _play_unit(spec, plan, self.step, facts, unit, account).items():
                sizes[key] += times * size
            sent += account.rows
        sizes[State.PARAMETERS, Tier.DEVICE] += facts.quantized_numel
        return tuple(_footprints(sizes)), tuple(sent)

    def make_wrap(self, scene: Scene) -> Flat:
        return Flat(scene, self.step)

    def footprints(self, shard: int) -> Iterator[Footprint]:
        yield from self._rows[0]

    def traffic(self, times: Times | None) -> Iterator[Traffic]:
        """Yield the traffic of all units.

        `times` has no effect: in a pipeline, units are freed after every pass or after none
        (`axes.pipeline.rules`), so the order of passes does not matter.
        """
        yield from self._rows[1]

    def scalar_copies(self) -> Iterator[Traffic]:
        """Yield the copies of scalars that gradients on the host need.

        The norm is copied to the device to be reduced, and back. With loss scaling, the overflow
        flag is copied to the device. It is copied back, with the loss scale, if the host clips or
        updates.
        """
        plan, step = self.wrapped.plan, self.step
        layout, on_host = plan.update.layout, step.gradients_tier is not Tier.DEVICE
        if step.consumed:
            return
        if plan.clip is not None and plan.clip.reduced_axes and on_host:
            norm = max(SCALE_BYTES, layout.gradients.itemsize)
            yield _scalar_copies(Collective.HOST_TO_DEVICE, 1, norm)
            yield _scalar_copies(Collective.DEVICE_TO_HOST, 1, norm)
        if layout.scales_loss:
            if on_host:
                yield _scalar_copies(Collective.HOST_TO_DEVICE, 1, SCALE_BYTES)
            if step.update_tier is not Tier.DEVICE or (plan.clip is not None and on_host):
                yield _scalar_copies(Collective.DEVICE_TO_HOST, 2, SCALE_BYTES)

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        trained = UnitFacts(modules=unit.modules, tensors=unit.trained)
        spec, plan, alone = self.wrapped.spec, self.wrapped.plan, ModelFacts(units=(trained,))
        step = flat_step_of(plan, unit)
        kept = (*step.updated, *step.gathered_gradients)
        yield sum(flat_buffers(spec, plan, alone).elements()) // ranks_over(spec, kept)

    def notes(self) -> Iterator[str]:
        yield from accumulation_notes(self.wrapped)
        yield from kept_root(self.wrapped)
        yield from self._update_notes()
        facts = self.wrapped.facts
        buffers = flat_buffers(self.wrapped.spec, self.wrapped.plan, facts)
        held = facts.numel - facts.quantized_numel  # quantized weights are in no buffer
        if more := sum(size * times for size, times in buffers.items()) - held:
            elements_more = f"{more} element{'' if more == 1 else 's'} more"
            yield f"flat units are padded: {elements_more} than in the model"

    def _update_notes(self) -> Iterator[str]:
        """Yield notes on the traffic of the update."""
        wrap = self.step
        axes = [axis for axis in wrap.updated if axis not in wrap.parameters]
        if axes:
            yield (
                f"parameters are full and the optimizer is sharded on {', '.join(axes)}: "
                "each rank updates its shard, and updated parameters are all-gathered, r|Θ|, "
                "which Theorem 2 as printed omits"
            )
        if wrap.consumed:
            yield (
                "gradients are M: a unit is reduced and updated as soon as its gradients are "
                "complete, so the gradients of at most one unit exist at a time"
            )
        late = [axis for axis in wrap.updated if axis not in wrap.gradients]
        if late and not wrap.consumed:
            yield (
                f"gradients are R and the optimizer is sharded on {', '.join(late)}: a "
                "reduce-scatter before the update replaces the all-reduce, r|G| instead of "
                "2r|G|; gradients keep their full size, and only the local shard holds the "
                "sum"
            )
        whole = [axis for axis in wrap.optimizer if axis not in wrap.updated]
        if whole:
            yield (
                f"optimizer state is all-gathered over {', '.join(whole)} for the update, "
                "r|Ω| unit by unit, and every rank computes the same full update"
            )
        wider = [axis for axis in wrap.gradients if axis not in wrap.updated]
        if wider:
            yield (
                f"gradients are sharded on {', '.join(wider)} and all-gathered for the "
                "update, which needs them in full, r|G|"
            )


def make_wrapping(spec: Spec, plan: Plan, facts: ModelFacts) -> Wrapping:
    """Return the simulation of the wrap of a model, or of one stage's part of it.

    Args:
        spec: A resolved spec.
        plan: The plan, whose wrap selects the class.
        facts: One rank's part of the model or stage, with the local shapes of tp.
    """
    wrapped = WrapContext(spec=spec, plan=plan, facts=facts)
    match plan.wrap:
        case LocalGradients():
            return OneDevice(wrapped)
        case Replicate(zero_redundancy=True) as step:
            return SpreadUpdate(wrapped, step)
        case Replicate() as step:
            return Replicas(wrapped, step)
        case FullyShard() as step:
            return Sharded(wrapped, step)
        case FlatUnits() as step:
            return Units(wrapped, step)
        case step:
            assert_never(step)


class UnitTurn(Enum):
    """How the passes use a unit: in forward and backward, or in forward only. In the second case,
    backward may still prefetch the unit, because it is next in order."""

    BACK_AND_FORTH = auto()
    FORTH = auto()
    GATHERED_FOR_NOBODY = auto()


class Sharded(InPlace):
    """A model that FSDP2 shards by rows, with or without replicas."""

    def __init__(self, wrapped: WrapContext, step: FullyShard) -> None:
        super().__init__(wrapped)
        self.step, self.owns_master = step, step.materialized
        self.ranks = ranks_over(wrapped.spec, step.shard_axes)
        # prefetched units, and the previous one, whose gather buffer or reduction input is freed
        self.reach = 1 + (1 if step.prefetch is None else step.prefetch)

    def make_wrap(self, scene: Scene) -> FullySharded:
        return FullySharded(scene, self.step, self)

    @cached_property
    def _passed_by(self) -> tuple[UnitFacts, ...]:
        """The units that backward skips: frozen units before all trained ones."""
        facts = self.wrapped.facts
        return tuple(unit for unit in facts.units if facts.is_passed_by(unit))

    def turn_of(self, unit: UnitFacts) -> UnitTurn:
        if unit not in self._passed_by:
            return UnitTurn.BACK_AND_FORTH
        ahead = (1 if self.step.prefetch is None else self.step.prefetch) * self.step.overlaps
        number = len(self._passed_by) - self._passed_by.index(unit)
        return UnitTurn.GATHERED_FOR_NOBODY if number <= ahead else UnitTurn.FORTH

    def _shards(self, unit: UnitFacts) -> UnitShards:
        return shards_of(self.wrapped.spec, self.wrapped.plan, unit)

    def _shard_index(self, shards: UnitShards, shard: int) -> int:
        return index_over(self.wrapped.spec, self.wrapped.plan, shards, shard)

    @cached_property
    def _heights(self) -> list[tuple[Shape, UnitShards]]:
        """The numbers of rows that shards do not divide evenly, each as a shape, with the shards of
        its unit."""
        shards = [(unit, self._shards(unit)) for unit, _ in self.kinds]
        heights = {
            (shape[:1], own)
            for unit, own in shards
            for shape in unit.shapes
            if not own.shard_dim(shape)
        }
        uneven = ((height, own) for height, own in heights if math.prod(height) % own.ranks)
        return sorted(uneven, key=lambda pair: (pair[0], pair[1].ranks))

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the rows that the shard has of tensors of each uneven height."""
        return self._shard_kinds[shard]

    @cached_property
    def _shard_kinds(self) -> list[tuple[int, ...]]:
        """By shard, the rows that it has of tensors of each uneven height."""
        rows = (
            [
                local_rows(
                    height, own.ranks, n if own.ranks == self.ranks else self._shard_index(own, n)
                )
                for n in range(self.ranks)
            ]
            for height, own in self._heights
        )
        return list(zip(*rows, strict=True)) or [()] * self.ranks

    @cached_property
    def stored_elements(self) -> int:
        """The elements of one rank's part of all tensors, including padding and without quantized
        weights."""
        padded = sum(times * self._padded_elements(unit) for unit, times in self.kinds)
        return padded - self.quantized_bytes

    @cached_property
    def quantized_bytes(self) -> int:
        """The bytes of one rank's part of all quantized weights, including padding."""
        return sum(
            times * self._shards(unit).padded_elements(tensor.shape)
            for unit, times in self.kinds
            for tensor in unit.frozen
            if tensor.num_quantized
        )

    def _padded_elements(self, unit: UnitFacts) -> int:
        """Return the elements of one rank's part of a unit, including padding."""
        return sum(map(self._shards(unit).padded_elements, unit.shapes))

    @cached_property
    def stored_gradients(self) -> int:
        """The elements of one rank's gradients, which are views of the padded reduction."""
        return sum(
            times * sum(map(self._shards(unit).padded_elements, unit.trained_shapes))
            for unit, times in self.kinds
        )

    def updated_shapes(self, unit: UnitFacts, shard: int) -> tuple[Shape, ...]:
        shards = self._shards(unit)
        index = self._shard_index(shards, shard)
        return tuple(shards.local_shape(shape, index) for shape in unit.trained_shapes)

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout, stored = self.wrapped.plan.update.layout, self.stored_elements
        optimizer = self.optimizer_bytes(shard)
        parameters = stored * layout.parameters.itemsize
        # FSDP2 stores only the shards, in the dtype of the masters. The parameters in the dtype of
        # compute exist only while a unit is gathered.
        if self.owns_master:  # the shards are the master copies
            assert layout.master is not None
            parameters, optimizer = 0, optimizer + stored * layout.master.itemsize
        parameters += self.quantized_bytes
        return state_rows(parameters, optimizer, self.stored_gradients * layout.gradients.itemsize)

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        yield from (
            sum(map(math.prod, self.updated_shapes(unit, shard))) for shard in range(self.ranks)
        )

    def traffic(self, times: Times | None) -> Iterator[Traffic]:
        """Yield the traffic, by simulating one unit of each kind."""
        for unit, number in self.kinds:
            if not unit.tensors:
                continue
            account = Account(self.wrapped.spec, number)
            scene = self.wrapped.make_scene((unit,), account)
            player = _Alone(self.make_wrap(scene), unit, account, self.turn_of(unit))
            if times is None:
                player.in_turn(self.wrapped.plan.accumulate.micro_batches)
            else:
                count = count_reductions(self.step.sync, self.wrapped.plan.accumulate.micro_batches)
                player.by_count(times(self.step.sync, is_root=unit.stays_by_default), count)
            yield from account.rows

    def notes(self) -> Iterator[str]:
        yield from accumulation_notes(self.wrapped)
        shards = self.step.sync.after_forward(is_root=False)
        if not isinstance(shards, bool):
            yield (
                f"between forward and backward, a unit is sharded over {shards} ranks "
                f"instead of {self.ranks}: backward all-gathers it over {shards} ranks and "
                f"sends {shards - 1}/{shards} of it"
            )
        yield from kept_root(self.wrapped)
        numel = self.wrapped.facts.numel
        padded = sum(
            n * self._shards(unit).ranks * self._padded_elements(unit) for unit, n in self.kinds
        )
        if padded > numel:
            yield (
                f"each tensor is sharded by rows, ceil(d0 / {self.ranks}) on every rank: "
                f"{padded / numel - 1:.2%} more than in the model"
            )


class _Alone:
    """A step of one unit, counted as often as the account specifies."""

    def __init__(
        self, player: FullySharded, unit: UnitFacts, account: Account, turn: UnitTurn
    ) -> None:
        self.player, self.unit, self.account, self.turn = player, unit, account, turn
        self.tape, self.units = player.tape, account.times

    def in_turn(self, count: int) -> None:
        """Run micro-batches that go forward and backward one at a time."""
        for is_first, is_last, repeated in micro_batches(count):
            self.account.times = self.units * repeated
            self.player.begin(is_first=is_first, is_last=is_last)
            self._forward()
            self._gather_again()
            self._reduce()

    def by_count(self, gathers: GatherCounts, reductions: int) -> None:
        """Run micro-batches in flight together. Each call runs as often as in their schedule."""
        self.account.times = self.units * gathers.forward
        self._forward()
        self.account.times = self.units * gathers.backward
        # In a pipeline, forward and backward of a micro-batch do not alternate, so the counts are
        # independent of whether this forward left the unit gathered.
        self.player.gathers.reshard(0)  # another micro-batch freed it
        self._gather_again()
        self.account.times = self.units * reductions
        self.player.begin(is_first=True, is_last=True)
        self._reduce()

    def _forward(self) -> None:
        self.tape.enter(Phase.FORWARD)
        self.player.enter(0)
        self.player.leave(0)

    def _gather_again(self) -> None:
        self.tape.enter(Phase.BACKWARD)
        # `_backward_prefetch` takes the previous entry of `post_forward_order`, whether or not
        # backward reaches that unit. A frozen unit next to a trained one is therefore gathered
        # without use.
        if self.turn is UnitTurn.BACK_AND_FORTH:
            self.player.before_backward(0)
        elif self.turn is UnitTurn.GATHERED_FOR_NOBODY:
            self.player.gathers.gather_ahead(0)

    def _reduce(self) -> None:
        for tensor in self.unit.trained:
            self.player.complete(Complete(tensor.name, tensor.numel * self.player.e_parameters))
        self.player.after_backward(0)
