"""What a rank of a pipeline allocates in a step: its instructions, replayed, with what crosses the
boundaries of its stages and what each stage's wrap does.

A stage's input and output live until their micro-batch has come back, with halves until the second
of them, and what is sent until its `Release`; where two stages of a rank follow each other, one's
output is the other's input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ptrain.axes.pipeline.instructions import Instruction, Message, Receive, Release, Send
from ptrain.axes.pipeline.schedule import Action
from ptrain.costs import Phase
from ptrain.derivation.clock import Clock, Seconds
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
from ptrain.timeline import Item, Kind, Run


class _Role(Enum):
    """What a tensor at a boundary is to its stage."""

    INPUT = auto()
    OUTPUT = auto()
    INPUT_GRADIENT = auto()
    OUTPUT_GRADIENT = auto()


class _Held(NamedTuple):
    """A tensor at a stage's boundary, of one micro-batch."""

    role: _Role
    stage: int
    microbatch: int


_TAKEN = (_Role.INPUT, _Role.OUTPUT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One rank's step up to the update. `activations`: bytes when most of them lived as a backward
    pass began, and `moved` what was off the device then, (tier, bytes); `gathered`: of units, when
    the last one did; `seconds` of each action, where a clock went along."""

    tape: Tape
    wraps: tuple[Wrap, ...]
    activations: int
    gathered: int
    moved: tuple[tuple[str, int], ...] = ()
    seconds: Mapping[Action, float] = field(default_factory=dict)


class Did(NamedTuple):
    """What a pass allocated, and what was spent in it."""

    run: Run
    spent: tuple[Seconds, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has of a stage: its wrapping and its passes; `representatives` are whom they
    play, `scores` what they compute when, and `known` is what a pass did that left the wrap as it
    was, by its kind and the wrap's state."""

    index: int
    ghost: Wrapping
    passes: Passes
    representatives: Representatives | None = None
    scores: Mapping[Kind, PassScore] = field(default_factory=dict)
    known: dict[Hashable, Did] = field(default_factory=dict)

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
    )


@dataclass(slots=True)
class _Stage:
    """`net`: bytes that a pass leaves, but for gradients; `loss`: those that outlive the backward
    pass. `left`: backward passes of the step."""

    part: Part
    wrap: Wrap
    left: int
    net: dict[Kind, int]
    loss: int
    begun: bool = False


class _Rank:
    def __init__(self, spec: Spec, parts: Sequence[Part], last: int, clock: Clock | None) -> None:
        self.tape, self.last = Tape(clock=clock), last
        self.seconds: dict[Action, float] = {}
        self.stages = {part.index: _stage(spec, part, self.tape) for part in parts}
        self.boundaries = _Boundaries(self.tape, self.stages, last)
        self.saved = self.most = self.gathered = 0
        self.moved, self.most_moved = Counter[str](), Counter[str]()

    def compute(self, action: Action) -> None:
        stage, kind = self.stages[action.stage], action.kind
        if action.stage == 0 and kind is Kind.INPUT:
            self.seconds[action] = 0.0
            return  # nobody waits for gradients of tokens
        if action.stage == 0 and kind is Kind.WEIGHT:
            kind = Kind.BACKWARD
        if kind is Kind.FORWARD:
            self.tape.enter(Phase.FORWARD)
        else:
            self._begin_backward(stage, kind)
        self.seconds[action] = self._play(stage, kind, stage.part.passes.items[kind])
        self.saved += stage.net[kind]
        for tier, size in stage.part.passes.moved:
            self.moved[tier] += size if kind is Kind.FORWARD else -size
        for tensor in self.boundaries.outputs_of(kind, action):
            self.saved -= self.boundaries.give(tensor)
        for tensor in self.boundaries.done_with(kind, action):
            self.boundaries.drop(tensor)
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            self.saved -= stage.loss
            self.tape.add(-stage.loss)

    def _begin_backward(self, stage: _Stage, kind: Kind) -> None:
        self.tape.enter(Phase.BACKWARD)
        lingering = sum(local.wrap.lingering() for local in self.stages.values())
        now = self.saved + self.boundaries.size + lingering
        if now >= self.most:
            self.most, self.most_moved = now, Counter(self.moved)
        self.gathered = sum(local.wrap.gathered() for local in self.stages.values())
        is_last = kind is not Kind.INPUT and stage.left == 1
        stage.left -= kind is not Kind.INPUT
        stage.wrap.begin(is_first=not stage.begun, is_last=is_last)
        stage.begun = stage.begun or kind is not Kind.INPUT

    def known(self, stage: _Stage, key: Hashable) -> Did | None:
        """Return what an equal pass did; None where there was none."""
        return stage.part.known.get(key)

    def _play(self, stage: _Stage, kind: Kind, items: Sequence[Item]) -> float:
        """Return the seconds that it takes."""
        before, clock = stage.wrap.signature(), self.tape.clock
        known = self.known(stage, (kind, before))
        if known is not None:
            self.tape.spike(known.run.rise)
            self.tape.add(known.run.net)
            if clock is not None:
                clock.add(known.spent)
            return sum(known.spent[0].values())
        start = clock.moment() if clock else None
        self.tape.hook(Hook.PIPELINE_PASS)
        peak, level = self.tape.peak, self.tape.level
        self.tape.peak = level
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.begin_half(kind)
        begins = stage.part.index == self.last and kind in (Kind.BACKWARD, Kind.INPUT)
        seed = seed_bytes(stage.part.plan.update.layout) if begins else 0
        self.tape.level -= seed
        play_pass(items, self.tape, stage.wrap, stage.part.scores.get(kind))
        self.tape.level += seed
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.end_half(kind)
        spent: tuple[Seconds, Seconds] = clock.since(start) if clock and start else ({}, {})
        if stage.wrap.signature() == before:
            run = Run(self.tape.peak - level, self.tape.level - level)
            stage.part.known[kind, before] = Did(run, spent)
        self.tape.peak = max(peak, self.tape.peak)
        return sum(spent[0].values())


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
    return _Stage(
        part=part,
        wrap=part.ghost.player(scene),
        left=part.plan.accumulate.micro_batches,
        net={kind: sum(map(net, items)) for kind, items in passes.items.items()},
        loss=passes.loss,
    )


class _Boundaries:
    """The tensors at the boundaries of a rank's stages, by who holds them: `size` bytes in all."""

    def __init__(self, tape: Tape, stages: dict[int, _Stage], last: int) -> None:
        self.tape, self.stages, self.last = tape, stages, last
        self.holders: dict[_Held, int] = {}
        self.size = 0

    def outputs_of(self, kind: Kind, action: Action) -> list[_Held]:
        """Return the tensors that a pass makes: its output, or the gradient of its input."""
        if kind is Kind.FORWARD:
            return [_Held(_Role.OUTPUT, action.stage, action.microbatch)]
        if kind is Kind.WEIGHT or action.stage == 0:
            return []
        return [_Held(_Role.INPUT_GRADIENT, action.stage, action.microbatch)]

    def done_with(self, kind: Kind, action: Action) -> list[_Held]:
        """Return what nobody needs behind a pass, once for each reason to keep it. Between the
        halves the stage's state keeps input, output and its gradient; the input keeps its own
        gradient."""
        stage, index = action.stage, action.microbatch
        is_last = stage == self.last
        if kind is Kind.FORWARD:
            return []
        if kind is Kind.INPUT:
            self.hold(_Held(_Role.INPUT_GRADIENT, stage, index))
            return [_Held(_Role.OUTPUT, stage, index)] if is_last else []
        released = [_Held(_Role.INPUT, stage, index)] if stage else []
        if kind is Kind.BACKWARD or not is_last:
            released.append(_Held(_Role.OUTPUT, stage, index))
        if kind is Kind.WEIGHT:
            released.append(_Held(_Role.INPUT_GRADIENT, stage, index))
        if not is_last:
            released.append(_Held(_Role.OUTPUT_GRADIENT, stage, index))
        return released

    def receive(self, message: Message) -> None:
        """A buffer is made, held for the pass that takes it."""
        is_input = message.phase is Phase.FORWARD
        role = _Role.INPUT if is_input else _Role.OUTPUT_GRADIENT
        tensor = _Held(role, message.target, message.microbatch)
        self.tape.add(self._bytes(tensor))
        self.size += self._bytes(tensor)
        self.holders[tensor] = 1

    def give(self, tensor: _Held) -> int:
        """Made by a pass, whose bytes it is no longer. Held for the next stage, or for the send
        that is to come; an output for its own micro-batch's backward, too."""
        size = self._bytes(tensor)
        self.size += size
        self.holders[tensor] = 1
        other = self._other_side(tensor)
        if other.stage in self.stages and tensor.role is _Role.OUTPUT:
            self.holders[tensor] += 1
        return size

    def send(self, message: Message) -> None:
        """A gradient goes over from the stage to its send; an output is held by both."""
        if message.phase is Phase.FORWARD:
            self.hold(_sent(message))

    def release(self, message: Message) -> None:
        self.drop(_sent(message))

    def hold(self, tensor: _Held) -> None:
        """Once more."""
        self.holders[self._own(tensor)] += 1

    def drop(self, tensor: _Held) -> None:
        own = self._own(tensor)
        self.holders[own] -= 1
        if not self.holders[own]:
            del self.holders[own]
            size = self._bytes(own)
            self.size -= size
            self.tape.add(-size)

    def _own(self, tensor: _Held) -> _Held:
        """Where two stages of a rank follow each other, what one takes is what the other gives."""
        other = self._other_side(tensor)
        return other if tensor.role in _TAKEN and other.stage in self.stages else tensor

    def _other_side(self, tensor: _Held) -> _Held:
        match tensor.role:
            case _Role.INPUT:
                return _Held(_Role.OUTPUT, tensor.stage - 1, tensor.microbatch)
            case _Role.OUTPUT:
                return _Held(_Role.INPUT, tensor.stage + 1, tensor.microbatch)
            case _Role.INPUT_GRADIENT:
                return _Held(_Role.OUTPUT_GRADIENT, tensor.stage - 1, tensor.microbatch)
            case _Role.OUTPUT_GRADIENT:
                return _Held(_Role.INPUT_GRADIENT, tensor.stage + 1, tensor.microbatch)

    def _bytes(self, tensor: _Held) -> int:
        passes = self.stages[tensor.stage].part.passes
        if tensor.role in (_Role.OUTPUT, _Role.OUTPUT_GRADIENT):
            return passes.output
        return passes.hidden


def _sent(message: Message) -> _Held:
    is_output = message.phase is Phase.FORWARD
    role = _Role.OUTPUT if is_output else _Role.INPUT_GRADIENT
    return _Held(role, message.source, message.microbatch)
