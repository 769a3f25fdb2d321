"""The memory and time of micro-batches in flight, by simulating each rank's step.

One simulation serves all ranks that have the same parts of the same stages. Without a pipeline the
model is one stage, whose micro-batches go forward and backward one at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.stage_facts import (
    Instruction,
    Message,
    Receive,
    Release,
    Send,
    training_instructions,
)
from ptrain.by_rank import ByRank, rows_by_rank
from ptrain.cost import Footprint, Peak, Phase, State, StepTime, Traffic
from ptrain.derivation import tensor
from ptrain.derivation.clock import Clock, Seconds
from ptrain.derivation.computing import PassScore, play_pass
from ptrain.derivation.ghosts.wrapping import (
    Wrapping,
    always,
    least_above,
    norm_bytes,
    peaks,
    sum_in_time,
    time_clipping,
)
from ptrain.derivation.layers import Representatives, represent, stage_passes
from ptrain.derivation.machine import (
    Gaps,
    RankTime,
    StepTiming,
    idle_gaps,
    step_time,
)
from ptrain.derivation.pipeline import StageParts
from ptrain.derivation.tape import Scene, Tape, Wrap, activation_row
from ptrain.facts.model import Passes, net_bytes
from ptrain.spec.cluster import Hook
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, indices_in_groups
from ptrain.steps.experts import ByLayer
from ptrain.timeline import Kind, Run
from ptrain.units import group_by_key

# Lifetimes: a stage's input and output live until their micro-batch's backward pass is done, with
# halves until the second half. A sent tensor lives until its `Release`.


class Did(NamedTuple):
    """The recorded result of a pass: its memory (`run`), the time `spent` in it, its `seconds`, the
    seconds since its last collective (`tail`), and the seconds it `left` to the next pass."""

    run: Run
    spent: tuple[Seconds, Seconds]
    seconds: float
    tail: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a stage: its wrapping and its passes. `representatives` are the units
    simulated for equal ones, `scores` the compute of each kind of pass. `known` has the results of
    passes that left the wrap's state unchanged, by kind, passes and state. `micro_batches` are the
    passes of each micro-batch, if they differ."""

    index: int
    ghost: Wrapping
    passes: Passes
    representatives: Representatives | None = None
    scores: Mapping[Kind, PassScore] = field(default_factory=dict)
    known: dict[Hashable, Did] = field(default_factory=dict)
    micro_batches: tuple[Passes, ...] = ()


Turns = Iterable[tuple[int, Sequence[Instruction]]]  # (consecutive repetitions, instructions)


def group_turns(own: Sequence[Instruction], *, are_alike: bool) -> Turns:
    """Return a rank's instructions as (repetitions, instructions). If `are_alike`, micro-batches go
    forward and backward one at a time, and all but the first and the last equal the second."""
    if not are_alike or len(own) < 6:  # six instructions: three micro-batches, forward and backward
        return ((1, own),)
    return (1, own[:2]), (len(own) // 2 - 2, own[2:4]), (1, own[-2:])


def play_rank(
    spec: Spec,
    parts: Sequence[Part],
    instructions: Turns,
    is_last: int,
    clock: Clock | None = None,
    most: float = inf,
    gaps: Gaps | None = None,
) -> RankStep:
    """Simulate the passes of one rank's step, without the update.

    `is_last` is the index of the model's last stage. A peak above `most` bytes raises TooLarge.
    """
    rank = RankStep(spec, parts, is_last, Tape(clock=clock, most=most), gaps)
    rank.begin()
    for times, some in instructions:
        rank.tape.in_time(times, partial(rank.run, some))
        for stage in rank.stages.values():
            stage.left -= times - 1
    assert not rank.saved and not rank.boundaries.size, "nothing is in flight when a step is over"
    rank.finish()
    return rank


@dataclass(slots=True)
class _Stage:
    """A stage's state in a step. `nets` caches the net bytes of passes without gradients, `left`
    counts backward passes. The wrap's state is read after each simulated pass; recorded passes keep
    it."""

    part: Part
    wrap: Wrap
    left: int
    nets: dict[int, dict[Kind, int]] = field(default_factory=dict)
    begun: bool = False
    turn: tuple[bool, bool] | None = None  # (is first, is last) of the next backward pass
    state: Hashable = None
    lingering: int = 0
    gathered: int = 0

    def net(self, kind: Kind, passes: Passes) -> int:
        """Return the bytes that a pass leaves allocated, without gradients."""
        if id(passes) not in self.nets:
            self.nets[id(passes)] = {
                k: sum(map(net_bytes, items)) for k, items in passes.items.items()
            }
        return self.nets[id(passes)][kind]

    def begin(self, *, is_last: bool) -> None:
        """Prepare the wrap for a backward pass."""
        turn = (not self.begun, is_last)
        if turn != self.turn:
            self.wrap.begin(is_first=not self.begun, is_last=is_last)
            self.turn, self.state = turn, self.wrap.signature()

    def has_played(self) -> None:
        """Update the record of the wrap's state after a simulated pass."""
        self.turn, self.state = None, self.wrap.signature()
        self.lingering, self.gathered = self.wrap.lingering_bytes(), self.wrap.gathered_bytes()


class RankStep:
    """The simulation of one rank's step. `most`: bytes of activations at the start of the backward
    pass at which they were most, and `most_moved` those on other tiers then. `gathered`: bytes of
    all-gathered units at the start of the last backward pass. With a clock: `seconds` of each
    action, `tails` since its last collective, `passes` of all passes, `left` by the previous pass
    to the next one, and `late` of reductions after all passes. `gaps`: seconds that the rank waits
    before an action. `updates`: peak bytes by shard. `is_alone`: no pipeline. Then no message
    arrives, and recorded passes are not reused, because communication in progress differs from pass
    to pass."""

    def __init__(
        self,
        spec: Spec,
        parts: Sequence[Part],
        last: int,
        tape: Tape,
        gaps: Gaps | None = None,
    ) -> None:
        self.gaps = gaps
        self.tape, self.last, plan = tape, last, parts[0].ghost.wrapped.plan
        layout, self.is_alone = plan.update.layout, plan.pipeline is None
        # The backward seed of a trace, which a run does not allocate. Backward of a scaled loss
        # starts from the scale, which lives for the full run, instead of torch's seed of 1. Both
        # are fp32; a model in fp64 casts the scale, which allocates.
        has_scale = layout.scales_loss and layout.parameters is not DType.FP64
        self.seed = DType.FP32.itemsize if has_scale else 0
        self.passes = self.late = self.left = self.idle = 0.0
        self.updates: dict[int, int] = {}
        self.seconds: dict[Action, float] = {}
        self.tails: dict[Action, float] = {}
        self.stages = {part.index: _make_stage(spec, part, self.tape) for part in parts}
        self.boundaries = _Boundaries(self.tape, parts, last)
        self.saved = self.most = self.gathered = 0
        self.moved: dict[str, int] = {}
        self.most_moved: dict[str, int] = {}

    def begin(self) -> None:
        """Start the work that an update left to the passes."""
        if self.is_alone:
            return
        for stage in self.stages.values():
            stage.wrap.begin_passes()
            stage.has_played()
        if clock := self.tape.clock:
            self.left = clock.seconds

    def finish(self) -> None:
        """Wait for the work that the passes left."""
        clock = self.tape.clock
        self.passes = clock.seconds if clock else 0.0
        if not self.is_alone:
            for stage in self.stages.values():
                stage.wrap.end_passes()
        self.late = self.left + (clock.seconds - self.passes if clock else 0.0)
        self.passes -= self.left

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions in order."""
        for instruction in instructions:
            match instruction:
                case Action():
                    self.compute(instruction)
                case Receive(message):
                    self.boundaries.receive(message)
                case Send(message):
                    self.boundaries.send(message)
                case Release(message):
                    self.boundaries.release(message)

    def compute(self, action: Action) -> None:
        stage, kind = self.stages[action.stage], action.kind
        if action.stage == 0 and kind is Kind.INPUT:
            self.seconds[action] = self.tails[action] = 0.0
            self.idle += self.gaps.get(action, 0.0) if self.gaps else 0.0
            return  # tokens have no gradients
        if action.stage == 0 and kind is Kind.WEIGHT:  # without the half of inputs it is in full
            kind = Kind.BACKWARD
        if kind is Kind.FORWARD:
            self.tape.enter(Phase.FORWARD)
        else:
            self._begin_backward(stage, kind)
        of_each = stage.part.micro_batches
        passes = of_each[action.microbatch] if of_each else stage.part.passes
        gap = self.idle + (self.gaps.get(action, 0.0) if self.gaps else 0.0)
        self.idle = 0.0
        if self.tape.clock:
            self.tape.clock.now += gap
        seconds, left = self._play_pass(stage, kind, passes)
        self.seconds[action] = max(self.left - gap, 0.0) + seconds
        self.left = left
        self.tails[action] = self.tape.clock.since_met if self.tape.clock else 0.0
        self.saved += stage.net(kind, passes)
        for tier, size in passes.moved:
            more = size if kind is Kind.FORWARD else -size
            self.moved[tier] = self.moved.get(tier, 0) + more
        self.saved -= self.boundaries.end_pass(kind, action)
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            whole = stage.net(Kind.FORWARD, passes) + stage.net(Kind.BACKWARD, passes)
            loss = whole - passes.output - passes.hidden
            self.saved -= loss
            if not self.is_alone:  # the timeline of a full model includes the loss
                self.tape.add(-loss)

    def _begin_backward(self, stage: _Stage, kind: Kind) -> None:
        self.tape.enter(Phase.BACKWARD)
        lingering = gathered = 0
        for local in self.stages.values():
            lingering += local.lingering
            gathered += local.gathered
        now = self.saved + self.boundaries.size + lingering
        if now >= self.most:
            self.most, self.most_moved = now, dict(self.moved)
        self.gathered = gathered
        is_last = kind is not Kind.INPUT and stage.left == 1
        stage.left -= kind is not Kind.INPUT
        stage.begin(is_last=is_last)
        stage.begun = stage.begun or kind is not Kind.INPUT

    def update(self, shards: Iterable[int], sums: Iterable[Traffic]) -> None:
        """Simulate the update on the ranks with these shards. `sums` are the all-reduces of tensors
        that the first and the last stage share."""
        clock = self.tape.clock
        self.tape.enter(Phase.UPDATE)
        if clock is not None:
            for row in sums:
                clock.between_ends(row.key.collective, Axis.PP, row.payload_bytes)
        self.updates = play_update([stage.wrap for stage in self.stages.values()], shards)

    def rows(self) -> tuple[Footprint, ...]:
        """Return the memory rows of activations and of all-gathered units."""
        return (
            activation_row(0, self.most, tuple(self.most_moved.items())),
            Footprint(state=State.TRANSIENT, rank=0, device_bytes=self.gathered),
        )

    def recorded_pass(self, stage: _Stage, key: Hashable) -> Did | None:
        """Return the recorded result of an equal pass, or None."""
        return None if self.is_alone else stage.part.known.get(key)

    def _play_pass(self, stage: _Stage, kind: Kind, passes: Passes) -> tuple[float, float]:
        """Return the seconds of a pass, and the seconds it leaves to the next pass."""
        before, clock = stage.state, self.tape.clock
        if (known := self.recorded_pass(stage, (kind, id(passes), before))) is not None:
            self.tape.spike(known.run.rise)
            self.tape.add(known.run.net)
            if clock is not None:
                clock.add(known.spent)
                clock.note_meeting(since=known.tail)
                if self.gaps:  # other lanes progress during the pass
                    clock.now += known.seconds
                    for lane in clock.free.keys() & {key.axes for key in known.spent[1]}:
                        clock.free[lane] += known.seconds
            return known.seconds, known.left
        start = clock.snapshot() if clock else None
        if not self.is_alone:
            if clock is not None:
                clock.note_meeting()  # a message arrived, or the previous pass sent one
            self.tape.hook(Hook.PIPELINE_PASS)
        peak, level = self.tape.peak, self.tape.level
        self.tape.peak = level
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.begin_half(kind)
        begins = stage.part.index == self.last and kind in (Kind.BACKWARD, Kind.INPUT)
        seed = self.seed if begins else 0
        self.tape.level -= seed
        play_pass(passes.items[kind], self.tape, stage.wrap, stage.part.scores.get(kind))
        self.tape.level += seed
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.end_half(kind)
        tail, now = (clock.since_met, clock.seconds) if clock else (0.0, 0.0)
        if not self.is_alone:
            stage.wrap.end_pass()
        left = clock.seconds - now if clock else 0.0
        spent: tuple[Seconds, Seconds] = clock.seconds_since(start) if clock and start else ({}, {})
        seconds = sum(spent[0].values()) - left
        stage.has_played()
        if stage.state == before:
            run = Run(self.tape.peak - level, self.tape.level - level)
            stage.part.known[kind, id(passes), before] = Did(run, spent, seconds, tail, left)
        self.tape.peak = max(peak, self.tape.peak)
        return seconds, left


def _make_stage(spec: Spec, part: Part, tape: Tape) -> _Stage:
    own = part.ghost.wrapped
    scene = Scene(
        tape=tape,
        spec=spec,
        facts=own.facts,
        plan=own.plan,
        timeline=part.passes.timeline,
        representatives=part.representatives,
    )
    stage = _Stage(
        part=part,
        wrap=part.ghost.make_wrap(scene),
        left=own.plan.accumulate.micro_batches,
    )
    stage.has_played()
    return stage


_Tensor = tuple[Phase, int, int]  # the stage before its boundary, and its micro-batch


class _Boundaries:
    """The tensors at the boundaries of a rank's stages, counted by holder, of `size` bytes in
    total. If two consecutive stages are on the rank, the output of one is the input of the other.
    The last stage's output is the logits."""

    def __init__(self, tape: Tape, parts: Sequence[Part], last: int) -> None:
        self.tape, self.last, self.size = tape, last, 0
        self.own = {part.index for part in parts}
        self.holders: dict[_Tensor, int] = {}
        self.sizes: dict[tuple[Phase, int], int] = {}
        for part in sorted(parts, key=lambda part: part.index):
            stage, output, hidden = part.index, part.passes.output, part.passes.hidden
            self.sizes[Phase.FORWARD, stage] = output
            self.sizes.setdefault((Phase.BACKWARD, stage), output)
            self.sizes.setdefault((Phase.FORWARD, stage - 1), hidden)
            self.sizes[Phase.BACKWARD, stage - 1] = hidden

    def end_pass(self, kind: Kind, action: Action) -> int:
        """End a pass and return the bytes that no longer count as the pass's. The pass made its
        output, or the gradient of its input, and its inputs are no longer needed. Between the
        halves of a backward pass the stage keeps input, output and the output's gradient; the input
        keeps its gradient."""
        stage, index, is_last = action.stage, action.microbatch, action.stage == self.last
        output, taken = (Phase.FORWARD, stage, index), (Phase.FORWARD, stage - 1, index)
        given, came = (Phase.BACKWARD, stage - 1, index), (Phase.BACKWARD, stage, index)
        if kind is Kind.FORWARD:  # held for its backward pass too
            return self._add_holder(output, 1 + (stage + 1 in self.own))
        size = self._add_holder(given) if stage and kind is not Kind.WEIGHT else 0
        if kind is Kind.INPUT:
            self._add_holder(given)
            if is_last:
                self._drop_holder(output)
            return size
        if stage:
            self._drop_holder(taken)
        if kind is Kind.BACKWARD or not is_last:
            self._drop_holder(output)
        if kind is Kind.WEIGHT:
            self._drop_holder(given)
        if not is_last:
            self._drop_holder(came)
        return size

    def receive(self, message: Message) -> None:
        """Allocate a buffer, held for the pass that uses it."""
        self.tape.add(self._add_holder(_boundary_tensor(message)))

    def send(self, message: Message) -> None:
        """Hold an output for its send in addition to the stage. A gradient passes from the stage to
        its send."""
        if message.phase is Phase.FORWARD:
            self._add_holder(_boundary_tensor(message))

    def release(self, message: Message) -> None:
        self._drop_holder(_boundary_tensor(message))

    def _add_holder(self, tensor: _Tensor, times: int = 1) -> int:
        """Add holders of a tensor, and return the bytes if it is new, else 0."""
        size = 0 if tensor in self.holders else self.sizes[tensor[:2]]
        self.size += size
        self.holders[tensor] = self.holders.get(tensor, 0) + times
        return size

    def _drop_holder(self, tensor: _Tensor) -> None:
        """Remove a holder, and free the tensor with the last one."""
        self.holders[tensor] -= 1
        if not self.holders[tensor]:
            del self.holders[tensor]
            self.size -= self.sizes[tensor[:2]]
            self.tape.add(-self.sizes[tensor[:2]])


def _boundary_tensor(message: Message) -> _Tensor:
    is_gradient = message.phase is Phase.BACKWARD
    return message.phase, message.source - is_gradient, message.microbatch


Place = tuple[int, int, int]  # along pp, the cutting axes, and the tokens if they matter
_Alike = tuple[int, tuple[int, ...], int]  # along pp, the cutting axes by stage, and id of its rows


class Flight(NamedTuple):
    """Memory rows of activations and all-gathered units, the peaks, and the step time, by rank."""

    memory: ByRank[Footprint]
    peaks: ByRank[Peak]
    step: StepTime | None = None


def in_flight(
    spec: Spec,
    schedule: Schedule,
    stages: Sequence[StageParts],
    base: ByRank[Footprint],
    timing: StepTiming | None = None,
    stands_for: Mapping[int, int] | None = None,
    limit: float = inf,
) -> Flight:
    """Simulate the step on every rank.

    `base` are the rows of resident memory. Without `timing`, only memory is simulated. `stands_for`
    gives the place along pp that represents a place; None simulates all. A peak above `limit` bytes
    raises TooLarge.
    """
    most = least_above(base, limit)
    played: dict[_Alike, RankStep] = {}
    shards = indices_in_groups(spec, stages[0].plan.differing_axes)
    like: dict[Place, _Alike] = {}
    instructions, part_of = (
        training_instructions(schedule),
        cache(partial(_make_part, spec, stages, timing)),
    )
    cutting, loads = stages[0].plan.cutting_axes, stages[0].plan.loads
    axes = (Axis.PP,), cutting, spec.routing_axes if loads else ()
    places = list(zip(*(indices_in_groups(spec, names) for names in axes), strict=True))
    rows_of = {tokens: loads.rows_by_layer(tokens) if loads else None for *_, tokens in places}

    def play(key: _Alike, rows: ByLayer | None, gaps: Gaps | None = None) -> RankStep:
        stand_in, firsts, _ = key
        pairs = [*zip(schedule.stages_of(stand_in), firsts, strict=True)]
        of_rank = [
            _specialize_part(part_of(stages[stage].like, at), stages[stage], at, rows)
            for stage, at in pairs
        ]
        clock = timing.clock_of(firsts[0]) if timing else None
        are_alike = schedule.ranks == 1 and not of_rank[0].micro_batches
        of_step = group_turns(instructions[stand_in], are_alike=are_alike)
        rank = play_rank(spec, of_rank, of_step, schedule.stages - 1, clock, most, gaps)
        sums = (row for stage, at in pairs for row in stages[stage].tied_sum_rows(at))
        rank.update(sorted({*shards}), [*sums] if clock else [])
        return rank

    for place, index, tokens in sorted(set(places)):
        stand_in = stands_for[place] if stands_for else place
        # the first of the ranks with equal parts represents all of them
        firsts = tuple(stages[stage].part_at(index)[1] for stage in schedule.stages_of(stand_in))
        key = like[place, index, tokens] = stand_in, firsts, id(rows_of[tokens])
        if key not in played:
            played[key] = play(key, rows_of[tokens])
    # communication after a pass overlaps idle time, which the schedule of all ranks determines
    if timing and schedule.ranks > 1 and stages[0].plan.wrap.works_between_passes:
        part_of.cache_clear()  # it has results recorded without gaps
        gaps = idle_gaps(_rank_times(played), timing)
        rows_at = {id(rows): rows for rows in rows_of.values()}
        played = {key: play(key, rows_at[key[2]], gaps[key[0]]) for key in played}
    ranks = [like[place] for place in places]
    keys = [(rank, played[rank].updates[s]) for rank, s in zip(ranks, shards, strict=True)]
    above = {
        key: {**played[key[0]].tape.peaks, Phase.UPDATE: key[1]} for key in dict.fromkeys(keys)
    }
    return Flight(
        memory=rows_by_rank(ranks, lambda rank: played[rank].rows()),
        peaks=peaks(always(base), keys, above),
        step=step_time(schedule, _rank_times(played), timing) if timing else None,
    )


def _rank_times(played: Mapping[_Alike, RankStep]) -> list[RankTime]:
    """Return the times of the ranks that had a clock."""
    return [
        RankTime(place, rank.seconds, rank.tails, rank.passes, rank.late, rank.tape.clock)
        for (place, *_), rank in played.items()
        if rank.tape.clock is not None
    ]


def play_update(wraps: Sequence[Wrap], shards: Iterable[int]) -> dict[int, int]:
    """Simulate reductions, the norm over all wraps and the optimizer, and return the peak bytes by
    shard. Flat units are updated once, because the update ends their gradients. It is equal on all
    ranks, except for the norms before it."""
    scene = wraps[0].scene
    tape = scene.tape
    for wrap in wraps:
        wrap.reduce()
    shards = [*shards]
    kinds = zip(*(map(wrap.kind_of_shard, shards) for wrap in wraps), strict=True)
    alike = group_by_key(zip(kinds, shards, strict=True))
    clipped = {shard: [wrap.norm_groups(shard) for wrap in wraps] for shard, *_ in alike.values()}
    clips = {shard: norm_bytes(scene, groups) for shard, groups in clipped.items()}
    before, reduced = tape.level, tape.peak
    is_alike = any(wrap.updates_alike for wrap in wraps)
    clock, peaks, most = tape.clock, dict[int, int](), -1.0
    start = slowest = clock.snapshot() if clock else None
    for (shard, (at_once, stays)), all_of_kind in zip(clips.items(), alike.values(), strict=True):
        if not (peaks and is_alike):
            tape.level = tape.peak = before + stays
            if clock and start:  # all ranks start the update at the same time
                clock.back_to(start)
            time_clipping(scene, clipped[shard])
            if clock:
                clock.agree_on_loss()
            for wrap in wraps:
                wrap.update(shard)
            for wrap in wraps:
                wrap.finish_update()
            sum_in_time(scene.plan, tape, [wrap.scene.facts for wrap in wraps])
            if clock and clock.seconds > most:
                most, slowest = clock.seconds, clock.snapshot()
        peaks |= dict.fromkeys(all_of_kind, max(reduced, before + at_once, tape.peak))
    if clock and slowest:
        clock.back_to(slowest)
    return peaks


def _make_part(
    spec: Spec, stages: Sequence[StageParts], timing: StepTiming | None, stage: int, index: int
) -> Part:
    """Return the part of a stage on the rank at this place along the cutting axes."""
    taken = stages[stage]
    ghost, _ = taken.part_at(index)
    if taken.passes:
        played, known = None, taken.passes[index]
    else:
        reach = None if timing and timing.plays_all else ghost.reach
        played = represent(spec, ghost.wrapped.facts.units, taken.stage.layers, reach)
        cut = tensor.cut_of(spec, taken.plan, index)
        known = stage_passes(spec, taken.stage, len(stages), played, cut)
    units = played.units if played else ghost.wrapped.facts.units
    return Part(
        index=stage,
        ghost=ghost,
        passes=known,
        representatives=played,
        scores=timing.scores(taken.stage, index, played, units, known) if timing else {},
    )


def _specialize_part(part: Part, taken: StageParts, index: int, rows: ByLayer | None) -> Part:
    """Return the part for a stage that equals the simulated one, with the rows that the rank's
    tokens send and receive."""
    micro_batches = taken.micro_batches(index, rows)
    # equal stages share recorded results, which depend only on the wrap's state
    known = {} if micro_batches else part.known
    return replace(part, index=taken.stage.index, micro_batches=micro_batches, known=known)
