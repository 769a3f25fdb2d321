"""What a rank of a pipeline allocates in a step: its instructions, replayed, with what crosses the
boundaries of its stages and what each stage's wrap does.

A stage's input and output live until their micro-batch has come back, with halves until the second
of them, and what is sent until its `Release`; where two stages of a rank follow each other, one's
output is the other's input.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ptrain.axes.pipeline.instructions import Instruction, Message, Receive, Release, Send
from ptrain.axes.pipeline.schedule import Action
from ptrain.costs import Phase
from ptrain.derivation.clock import Clock
from ptrain.derivation.clock_state import Seconds
from ptrain.derivation.computing import PassScore
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.repeats import Representatives
from ptrain.derivation.tape import Scene, Tape, Wrap
from ptrain.derivation.timeline import play_pass, seed_bytes
from ptrain.facts.model import ModelFacts
from ptrain.facts.passes import Passes, net
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Kind, Run


class _Tensors:
    """The tensors at one boundary of a stage, one of each micro-batch in flight: `size` bytes of
    each, and how often it is held. `is_taken`: the next stage is the same rank's, and takes it
    too."""

    __slots__ = ("holders", "is_taken", "size")

    def __init__(self, size: int, *, is_taken: bool = False) -> None:
        self.size, self.is_taken = size, is_taken
        self.holders: dict[int, int] = {}


class _Ends(NamedTuple):
    """What a stage takes and gives. Where two stages of a rank follow each other, what one takes is
    what the other gives."""

    input: _Tensors
    output: _Tensors
    input_gradient: _Tensors
    output_gradient: _Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One rank's step up to the update. `activations`: bytes when most of them lived as a backward
    pass began, and `moved` what was off the device then, (tier, bytes); `gathered`: of units, when
    the last one did; where a clock went along, the `seconds` of each action, and of these the
    `tails`, since its last collective."""

    tape: Tape
    wraps: tuple[Wrap, ...]
    activations: int
    gathered: int
    moved: tuple[tuple[str, int], ...] = ()
    seconds: Mapping[Action, float] = field(default_factory=dict)
    tails: Mapping[Action, float] = field(default_factory=dict)


class Did(NamedTuple):
    """What a pass allocated, what was spent in it, and all seconds of that; `tail`: those since its
    last collective."""

    run: Run
    spent: tuple[Seconds, Seconds]
    seconds: float
    tail: float


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

    @property
    def plan(self) -> Plan:
        return self.ghost.wrapped.plan

    @property
    def facts(self) -> ModelFacts:
        return self.ghost.wrapped.facts


def play_rank(
    spec: Spec,
    parts: Sequence[Part],
    instructions: Iterable[Instruction],
    is_last: int,
    clock: Clock | None = None,
) -> Played:
    """`instructions` of one step; `is_last` is the index of the model's last stage."""
    rank = _Rank(spec, parts, is_last, clock)
    for instruction in instructions:
        match instruction:
            case Action():
                rank.compute(instruction)
            case Receive(message):
                rank.boundaries.receive(message)
            case Send(message):
                rank.boundaries.send(message)
            case Release(message):
                rank.boundaries.release(message)
    assert not rank.saved and not rank.boundaries.size, "nothing is in flight when a step is over"
    return Played(
        tape=rank.tape,
        wraps=tuple(stage.wrap for stage in rank.stages.values()),
        activations=rank.most,
        gathered=rank.gathered,
        moved=tuple(rank.most_moved.items()),
        seconds=rank.seconds,
        tails=rank.tails,
    )


@dataclass(slots=True)
class _Stage:
    """`nets`: bytes that passes leave, but for gradients, by the passes of a micro-batch, and
    `losses` those of its loss. `left`: backward passes of the step. What the wrap says of itself is
    asked once after each pass that was played: with those that are known it stays as it is."""

    part: Part
    wrap: Wrap
    left: int
    nets: dict[int, dict[Kind, int]] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)
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

    def loss(self, passes: Passes) -> int:
        """Return the bytes of the loss, which are summed up once for many micro-batches."""
        if id(passes) not in self.losses:
            self.losses[id(passes)] = passes.loss
        return self.losses[id(passes)]

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


class _Rank:
    def __init__(self, spec: Spec, parts: Sequence[Part], last: int, clock: Clock | None) -> None:
        self.tape, self.last = Tape(clock=clock), last
        self.seconds: dict[Action, float] = {}
        self.tails: dict[Action, float] = {}
        self.stages = {part.index: _stage(spec, part, self.tape) for part in parts}
        self.boundaries = _Boundaries(self.tape, _ends(parts), last)
        self.saved = self.most = self.gathered = 0
        self.moved: dict[str, int] = {}
        self.most_moved: dict[str, int] = {}

    def compute(self, action: Action) -> None:
        stage, kind = self.stages[action.stage], action.kind
        if action.stage == 0 and kind is Kind.INPUT:
            self.seconds[action] = self.tails[action] = 0.0
            return  # nobody waits for gradients of tokens
        if action.stage == 0 and kind is Kind.WEIGHT:
            kind = Kind.BACKWARD
        if kind is Kind.FORWARD:
            self.tape.enter(Phase.FORWARD)
        else:
            self._begin_backward(stage, kind)
        passes = stage.part.of(action.microbatch)
        self.seconds[action] = self._play(stage, kind, passes)
        self.tails[action] = self.tape.clock.since_met if self.tape.clock else 0.0
        self.saved += stage.net(kind, passes)
        for tier, size in passes.moved:
            more = size if kind is Kind.FORWARD else -size
            self.moved[tier] = self.moved.get(tier, 0) + more
        self.saved -= self.boundaries.passed(kind, action)
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            loss = stage.loss(passes)
            self.saved -= loss
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

    def known(self, stage: _Stage, key: Hashable) -> Did | None:
        """Return what an equal pass did; None where there was none."""
        return stage.part.known.get(key)

    def _play(self, stage: _Stage, kind: Kind, passes: Passes) -> float:
        """Return the seconds that it takes."""
        before, clock = stage.state, self.tape.clock
        known = self.known(stage, (kind, id(passes), before))
        if known is not None:
            self.tape.spike(known.run.rise)
            self.tape.add(known.run.net)
            if clock is not None:
                clock.add(known.spent)
                clock.meet(since=known.tail)
            return known.seconds
        if clock is not None:
            clock.meet()  # a message came, or the pass before sent one
        start = clock.moment() if clock else None
        self.tape.hook(Hook.PIPELINE_PASS)
        peak, level = self.tape.peak, self.tape.level
        self.tape.peak = level
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.begin_half(kind)
        begins = stage.part.index == self.last and kind in (Kind.BACKWARD, Kind.INPUT)
        seed = seed_bytes(stage.part.plan.update.layout) if begins else 0
        self.tape.level -= seed
        play_pass(passes.items[kind], self.tape, stage.wrap, stage.part.scores.get(kind))
        self.tape.level += seed
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.end_half(kind)
        spent: tuple[Seconds, Seconds] = clock.since(start) if clock and start else ({}, {})
        seconds = sum(spent[0].values())
        stage.has_played()
        if stage.state == before:
            run = Run(self.tape.peak - level, self.tape.level - level)
            tail = clock.since_met if clock else 0.0
            stage.part.known[kind, id(passes), before] = Did(run, spent, seconds, tail)
        self.tape.peak = max(peak, self.tape.peak)
        return seconds


def _stage(spec: Spec, part: Part, tape: Tape) -> _Stage:
    passes = part.passes
    scene = Scene(
        tape=tape,
        spec=spec,
        facts=part.facts,
        plan=part.plan,
        timeline=passes.timeline,
        representatives=part.representatives,
    )
    stage = _Stage(
        part=part,
        wrap=part.ghost.player(scene),
        left=part.plan.accumulate.micro_batches,
    )
    stage.has_played()
    return stage


def _ends(parts: Sequence[Part]) -> dict[int, _Ends]:
    """Return what the stages of a rank take and give, by stage."""
    passes = {part.index: part.passes for part in parts}
    ends: dict[int, _Ends] = {}
    for stage in sorted(passes):
        here, before, after = passes[stage], ends.get(stage - 1), passes.get(stage + 1)
        ends[stage] = _Ends(
            input=before.output if before else _Tensors(here.hidden),
            output=_Tensors(here.output, is_taken=after is not None),
            input_gradient=before.output_gradient if before else _Tensors(here.hidden),
            output_gradient=_Tensors(after.hidden if after else here.output),
        )
    return ends


class _Boundaries:
    """The tensors at the boundaries of a rank's stages, by who holds them: `size` bytes in all."""

    def __init__(self, tape: Tape, ends: Mapping[int, _Ends], last: int) -> None:
        self.tape, self.ends, self.last = tape, ends, last
        self.size = 0

    def passed(self, kind: Kind, action: Action) -> int:
        """A pass is over: it has made its output, or the gradient of its input, and nobody needs
        what it took. Between the halves the stage's state keeps input, output and its gradient; the
        input keeps its own gradient. Return the bytes that are no longer the pass's."""
        ends, stage, index = self.ends[action.stage], action.stage, action.microbatch
        is_last = stage == self.last
        if kind is Kind.FORWARD:
            return self._give(ends.output, index)
        given = self._give(ends.input_gradient, index) if stage and kind is not Kind.WEIGHT else 0
        if kind is Kind.INPUT:
            ends.input_gradient.holders[index] += 1
            if is_last:
                self._drop(ends.output, index)
            return given
        if stage:
            self._drop(ends.input, index)
        if kind is Kind.BACKWARD or not is_last:
            self._drop(ends.output, index)
        if kind is Kind.WEIGHT:
            self._drop(ends.input_gradient, index)
        if not is_last:
            self._drop(ends.output_gradient, index)
        return given

    def receive(self, message: Message) -> None:
        """A buffer is made, held for the pass that takes it."""
        ends = self.ends[message.target]
        is_input = message.phase is Phase.FORWARD
        tensors = ends.input if is_input else ends.output_gradient
        self.tape.add(tensors.size)
        self.size += tensors.size
        tensors.holders[message.microbatch] = 1

    def send(self, message: Message) -> None:
        """A gradient goes over from the stage to its send; an output is held by both."""
        if message.phase is Phase.FORWARD:
            self._sent(message).holders[message.microbatch] += 1

    def release(self, message: Message) -> None:
        self._drop(self._sent(message), message.microbatch)

    def _sent(self, message: Message) -> _Tensors:
        ends = self.ends[message.source]
        return ends.output if message.phase is Phase.FORWARD else ends.input_gradient

    def _give(self, tensors: _Tensors, index: int) -> int:
        """Made by a pass, whose bytes it is no longer. Held for the next stage, or for the send
        that is to come; an output for its own micro-batch's backward, too."""
        self.size += tensors.size
        tensors.holders[index] = 1 + tensors.is_taken
        return tensors.size

    def _drop(self, tensors: _Tensors, index: int) -> None:
        """One less holds it."""
        tensors.holders[index] -= 1
        if not tensors.holders[index]:
            del tensors.holders[index]
            self.size -= tensors.size
            self.tape.add(-tensors.size)
