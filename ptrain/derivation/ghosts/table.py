"""Selects the simulation of a plan's wrap: the only place that distinguishes kinds of wraps.

It also has the wrapping of flat units, which `derivation.flat` simulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property
from typing import assert_never

from ptrain.axes.data.cost import padded_flat
from ptrain.cost import Collective, Footprint, Phase, State, Traffic, TrafficKey
from ptrain.derivation.flat import (
    SCALE_BYTES,
    Flat,
    cut_axes,
    flat_step_of,
    joined_units,
    places_of,
)
from ptrain.derivation.ghosts.fsdp2_rows import Sharded
from ptrain.derivation.ghosts.in_place import OneDevice, Replicas, SpreadUpdate
from ptrain.derivation.ghosts.wrapping import (
    Times,
    WrapContext,
    Wrapping,
    accumulation_notes,
    kept_root,
    micro_batches,
)
from ptrain.derivation.tape import Account, Scene, Tape
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.runtime.ghost import Ghost
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from ptrain.timeline import Timeline
from ptrain.units import grouped

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
    kinds = grouped(
        ((_unit_kind(spec, unit), plan.is_apart(unit.modules), facts.is_passed_by(unit)), unit)
        for unit in joined_units(plan, facts.units)
        if unit.numel
    )
    return ((units[0], len(units)) for units in kinds.values())


def _unit_kind(spec: Spec, unit: UnitFacts) -> Hashable:
    if spec.optimizer.properties.is_elementwise:
        return (unit.is_root, unit.numel, unit.trained_numel)
    return (unit.is_root, unit.trained_shapes, unit.numel)


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
    """Return the elements of the units' flat buffers, padded for all axes that shard any state.

    Equal sizes are counted.
    """
    buffers = Counter[int]()
    for unit in joined_units(plan, facts.units):
        step = flat_step_of(plan, unit)
        trained, frozen = unit.trained_numel, unit.numel - unit.trained_numel
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
        if more := sum(size * times for size, times in buffers.items()) - facts.numel:
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
    """Return the simulation of the wrap of a model, or of one stage's part of it."""
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
