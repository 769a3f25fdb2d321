"""Peaks by replay: a model's timeline for K micro-batches, interleaved with the plan's own
allocations, and what of it is activations and gathered units.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple, assert_never

from ptrain.by_rank import ByRank, KeyT, rows_by_rank
from ptrain.cost import Footprint, Peak, Phase, State, StepTime
from ptrain.derivation import layers as layer_tables
from ptrain.derivation.clock import Clock, ClockState
from ptrain.derivation.computing import Computing, PassScore, Timing
from ptrain.derivation.ghosts.clipping import clip, norm_bytes
from ptrain.derivation.ghosts.wrapping import Wrapping, micro_batches
from ptrain.derivation.layers import Representatives, represent
from ptrain.derivation.memory import resident, sum_in_time
from ptrain.derivation.tables import RankCut, setting_of
from ptrain.derivation.tape import Marks, Scene, Tape, TooLarge, Wrap
from ptrain.errors import PtrainError
from ptrain.facts.model import ModelFacts
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec, positions
from ptrain.timeline import Boundary, Complete, Item, Kind, Mark, Repeated, Run, Timeline
from ptrain.units import grouped

Phases = Mapping[Phase, int]

_WHOLE = RankCut()
_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # what lives for the whole step


class Slowest:
    """The rank that takes longest, of several that one clock plays in turn from the same moment.
    Without a clock nothing happens."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._start = clock.moment() if clock else None
        self._end: ClockState | None = None
        self._most = -1.0

    def begin(self) -> None:
        """Set the clock back to the moment at which all ranks start."""
        if self._clock is not None and self._start is not None:
            self._clock.back_to(self._start)

    def end(self) -> None:
        """Keep the moment at which this rank ends, if it is the latest."""
        if self._clock is not None and self._clock.seconds > self._most:
            self._most, self._end = self._clock.seconds, self._clock.moment()

    def stay(self) -> None:
        """Set the clock to the latest end, after the last rank."""
        if self._clock is not None and self._end is not None:
            self._clock.back_to(self._end)


class Replay(NamedTuple):
    """`saved` and `transient_bytes` at the end of a forward pass, alike on all ranks: that of the
    micro-batch that leaves most, and of the last one; `peaks` by phase and rank; `timelines` is
    what was played, by micro-batch where these differ; `step` is the step's time, where a clock
    went along."""

    timelines: tuple[Timeline, ...]
    saved: Timeline
    transient_bytes: int
    peaks: ByRank[Peak]
    step: StepTime | None = None


def replay(
    ghost: Wrapping,
    base: ByRank[Footprint] | None = None,
    cut: RankCut = _WHOLE,
    timing: Timing | None = None,
    limit: float = inf,
) -> Replay:
    """One steady step. `base` are the resident rows, if they are known already; `cut` is how the
    layers of a built-in model are; where `timing` is given its clock goes along. Raises TooLarge
    for a peak above `limit`."""
    spec, facts, plan = ghost.wrapped.spec, ghost.wrapped.facts, ghost.wrapped.plan
    base = resident(ghost) if base is None else base
    tape = Tape(clock=timing.clock if timing else None, most=least_above(base, limit))
    reach = None if timing and timing.plays_all else ghost.reach
    played = _represent(spec, facts, reach)
    timeline = model_timeline(spec, facts, played, cut)
    scene = Scene(
        tape=tape, spec=spec, facts=facts, plan=plan, timeline=timeline, representatives=played
    )
    wrap = ghost.player(scene)
    seed = seed_bytes(plan.update.layout)
    scores = timing.scores(scene) if timing else {}
    transient = 0

    def micro_batch(timeline: Timeline, *, is_first: bool, is_last: bool) -> None:
        nonlocal transient
        wrap.begin(is_first=is_first, is_last=is_last)
        tape.enter(Phase.FORWARD)
        play_pass(timeline.forward, tape, wrap, scores.get(Kind.FORWARD))
        transient = wrap.gathered()
        tape.enter(Phase.BACKWARD)
        tape.level -= seed
        play_pass(timeline.backward, tape, wrap, scores.get(Kind.BACKWARD))
        tape.level += seed

    timelines = facts.micro_batches or (timeline,)
    if len(timelines) > 1:
        for number, own in enumerate(timelines):
            micro_batch(own, is_first=not number, is_last=number == len(timelines) - 1)
    else:  # after the second micro-batch everything repeats until the last one
        for is_first, is_last, times in micro_batches(plan.accumulate.micro_batches):
            tape.in_time(times, partial(micro_batch, timeline, is_first=is_first, is_last=is_last))
    tape.enter(Phase.UPDATE)
    return Replay(
        timelines=timelines,
        saved=max(reversed(timelines), key=lambda own: own.saved_bytes),
        transient_bytes=transient,
        peaks=_peaks(scene, wrap, base),
        step=tape.clock.step_time() if tape.clock else None,
    )


def seed_bytes(layout: Layout) -> int:
    """Return the bytes of a trace's seed that backward does not allocate: of a scaled loss it
    begins with the scale, which lives for the whole run, in place of torch's 1. The loss and the
    scale are fp32, unless the model computes in fp64, and the scale is cast."""
    is_own = layout.scales_loss and layout.parameters is not DType.FP64
    return DType.FP32.itemsize if is_own else 0


def _represent(spec: Spec, facts: ModelFacts, reach: int | None) -> Representatives | None:
    """Who is played; None where a trace has every block."""
    if facts.timeline is not None or not isinstance(spec.model, ModelShape):
        return None
    return represent(spec, facts.units, [f"blocks.{i}" for i in range(spec.model.layers)], reach)


def model_timeline(
    spec: Spec, facts: ModelFacts, played: Representatives | None, cut: RankCut
) -> Timeline:
    """One micro-batch of those units of the model that are played: from the facts where they were
    traced, else from a table."""
    if facts.timeline is not None:
        return facts.timeline
    if (
        played is None
        or not isinstance(spec.model, ModelShape)
        or not layer_tables.is_tabulated(spec)
    ):
        raise PtrainError("model: the activations of this model are known only from a trace")
    kept = spec.activations.of(spec.model.layers)
    return layer_tables.timeline(setting_of(spec, cut), played, kept)


def play_pass(items: Sequence[Item], tape: Tape, wrap: Marks, score: PassScore | None) -> None:
    """Play a pass, and what the model computes in it."""
    if score is None or tape.clock is None:
        play(items, tape, wrap)
        return
    computing = Computing(wrap, tape.clock, score)
    play(items, tape, computing)
    computing.finish()


def play(items: Iterable[Item], tape: Tape, wrap: Marks) -> None:
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
        elif isinstance(item, Repeated):
            tape.repeat(item.times, partial(play, item.items, tape, wrap))
        else:
            assert_never(item)


def play_update(wraps: Sequence[Wrap], shards: Iterable[int]) -> dict[int, int]:
    """Reduce what is partial, one norm over all, and the optimizer: the peak on the rank with each
    of `shards`. Of flat units an update leaves nothing to play another with; it is alike on all
    ranks, but for the norms before it."""
    scene = wraps[0].scene
    tape = scene.tape
    for wrap in wraps:
        wrap.reduce()
    shards = [*shards]
    kinds = zip(*(map(wrap.kind_of_shard, shards) for wrap in wraps), strict=True)
    alike = grouped(zip(kinds, shards, strict=True))
    clipped = {shard: [wrap.clipped(shard) for wrap in wraps] for shard, *_ in alike.values()}
    clips = {shard: norm_bytes(scene, groups) for shard, groups in clipped.items()}
    before, reduced = tape.level, tape.peak
    is_alike = any(wrap.updates_alike for wrap in wraps)
    slowest = Slowest(tape.clock)
    peaks: dict[int, int] = {}
    for (shard, (at_once, stays)), all_of_kind in zip(clips.items(), alike.values(), strict=True):
        if not (peaks and is_alike):
            tape.level = tape.peak = before + stays
            slowest.begin()
            clip(scene, clipped[shard])
            if tape.clock is not None:
                tape.clock.agree()
            for wrap in wraps:
                wrap.update(shard)
            for wrap in wraps:
                wrap.finish_update()
            sum_in_time(scene.plan, tape, [wrap.scene.facts for wrap in wraps])
            slowest.end()
        peaks |= dict.fromkeys(all_of_kind, max(reduced, before + at_once, tape.peak))
    slowest.stay()
    return peaks


def always(base: ByRank[Footprint]) -> list[int]:
    """Return by rank the device bytes that live for the whole step."""
    return base.totals(lambda row: row.device_bytes if row.state in _BASE else 0)


def least_above(base: ByRank[Footprint], limit: float) -> float:
    """Return how many bytes above what lives always are too many on every rank. Raises TooLarge if
    on some rank that alone is."""
    if limit == inf:
        return inf
    lives = always(base)
    if max(lives) > limit:
        raise TooLarge
    return limit - min(lives)


def peaks(lives: Sequence[int], keys: Sequence[KeyT], above: Mapping[KeyT, Phases]) -> ByRank[Peak]:
    """Return by rank each phase's peak: what lives always, and what the rank's key has above it."""
    first: dict[Hashable, KeyT] = {}
    like = {key: first.setdefault(tuple(phases.items()), key) for key, phases in above.items()}
    return rows_by_rank(
        zip(lives, map(like.__getitem__, keys), strict=True),
        lambda pair: [
            Peak(phase=phase, rank=0, device_bytes=pair[0] + more)
            for phase, more in above[pair[1]].items()
        ],
    )


def _peaks(scene: Scene, wrap: Wrap, base: ByRank[Footprint]) -> ByRank[Peak]:
    """The update differs by the rows that a rank holds, and so does what lives always."""
    tape = scene.tape
    of_rank = positions(scene.spec, scene.plan.differing_axes)
    updates = play_update([wrap], sorted({*of_rank}))
    above = {update: {**tape.peaks, Phase.UPDATE: update} for update in updates.values()}
    return peaks(always(base), [updates[shard] for shard in of_rank], above)
