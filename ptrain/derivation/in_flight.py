"""The micro-batches in flight on every rank, and the peaks: each rank's step replayed once for all
ranks that have the same parts of the same stages. Without a pipeline the model is one stage, whose
micro-batches go forward and backward one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import NamedTuple

from ptrain.axes.pipeline.instructions import Instruction, Message, Receive, Release, Send, training
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.by_rank import ByRank, rows_by_rank
from ptrain.cost import Footprint, Peak, Phase, State, StepTime, Traffic
from ptrain.derivation import tensor
from ptrain.derivation.activation_moves import activation_row
from ptrain.derivation.clock import Clock, Seconds
from ptrain.derivation.computing import PassScore, play_pass
from ptrain.derivation.ghosts.clipping import clip, norm_bytes
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.layers import Representatives, passes, represent
from ptrain.derivation.memory import always, least_above, peaks, sum_in_time
from ptrain.derivation.pipeline import StageParts
from ptrain.derivation.pipeline_time import (
    Gaps,
    RankTime,
    StepTiming,
    idle_gaps,
    step_time,
)
from ptrain.derivation.tape import Scene, Tape, Wrap
from ptrain.facts.model import Passes, net
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType, Layout
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec, positions
from ptrain.steps.experts import ByLayer
from ptrain.timeline import Kind, Run
from ptrain.units import grouped

# What a rank allocates in a step: its instructions, replayed, with what crosses the boundaries of
# its stages and what each stage's wrap does.
#
# A stage's input and output live until their micro-batch has come back, with halves until the
# second of them, and what is sent until its `Release`; where two stages of a rank follow each
# other, one's output is the other's input.


class Did(NamedTuple):
    """What a pass allocated, what was spent in it and on what it `left` to the next pass, and the
    seconds of both; `tail`: those since its last collective."""

    run: Run
    spent: tuple[Seconds, Seconds]
    seconds: float
    tail: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has of a stage: its wrapping and its passes; `representatives` are whom they
    play, `scores` what they compute when, and `known` is what a pass did that left the wrap as it
    was, by its kind and the wrap's state. `micro_batches` are the passes of each where they
    differ."""

    index: int
    ghost: Wrapping
    passes: Passes
    representatives: Representatives | None = None
    scores: Mapping[Kind, PassScore] = field(default_factory=dict)
    known: dict[Hashable, Did] = field(default_factory=dict)
    micro_batches: tuple[Passes, ...] = ()

    def of(self, micro_batch: int) -> Passes:
        """Return the passes of a micro-batch."""
        return self.micro_batches[micro_batch] if self.micro_batches else self.passes


Turns = Iterable[tuple[int, Sequence[Instruction]]]  # with how often they come in a row


def turns(own: Sequence[Instruction], *, are_alike: bool) -> Turns:
    """Return the instructions of a rank's step. Where its micro-batches go forward and backward one
    after the other and `are_alike`, all are as the second until the last one."""
    if not are_alike or len(own) < 6:
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
    """Play the `instructions` of one step up to the update; `is_last` is the index of the model's
    last stage. Raises TooLarge for a peak above `most`."""
    rank = RankStep(spec, parts, is_last, Tape(clock=clock, most=most), gaps)
    rank.begin()
    for times, some in instructions:
        rank.tape.in_time(times, partial(rank.run, some))
        for stage in rank.stages.values():
            stage.left -= times - 1
    assert not rank.saved and not rank.boundaries.size, "nothing is in flight when a step is over"
    rank.end()
    return rank


@dataclass(slots=True)
class _Stage:
    """`nets`: bytes that passes leave, but for gradients, by the passes of a micro-batch. `left`:
    backward passes of the step. What the wrap says of itself is asked once after each pass that was
    played: with those that are known it stays as it is."""

    part: Part
    wrap: Wrap
    left: int
    nets: dict[int, dict[Kind, int]] = field(default_factory=dict)
    begun: bool = False
    turn: tuple[bool, bool] | None = None  # whether the first backward pass is to come, or the last
    state: Hashable = None
    lingering: int = 0
    gathered: int = 0

    def net(self, kind: Kind, passes: Passes) -> int:
        """Return the bytes that a pass leaves, but for gradients."""
        if id(passes) not in self.nets:
            self.nets[id(passes)] = {k: sum(map(net, items)) for k, items in passes.items.items()}
        return self.nets[id(passes)][kind]

    def begin(self, *, is_last: bool) -> None:
        """A backward pass is to come."""
        turn = (not self.begun, is_last)
        if turn != self.turn:
            self.wrap.begin(is_first=not self.begun, is_last=is_last)
            self.turn, self.state = turn, self.wrap.signature()

    def has_played(self) -> None:
        """A pass was played."""
        self.turn, self.state = None, self.wrap.signature()
        self.lingering, self.gathered = self.wrap.lingering(), self.wrap.gathered()


class RankStep:
    """One rank's step. `most`: bytes of activations when most of them lived as a backward pass
    began, and `most_moved` what was off the device then, by tier; `gathered`: of units, when the
    last one did; where a clock goes along, the `seconds` of each action, and of these the `tails`,
    since its last collective; `passes` are those of all, `left` is what the pass before left to the
    next one, and `late` what reductions take behind all passes. Where `gaps` are given, the rank
    waits so long for others before an action. `updates`: peaks by shard. `is_alone`: no other rank
    has a part of the model, so that no message comes, and no pass is taken for an equal one, which
    what is on its way found otherwise."""

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
        self.is_alone, self.seed = plan.pipeline is None, seed_bytes(plan.update.layout)
        self.passes = self.late = self.left = self.idle = 0.0
        self.updates: dict[int, int] = {}
        self.seconds: dict[Action, float] = {}
        self.tails: dict[Action, float] = {}
        self.stages = {part.index: _stage(spec, part, self.tape) for part in parts}
        self.boundaries = _Boundaries(self.tape, parts, last)
        self.saved = self.most = self.gathered = 0
        self.moved: dict[str, int] = {}
        self.most_moved: dict[str, int] = {}

    def begin(self) -> None:
        """Begin what an update left to the passes."""
        if self.is_alone:
            return
        for stage in self.stages.values():
            stage.wrap.begin_passes()
            stage.has_played()
        if clock := self.tape.clock:
            self.left = clock.seconds

    def end(self) -> None:
        """Wait for what the passes left."""
        clock = self.tape.clock
        self.passes = clock.seconds if clock else 0.0
        if not self.is_alone:
            for stage in self.stages.values():
                stage.wrap.end_passes()
        self.late = self.left + (clock.seconds - self.passes if clock else 0.0)
        self.passes -= self.left

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Do some of the step, in this order."""
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
            return  # nobody waits for gradients of tokens
        if action.stage == 0 and kind is Kind.WEIGHT:
            kind = Kind.BACKWARD
        if kind is Kind.FORWARD:
            self.tape.enter(Phase.FORWARD)
        else:
            self._begin_backward(stage, kind)
        passes = stage.part.of(action.microbatch)
        gap = self.idle + (self.gaps.get(action, 0.0) if self.gaps else 0.0)
        self.idle = 0.0
        if self.tape.clock:
            self.tape.clock.now += gap
        seconds, left = self._play(stage, kind, passes)
        self.seconds[action] = max(self.left - gap, 0.0) + seconds
        self.left = left
        self.tails[action] = self.tape.clock.since_met if self.tape.clock else 0.0
        self.saved += stage.net(kind, passes)
        for tier, size in passes.moved:
            more = size if kind is Kind.FORWARD else -size
            self.moved[tier] = self.moved.get(tier, 0) + more
        self.saved -= self.boundaries.passed(kind, action)
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            whole = stage.net(Kind.FORWARD, passes) + stage.net(Kind.BACKWARD, passes)
            loss = whole - passes.output - passes.hidden
            self.saved -= loss
            if not self.is_alone:  # the timeline of a whole model ends with its loss
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
        """The passes are over: update, on the ranks with these shards. `sums` are those of tensors
        that the first and the last stage share."""
        clock = self.tape.clock
        self.tape.enter(Phase.UPDATE)
        if clock is not None:
            for row in sums:
                clock.between_ends(row.key.collective, Axis.PP, row.payload_bytes)
        self.updates = play_update([stage.wrap for stage in self.stages.values()], shards)

    def rows(self) -> tuple[Footprint, ...]:
        """Return what lives between the passes."""
        return (
            activation_row(0, self.most, tuple(self.most_moved.items())),
            Footprint(state=State.TRANSIENT, rank=0, device_bytes=self.gathered),
        )

    def known(self, stage: _Stage, key: Hashable) -> Did | None:
        """Return what an equal pass did; None where there was none."""
        return None if self.is_alone else stage.part.known.get(key)

    def _play(self, stage: _Stage, kind: Kind, passes: Passes) -> tuple[float, float]:
        """Return the seconds that it takes, and those of what it leaves to the next pass."""
        before, clock = stage.state, self.tape.clock
        if (known := self.known(stage, (kind, id(passes), before))) is not None:
            self.tape.spike(known.run.rise)
            self.tape.add(known.run.net)
            if clock is not None:
                clock.add(known.spent)
                clock.meet(since=known.tail)
                if self.gaps:  # what is under way goes on, unless the pass puts more on its lane
                    clock.now += known.seconds
                    for lane in clock.free.keys() & {key.axes for key in known.spent[1]}:
                        clock.free[lane] += known.seconds
            return known.seconds, known.left
        start = clock.moment() if clock else None
        if not self.is_alone:
            if clock is not None:
                clock.meet()  # a message came, or the pass before sent one
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
            stage.wrap.settle()
        left = clock.seconds - now if clock else 0.0
        spent: tuple[Seconds, Seconds] = clock.since(start) if clock and start else ({}, {})
        seconds = sum(spent[0].values()) - left
        stage.has_played()
        if stage.state == before:
            run = Run(self.tape.peak - level, self.tape.level - level)
            stage.part.known[kind, id(passes), before] = Did(run, spent, seconds, tail, left)
        self.tape.peak = max(peak, self.tape.peak)
        return seconds, left


def seed_bytes(layout: Layout) -> int:
    """Return the bytes of a trace's seed that backward does not allocate: of a scaled loss it
    begins with the scale, which lives for the whole run, in place of torch's 1. The loss and the
    scale are fp32, unless the model computes in fp64, and the scale is cast."""
    is_own = layout.scales_loss and layout.parameters is not DType.FP64
    return DType.FP32.itemsize if is_own else 0


def _stage(spec: Spec, part: Part, tape: Tape) -> _Stage:
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
        wrap=part.ghost.player(scene),
        left=own.plan.accumulate.micro_batches,
    )
    stage.has_played()
    return stage


_Tensor = tuple[Phase, int, int]  # its boundary by the stage in front of it, and its micro-batch


class _Boundaries:
    """The tensors at the boundaries of a rank's stages, one of each micro-batch in flight, by how
    often each is held: `size` bytes in all. Where two stages of a rank follow each other, what one
    takes is what the other gives; behind the last one stand the logits."""

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

    def passed(self, kind: Kind, action: Action) -> int:
        """A pass is over: it has made its output, or the gradient of its input, and nobody needs
        what it took. Between the halves the stage's state keeps input, output and its gradient; the
        input keeps its own gradient. Return the bytes that are no longer the pass's."""
        stage, index, is_last = action.stage, action.microbatch, action.stage == self.last
        output, taken = (Phase.FORWARD, stage, index), (Phase.FORWARD, stage - 1, index)
        given, came = (Phase.BACKWARD, stage - 1, index), (Phase.BACKWARD, stage, index)
        if kind is Kind.FORWARD:  # held for its own backward, too
            return self._hold(output, 1 + (stage + 1 in self.own))
        size = self._hold(given) if stage and kind is not Kind.WEIGHT else 0
        if kind is Kind.INPUT:
            self._hold(given)
            if is_last:
                self._drop(output)
            return size
        if stage:
            self._drop(taken)
        if kind is Kind.BACKWARD or not is_last:
            self._drop(output)
        if kind is Kind.WEIGHT:
            self._drop(given)
        if not is_last:
            self._drop(came)
        return size

    def receive(self, message: Message) -> None:
        """A buffer is made, held for the pass that takes it."""
        self.tape.add(self._hold(_tensor(message)))

    def send(self, message: Message) -> None:
        """A gradient goes over from the stage to its send; an output is held by both."""
        if message.phase is Phase.FORWARD:
            self._hold(_tensor(message))

    def release(self, message: Message) -> None:
        self._drop(_tensor(message))

    def _hold(self, tensor: _Tensor, times: int = 1) -> int:
        """Return the bytes that are there from now on."""
        size = 0 if tensor in self.holders else self.sizes[tensor[:2]]
        self.size += size
        self.holders[tensor] = self.holders.get(tensor, 0) + times
        return size

    def _drop(self, tensor: _Tensor) -> None:
        """One less holds it."""
        self.holders[tensor] -= 1
        if not self.holders[tensor]:
            del self.holders[tensor]
            self.size -= self.sizes[tensor[:2]]
            self.tape.add(-self.sizes[tensor[:2]])


def _tensor(message: Message) -> _Tensor:
    is_gradient = message.phase is Phase.BACKWARD
    return message.phase, message.source - is_gradient, message.microbatch


Place = tuple[int, int, int]  # along pp, along tp, and of a rank's tokens where these differ
_Alike = tuple[int, tuple[int, ...], int]  # along pp, along tp by stage, and which rows it sends


class Flight(NamedTuple):
    """Rows of activations and of gathered units, and the peaks, by rank."""

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
    """`base` are the resident rows; where `timing` is given clocks go along. `stands_for`: which
    place along pp is played for each, itself where nothing is said. Raises TooLarge for a peak
    above `limit`."""
    most = least_above(base, limit)
    played: dict[_Alike, RankStep] = {}
    shards = positions(spec, stages[0].plan.differing_axes)
    like: dict[Place, _Alike] = {}
    instructions, part_of = training(schedule), cache(partial(_part_of, spec, stages, timing))
    cutting, loads = stages[0].plan.cutting_axes, stages[0].plan.loads
    axes = (Axis.PP,), cutting, spec.routing_axes if loads else ()
    places = list(zip(*(positions(spec, names) for names in axes), strict=True))
    rows_of = {tokens: loads.of(tokens) if loads else None for *_, tokens in places}

    def play(key: _Alike, rows: ByLayer | None, gaps: Gaps | None = None) -> RankStep:
        stand_in, firsts, _ = key
        pairs = [*zip(schedule.stages_of(stand_in), firsts, strict=True)]
        of_rank = [
            _own_part(part_of(stages[stage].like, at), stages[stage], at, rows)
            for stage, at in pairs
        ]
        clock = timing.clock_of(firsts[0]) if timing else None
        are_alike = schedule.ranks == 1 and not of_rank[0].micro_batches
        of_step = turns(instructions[stand_in], are_alike=are_alike)
        rank = play_rank(spec, of_rank, of_step, schedule.stages - 1, clock, most, gaps)
        sums = [row for stage, at in pairs for row in stages[stage].tied(at)] if clock else []
        rank.update(sorted({*shards}), sums)
        return rank

    for place, index, tokens in sorted(set(places)):
        stand_in = stands_for[place] if stands_for else place
        # of ranks with the same parts the first stands for all
        firsts = tuple(stages[stage].of(index)[1] for stage in schedule.stages_of(stand_in))
        key = like[place, index, tokens] = stand_in, firsts, id(rows_of[tokens])
        if key not in played:
            played[key] = play(key, rows_of[tokens])
    if timing and schedule.ranks > 1 and stages[0].plan.wrap.works_between_passes:
        part_of.cache_clear()  # passes did what they did without gaps
        gaps = idle_gaps(_times(played), timing)
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
        step=step_time(schedule, _times(played), timing) if timing else None,
    )


def _times(played: Mapping[_Alike, RankStep]) -> list[RankTime]:
    """Return the times of the ranks that clocks went along with."""
    return [
        RankTime(place, rank.seconds, rank.tails, rank.passes, rank.late, rank.tape.clock)
        for (place, *_), rank in played.items()
        if rank.tape.clock is not None
    ]


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
    clock, peaks, most = tape.clock, dict[int, int](), -1.0
    start = slowest = clock.moment() if clock else None
    for (shard, (at_once, stays)), all_of_kind in zip(clips.items(), alike.values(), strict=True):
        if not (peaks and is_alike):
            tape.level = tape.peak = before + stays
            if clock and start:  # all ranks begin at the same moment
                clock.back_to(start)
            clip(scene, clipped[shard])
            if clock:
                clock.agree()
            for wrap in wraps:
                wrap.update(shard)
            for wrap in wraps:
                wrap.finish_update()
            sum_in_time(scene.plan, tape, [wrap.scene.facts for wrap in wraps])
            if clock and clock.seconds > most:
                most, slowest = clock.seconds, clock.moment()
        peaks |= dict.fromkeys(all_of_kind, max(reduced, before + at_once, tape.peak))
    if clock and slowest:
        clock.back_to(slowest)
    return peaks


def _part_of(
    spec: Spec, stages: Sequence[StageParts], timing: StepTiming | None, stage: int, index: int
) -> Part:
    """Return the part of a stage that the rank at this place along tp has."""
    taken = stages[stage]
    ghost, _ = taken.of(index)
    if taken.passes:
        played, known = None, taken.passes[index]
    else:
        reach = None if timing and timing.plays_all else ghost.reach
        played = represent(spec, ghost.wrapped.facts.units, taken.stage.layers, reach)
        cut = tensor.cut_of(spec, taken.plan, index)
        known = passes(spec, taken.stage, len(stages), played, cut)
    units = played.units if played else ghost.wrapped.facts.units
    return Part(
        index=stage,
        ghost=ghost,
        passes=known,
        representatives=played,
        scores=timing.scores(taken.stage, index, played, units, known) if timing else {},
    )


def _own_part(part: Part, taken: StageParts, index: int, rows: ByLayer | None) -> Part:
    """Return the part as an equal stage has it, on the rank at this place along tp whose tokens
    send and get these rows."""
    micro_batches = taken.micro_batches(index, rows)
    # what a pass did is known to all of them: it depends on the wrap's signature alone
    known = {} if micro_batches else part.known
    return replace(part, index=taken.stage.index, micro_batches=micro_batches, known=known)
