"""What a rank of a pipeline allocates in a step: its stages' passes in the order of the schedule,
with what crosses their boundaries and what each stage's wrap does.

What a stage is given and what it hands on live as long as torch's runtime holds them
(`axes.pipeline.exchange`): a stage's input and output until their micro-batch has come back, with
halves until the second of them; where two stages of a rank follow each other, one's output is the
other's input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ptrain.axes.pipeline.exchange import End, Exchange, Held, Role, Turn, Verb
from ptrain.axes.pipeline.schedule import Action
from ptrain.costs import Phase
from ptrain.derivation.tape import Scene, Tape, Wrap
from ptrain.derivation.timeline import play, wrap_of
from ptrain.facts.model import ModelFacts
from ptrain.facts.passes import Passes, net
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary, Item, Kind, Mark, Run

_TAKEN = (Role.INPUT, Role.OUTPUT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One rank's step up to the update. `activations`: bytes when most of them lived as a backward
    pass began, and `moved` what was off the device then, (tier, bytes); `gathered`: of units, when
    the last one did."""

    tape: Tape
    wraps: tuple[Wrap, ...]
    activations: int
    gathered: int
    moved: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has of a stage: the plan, the facts and the passes are its own."""

    index: int
    plan: Plan
    facts: ModelFacts
    passes: Passes


def play_rank(spec: Spec, parts: Sequence[Part], turns: Iterable[Turn], is_last: int) -> Played:
    """`turns` of one step; `is_last` is the index of the model's last stage."""
    rank = _Rank(spec, parts, is_last)
    for turn in turns:
        match turn:
            case Exchange():
                rank.exchange(turn)
            case End():
                rank.end()
            case Action():
                rank.compute(turn)
    return Played(
        tape=rank.tape,
        wraps=tuple(stage.wrap for stage in rank.stages.values()),
        activations=rank.most,
        gathered=rank.gathered,
        moved=tuple(rank.most_moved.items()),
    )


@dataclass(slots=True)
class _Stage:
    """`left`: backward passes of the step. `known`: what a pass did that left the wrap as it was,
    by the wrap's state before it."""

    part: Part
    wrap: Wrap
    left: int
    begun: bool = False
    known: dict[Hashable, Run] = field(default_factory=dict)


class _Rank:
    def __init__(self, spec: Spec, parts: Sequence[Part], last: int) -> None:
        self.tape, self.last = Tape(), last
        self.stages = {part.index: _stage(spec, part, self.tape) for part in parts}
        self.boundaries = _Boundaries(self.tape, self.stages, last)
        self.saved = self.most = self.gathered = 0
        self.moved, self.most_moved = Counter[str](), Counter[str]()
        self.replaced: Held | None = None

    def exchange(self, exchange: Exchange) -> None:
        match exchange.verb:
            case Verb.RECEIVE:
                self.boundaries.make(exchange.tensor)
            case Verb.HOLD:
                # a gradient goes over from the stage to its send
                if exchange.tensor.role is not Role.INPUT_GRADIENT:
                    self.boundaries.hold(exchange.tensor)
            case Verb.DROP:
                self.boundaries.drop(exchange.tensor)
            case Verb.REPLACE:
                self.replaced = exchange.tensor

    def end(self) -> None:
        """No micro-batch is in flight: what is saved still are losses."""
        self.boundaries.clear()
        self.tape.add(-self.saved)
        self.saved = 0

    def compute(self, action: Action) -> None:
        stage, kind = self.stages[action.stage], action.kind
        if action.stage == 0 and kind is Kind.INPUT:
            return  # nobody waits for gradients of tokens
        if action.stage == 0 and kind is Kind.WEIGHT:
            kind = Kind.BACKWARD
        if kind is Kind.FORWARD:
            self.tape.enter(Phase.FORWARD)
        else:
            self._begin_backward(stage, kind)
        items = stage.part.passes.items[kind]
        if self.replaced is None:
            self._play(stage, kind, items)
        else:
            self._replace(stage, items)
        self.saved += sum(map(net, items))
        for tier, size in stage.part.passes.moved:
            self.moved[tier] += size if kind is Kind.FORWARD else -size
        for tensor in self.boundaries.made(kind, action):
            self.saved -= self.boundaries.give(tensor)
        for tensor in self.boundaries.done_with(kind, action):
            self.boundaries.drop(tensor)

    def _replace(self, stage: _Stage, items: Sequence[Item]) -> None:
        """A forward pass whose output takes another one's place, before its loss is computed."""
        assert self.replaced is not None
        root = len(stage.part.facts.units) - 1
        place = items.index(Boundary(Mark.LEAVE, root)) + 1
        play(items[:place], self.tape, stage.wrap)
        self.boundaries.drop(self.replaced)
        self.replaced = None
        play(items[place:], self.tape, stage.wrap)

    def _begin_backward(self, stage: _Stage, kind: Kind) -> None:
        self.tape.enter(Phase.BACKWARD)
        lingering = sum(each.wrap.lingering() for each in self.stages.values())
        now = self.saved + self.boundaries.size + lingering
        if now >= self.most:
            self.most, self.most_moved = now, Counter(self.moved)
        self.gathered = sum(each.wrap.gathered() for each in self.stages.values())
        is_last = kind is not Kind.INPUT and stage.left == 1
        stage.left -= kind is not Kind.INPUT
        stage.wrap.begin(is_first=not stage.begun, is_last=is_last)
        stage.begun = stage.begun or kind is not Kind.INPUT

    def known(self, stage: _Stage, key: Hashable) -> Run | None:
        """What an equal pass did."""
        return stage.known.get(key)

    def _play(self, stage: _Stage, kind: Kind, items: Sequence[Item]) -> None:
        before = stage.wrap.signature()
        known = self.known(stage, (kind, before))
        if known is not None:
            self.tape.spike(known.rise)
            self.tape.add(known.net)
            return
        peak, level = self.tape.peak, self.tape.level
        self.tape.peak = level
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.begin_half(kind)
        play(items, self.tape, stage.wrap)
        if kind in (Kind.INPUT, Kind.WEIGHT):
            stage.wrap.end_half(kind)
        if stage.wrap.signature() == before:
            did = Run(self.tape.peak - level, self.tape.level - level)
            stage.known[kind, before] = did
        self.tape.peak = max(peak, self.tape.peak)


def _stage(spec: Spec, part: Part, tape: Tape) -> _Stage:
    timeline = part.passes.timeline
    scene = Scene(tape=tape, spec=spec, facts=part.facts, plan=part.plan, timeline=timeline)
    return _Stage(part, wrap_of(scene), part.plan.accumulate.micro_batches)


class _Boundaries:
    """The tensors at the boundaries of a rank's stages, by who holds them: `size` bytes in all."""

    def __init__(self, tape: Tape, stages: dict[int, _Stage], last: int) -> None:
        self.tape, self.stages, self.last = tape, stages, last
        self.holders: dict[Held, int] = {}
        self.size = 0

    def made(self, kind: Kind, action: Action) -> list[Held]:
        """What a pass gives."""
        if kind is Kind.FORWARD:
            return [Held(Role.OUTPUT, action.stage, action.microbatch)]
        if kind is Kind.WEIGHT or action.stage == 0:
            return []
        return [Held(Role.INPUT_GRADIENT, action.stage, action.microbatch)]

    def done_with(self, kind: Kind, action: Action) -> list[Held]:
        """What nobody needs behind a pass, once for each reason to keep it. Between the halves the
        stage's state keeps input, output and its gradient; the input keeps its own gradient."""
        stage, index = action.stage, action.microbatch
        is_last = stage == self.last
        if kind is Kind.FORWARD:
            return []
        if kind is Kind.INPUT:
            self.hold(Held(Role.INPUT_GRADIENT, stage, index))
            return [Held(Role.OUTPUT, stage, index)] if is_last else []
        # of a whole backward pass the loss keeps the nodes, and the last one of them the input
        is_kept = stage == 0 or (is_last and kind is Kind.BACKWARD)
        found = [] if is_kept else [Held(Role.INPUT, stage, index)]
        if kind is Kind.BACKWARD or not is_last:
            found.append(Held(Role.OUTPUT, stage, index))
        if kind is Kind.WEIGHT:
            found.append(Held(Role.INPUT_GRADIENT, stage, index))
        if not is_last:
            found.append(Held(Role.OUTPUT_GRADIENT, stage, index))
        return found

    def make(self, tensor: Held) -> None:
        """A buffer for what is received, held for the pass that takes it."""
        self.tape.add(self._bytes(tensor))
        self.size += self._bytes(tensor)
        self.holders[tensor] = 1

    def give(self, tensor: Held) -> int:
        """Made by a pass, whose bytes it is no longer. Held for the next stage, or for the send
        that is to come; an output for its own micro-batch's backward, too."""
        size = self._bytes(tensor)
        self.size += size
        self.holders[tensor] = 1
        other = self._other_side(tensor)
        if other.stage in self.stages and tensor.role is Role.OUTPUT:
            self.holders[tensor] += 1
        return size

    def hold(self, tensor: Held) -> None:
        """Once more."""
        self.holders[self._own(tensor)] += 1

    def drop(self, tensor: Held) -> None:
        own = self._own(tensor)
        self.holders[own] -= 1
        if not self.holders[own]:
            del self.holders[own]
            size = self._bytes(own)
            self.size -= size
            self.tape.add(-size)

    def clear(self) -> None:
        """Nothing is held any longer."""
        self.tape.add(-self.size)
        self.holders.clear()
        self.size = 0

    def _own(self, tensor: Held) -> Held:
        """Where two stages of a rank follow each other, what one takes is what the other gives."""
        other = self._other_side(tensor)
        return other if tensor.role in _TAKEN and other.stage in self.stages else tensor

    def _other_side(self, tensor: Held) -> Held:
        match tensor.role:
            case Role.INPUT:
                return Held(Role.OUTPUT, tensor.stage - 1, tensor.microbatch)
            case Role.OUTPUT:
                return Held(Role.INPUT, tensor.stage + 1, tensor.microbatch)
            case Role.INPUT_GRADIENT:
                return Held(Role.OUTPUT_GRADIENT, tensor.stage - 1, tensor.microbatch)
            case Role.OUTPUT_GRADIENT:
                return Held(Role.INPUT_GRADIENT, tensor.stage + 1, tensor.microbatch)

    def _bytes(self, tensor: Held) -> int:
        passes = self.stages[tensor.stage].part.passes
        if tensor.role in (Role.OUTPUT, Role.OUTPUT_GRADIENT):
            return passes.output
        return passes.hidden
