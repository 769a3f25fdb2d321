"""Traffic of flat units in one steady step: one unit of each kind is played through it, and what it
sends and copies counts for all of its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from ptrain.costs import Collective, Phase, State, Traffic, TrafficKey
from ptrain.derivation.flat_bench import Bench
from ptrain.derivation.flat_wrap import SCALE_BYTES, Flat
from ptrain.derivation.optimizer_state import needs_whole_tensors
from ptrain.derivation.tape import Scene, Tape
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.plan.step import FlatUnits, Plan
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Timeline

_NOTHING = Timeline(forward=(), backward=())  # that a unit sends depends on no other's turn


def flat_sent(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Iterator[Traffic]:
    """Collectives and copies between tiers of all units."""
    kinds = [_kind(spec, unit) for unit in facts.units]
    times = Counter(kinds)
    for kind, unit in dict(zip(kinds, facts.units, strict=True)).items():
        if unit.numel:
            yield from _of_unit(spec, plan, wrap, facts, unit, times[kind])


def _kind(spec: Spec, unit: UnitFacts) -> Hashable:
    """Units of a kind send the same."""
    if not needs_whole_tensors(spec.optimizer):
        return (unit.is_root, unit.numel)
    return (unit.is_root, tuple(tensor.shape for tensor in unit.tensors))


def _of_unit(
    spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts, unit: UnitFacts, times: int
) -> list[Traffic]:
    tape, account = Tape(), list[Traffic]()
    bench = Bench(tape=tape, spec=spec, plan=plan, step=wrap, account=account)
    scene = Scene(tape=tape, spec=spec, facts=facts, plan=plan, timeline=_NOTHING)
    flat = Flat(scene, wrap, bench=bench, chosen=[unit])
    (only,) = flat.used
    for is_first, is_last, repeated in _micro_batches(plan.accumulate.micro_batches):
        bench.times = times * repeated
        flat.begin(is_first=is_first, is_last=is_last)
        tape.enter(Phase.FORWARD)
        flat.enter(0)
        flat.leave(0)
        tape.enter(Phase.BACKWARD)
        flat.before_backward(0)
        only.pending = 0
        flat.finish(only)
        flat.end()
    bench.times = times
    tape.enter(Phase.UPDATE)
    flat.reduce()
    flat.update(0)
    flat.finish_update()
    return account


def _micro_batches(count: int) -> Iterator[tuple[bool, bool, int]]:
    """(is first, is last, how many like this): after the first, all are alike but the last."""
    yield True, count == 1, 1
    if count > 2:
        yield False, False, count - 2
    if count > 1:
        yield False, True, 1


def scalars(plan: Plan, wrap: FlatUnits) -> Iterator[Traffic]:
    """What gradients on the host have to do with scalars on the device: the norm goes there to be
    reduced and comes back; whether a gradient overflowed goes there, and comes back with the scale
    of the loss where the host clips or updates."""
    layout, on_host = plan.update.layout, wrap.gradients_tier is not Tier.DEVICE
    if wrap.consumed:
        return
    if plan.clip is not None and plan.clip.axes and on_host:
        norm = max(SCALE_BYTES, layout.gradients.itemsize)
        yield _copies(Collective.HOST_TO_DEVICE, 1, norm)
        yield _copies(Collective.DEVICE_TO_HOST, 1, norm)
    if layout.scales_loss:
        if on_host:
            yield _copies(Collective.HOST_TO_DEVICE, 1, SCALE_BYTES)
        if wrap.update_tier is not Tier.DEVICE or (plan.clip is not None and on_host):
            yield _copies(Collective.DEVICE_TO_HOST, 2, SCALE_BYTES)


def _copies(collective: Collective, calls: int, size: int) -> Traffic:
    key = TrafficKey(axes=(), collective=collective, state=State.GRADIENTS, phase=Phase.UPDATE)
    return Traffic(key=key, calls=calls, payload_bytes=calls * size, sent_bytes=0)
