"""Peaks by replay: a model's timeline for K micro-batches, interleaved with the plan's own
allocations, and what of it is activations and gathered units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

from ptrain.algebra.layout import position
from ptrain.costs import Footprint, Peak, Phase, State
from ptrain.derivation import activations
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.flat_wrap import Flat
from ptrain.derivation.fully_sharded import FullySharded
from ptrain.derivation.memory import differing_axes, resident
from ptrain.derivation.tape import Scene, Tape, Wrap
from ptrain.derivation.wraps import Local, Replicated, clip
from ptrain.errors import PtrainError
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Mark, Run, Timeline

_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # what lives for the whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`saved_bytes` and `transient_bytes` at the end of the last micro-batch's forward, alike on
    all ranks; `peaks` by phase and rank; `timeline` is what was played."""

    timeline: Timeline
    saved_bytes: int
    transient_bytes: int
    peaks: tuple[Peak, ...]


def replay(
    spec: Spec, facts: ModelFacts, plan: Plan, base: tuple[Footprint, ...] | None = None
) -> Replay:
    """One steady step. `base` are the resident rows, if they are known already."""
    tape = Tape()
    timeline = model_timeline(spec, facts)
    scene = Scene(tape=tape, spec=spec, facts=facts, plan=plan, timeline=timeline)
    wrap = wrap_of(scene)
    transient = 0
    for index in _micro_batches(plan.accumulate.micro_batches):
        is_last = index == plan.accumulate.micro_batches - 1
        wrap.begin(is_first=index == 0, is_last=is_last)
        tape.enter(Phase.FORWARD)
        play(timeline.forward, tape, wrap)
        transient = wrap.gathered()
        tape.enter(Phase.BACKWARD)
        play(timeline.backward, tape, wrap)
    tape.enter(Phase.UPDATE)
    return Replay(
        timeline=timeline,
        saved_bytes=timeline.saved_bytes,
        transient_bytes=transient,
        peaks=_peaks(scene, wrap, resident(spec, plan, facts) if base is None else base),
    )


def model_timeline(spec: Spec, facts: ModelFacts) -> Timeline:
    """One micro-batch of the model: from the facts where they were traced, else from a table."""
    if facts.timeline is not None:
        return facts.timeline
    if not isinstance(spec.model, ModelShape) or not activations.is_tabulated(spec):
        raise PtrainError("model: its activations are known only from a trace of the model itself")
    return activations.timeline(
        spec.model,
        facts.unit_modules,
        batch=spec.batch.micro,
        sequence=spec.batch.sequence,
        compute=spec.precision.effective.parameters,
        kept=spec.activations.of(spec.model.layers),
        loss=spec.loss,
    )


def _micro_batches(count: int) -> tuple[int, ...]:
    """After the second micro-batch everything repeats until the last one."""
    return tuple(range(count)) if count <= 3 else (0, 1, count - 1)


def wrap_of(scene: Scene) -> Wrap:
    step = scene.plan.wrap
    match step:
        case LocalGradients():
            return Local(scene)
        case Replicate():
            return Replicated(scene)
        case FullyShard():
            return FullySharded(scene, step)
        case FlatUnits():
            return Flat(scene, step)
        case _:
            assert_never(step)


def play(items: Iterable[Item], tape: Tape, wrap: Wrap) -> None:
    at = {
        Mark.ENTER: wrap.enter,
        Mark.LEAVE: wrap.leave,
        Mark.PRE_BACKWARD: wrap.before_backward,
        Mark.POST_BACKWARD: wrap.after_backward,
    }
    for item in items:
        if isinstance(item, Run):
            tape.spike(item.rise)
            tape.level += item.net
        elif isinstance(item, Complete):
            wrap.complete(item)
        elif isinstance(item, Boundary):
            at[item.mark](item.unit)
        else:
            assert_never(item)


def play_update(wraps: Sequence[Wrap], shard: int) -> None:
    """Reduce what is partial, one norm over all, and the optimizer, on the rank with this shard."""
    for wrap in wraps:
        wrap.reduce()
    norms = [found for wrap in wraps if (found := wrap.clipped(shard)) is not None]
    scene = wraps[0].scene
    if scene.plan.clip is not None and norms:
        clip(scene, [list(chain.from_iterable(of_group)) for of_group in zip(*norms, strict=True)])
    for wrap in wraps:
        wrap.update(shard)
    for wrap in wraps:
        wrap.finish_update()


def _peaks(scene: Scene, wrap: Wrap, base: tuple[Footprint, ...]) -> tuple[Peak, ...]:
    """The update differs by the rows that a rank holds, and so does what lives always."""
    tape = scene.tape
    axes = differing_axes(scene.plan.wrap)
    level = tape.level
    lives = dict.fromkeys(range(scene.spec.world_size), 0)
    for row in base:
        if row.state in _BASE:
            lives[row.rank] += row.device_bytes
    by_shard: dict[int, dict[Phase, int]] = {}
    peaks = []
    for rank, size in lives.items():
        shard = position(scene.spec, rank, axes)
        if shard not in by_shard:
            tape.level = tape.peak = level
            play_update([wrap], shard)
            by_shard[shard] = {**tape.peaks, Phase.UPDATE: tape.peak}
        peaks += [
            Peak(phase=phase, rank=rank, device_bytes=size + above)
            for phase, above in by_shard[shard].items()
        ]
    return tuple(peaks)
