"""What the model computes along a timeline: the seconds of its layers, put where its units begin
and its gradients complete, around what a wrap does there.

A layer's forward pass is computed when the units that have its tensors are entered; its backward
pass as its gradients complete, each after its share. Shares are those of the elements of matrices,
which are what is multiplied. What stands in front of the layers comes first in forward and last in
backward, what stands behind them the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, assert_never

from ptrain.cost import Collective
from ptrain.derivation.activation_moves import COPIES
from ptrain.derivation.clock import Arrival, Clock, PassSeconds
from ptrain.derivation.layers import Representatives
from ptrain.derivation.tape import Marks, Tape
from ptrain.facts.model import (
    LayerWork,
    ModelWork,
    PassWork,
    TensorFacts,
    UnitFacts,
    prefixes,
)
from ptrain.facts.stages import Stage
from ptrain.rates.pace import UnknownRate, around
from ptrain.spec.activations import PLAIN, Kept
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Kind, Mark, Repeated, Run, boundaries

Shares = list[tuple[PassSeconds, float]]
Moved = tuple[tuple[Tier, int], ...]

_ENDS = Mark.ENTER, Mark.LEAVE
_BACKWARD_ENDS = Mark.PRE_BACKWARD, Mark.POST_BACKWARD


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class PlayedWork:
    """The work of those layers of a model, or of a stage of it, that are played, by name; `front`
    and `behind` are None where another stage has them. `tensors`: those of each layer, each with
    its unit's index; `kept`: how the layers' activations are kept; `moved`: what a layer's forward
    pass takes off the device, by tier."""

    layers: Mapping[str, LayerWork]
    tensors: Mapping[str, Sequence[tuple[TensorFacts, int]]]
    kept: Mapping[str, Kept]
    front: LayerWork | None = None
    behind: LayerWork | None = None
    moved: Mapping[str, Moved] = field(default_factory=dict)


def work_of_stage(
    spec: Spec,
    work: ModelWork,
    blocks: Sequence[str],
    stage: Stage,
    units: Sequence[UnitFacts],
    ends: tuple[bool, bool],
    played: Representatives | None,
    moved: Sequence[tuple[str, int]],
) -> PlayedWork:
    """Return what of a model's work is a stage's, of these `units` that are played, which may have
    the `ends` of the model."""
    numbers = {name: number for number, name in enumerate(block_names(blocks, work))}
    names = [stage.layers[place] for place, _ in played.turns] if played else stage.layers
    kept = spec.activations.of(len(work.layers))
    modes = {name: kept[numbers[name]] for name in stage.layers}
    return PlayedWork(
        kept=modes,
        moved=_by_layer(modes, moved),
        layers={name: work.layers[numbers[name]] for name in names},
        tensors=_tensors_of(units, names),
        front=work.front if ends[0] else None,
        behind=work.behind if ends[1] else None,
    )


def block_names(blocks: Sequence[str], work: ModelWork) -> Sequence[str]:
    """Return the names of a model's layers; of one that is built in nobody says them."""
    return blocks or [f"blocks.{number}" for number in range(len(work.layers))]


def _by_layer(modes: Mapping[str, Kept], moved: Sequence[tuple[str, int]]) -> dict[str, Moved]:
    """Return what each layer moves: of each tier all that keep something there as much."""
    shares: dict[Tier, int] = {}
    for tier in (Tier.HOST, Tier.FILE):
        number = sum(kept.tier is tier for kept in modes.values())
        if number:
            shares[tier] = sum(size for name, size in moved if name == tier.value) // number
    return {
        name: ((kept.tier, shares[kept.tier]),)
        for name, kept in modes.items()
        if kept.tier in shares
    }


class PassScore(NamedTuple):
    """What is computed in one kind of pass: `first` and `last` behind its first mark and ahead of
    its last one, `at_unit` as a unit's part begins, `at_gradient` ahead of a gradient; `moved` goes
    off the device as a unit's forward ends, and is back ahead of its backward."""

    first: Shares
    last: Shares
    at_unit: Mapping[int, Shares]
    at_gradient: Mapping[str, Shares]
    opening: int | None
    closing: int | None
    moved: Mapping[int, Moved]


class ActivationMoves:
    """What activations off the device take of a pass (`activations.run.apply`). To the host and
    back they go on lanes of their own; with the first layer that comes back sets out what the one
    before it moved. A file is written and read by the one that computes."""

    def __init__(self, clock: Clock, moved: Mapping[int, Moved]) -> None:
        self.clock, self.moved = clock, moved
        self.order = [*moved]
        self.coming: list[Arrival] | None = None

    def leave(self, unit: int) -> None:
        """A unit's forward is over."""
        for tier, size in self.moved.get(unit, ()):
            arrival = self.clock.copy(COPIES[tier][0], size)
            if tier is Tier.FILE:
                arrival.wait()

    def come_back(self, unit: int) -> None:
        """A unit's backward begins."""
        if unit not in self.moved:
            return
        if self.coming is None:  # nobody has set out: first it must be away
            self.coming = self._set_out(unit, self.clock.free.get(Collective.DEVICE_TO_HOST))
        for arrival in self.coming:
            arrival.wait()
        self.coming = None
        for tier, size in self.moved[unit]:
            if tier is Tier.FILE:
                self.clock.copy(COPIES[tier][1], size).wait()
        if unit != self.order[-1]:
            self.coming = self._set_out(self.order[self.order.index(unit) + 1], None)

    def _set_out(self, unit: int, since: float | None) -> list[Arrival]:
        away = None if since is None else max(since, self.clock.now)
        return [
            self.clock.copy(COPIES[tier][1], size, away)
            for tier, size in self.moved[unit]
            if tier is not Tier.FILE
        ]


class Computing:
    """A wrap whose model computes, in one pass."""

    def __init__(self, wrap: Marks, clock: Clock, score: PassScore) -> None:
        self.wrap, self.clock, self.score = wrap, clock, score
        self.first, self.last = list(score.first), list(score.last)
        self.moves = ActivationMoves(clock, score.moved)

    def enter(self, unit: int) -> None:
        self.wrap.enter(unit)
        self._begin(unit)

    def leave(self, unit: int) -> None:
        if unit == self.score.closing:
            self._play(self.last)
        self.moves.leave(unit)
        self.wrap.leave(unit)

    def before_backward(self, unit: int) -> None:
        self.wrap.before_backward(unit)
        self.moves.come_back(unit)
        self._begin(unit)

    def complete(self, gradient: Complete) -> None:
        for work, share in self.score.at_gradient.get(gradient.parameter, ()):
            self.clock.compute(work, share)
        self.wrap.complete(gradient)

    def after_backward(self, unit: int) -> None:
        if unit == self.score.closing:
            self._play(self.last)
        self.wrap.after_backward(unit)

    def finish(self) -> None:
        """The pass is over; one without marks has computed nothing yet."""
        self._play(self.first)
        self._play(self.last)

    def _begin(self, unit: int) -> None:
        if unit == self.score.opening:
            self._play(self.first)
        for work, share in self.score.at_unit.get(unit, ()):
            self.clock.compute(work, share)

    def _play(self, shares: Shares) -> None:
        """Once."""
        for work, share in shares:
            self.clock.compute(work, share)
        shares.clear()


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


def score(clock: Clock, kind: Kind, items: Sequence[Item], layers: PlayedWork) -> PassScore:
    """Return what is computed when in a pass with these items."""
    is_forward = kind is Kind.FORWARD
    marks = [*boundaries(items)]
    opens, closes = _ENDS if is_forward else _BACKWARD_ENDS
    completed = set() if is_forward else {*_completed(items)}
    at_unit, at_gradient = defaultdict[int, Shares](list), defaultdict[str, Shares](list)
    present, unplaced = {boundary.unit for boundary in marks}, Shares()
    for name, tensors in layers.tensors.items():
        seconds = _seconds(clock, layers.layers[name], kind, layers.kept[name])
        for tensor, unit, share in _shares(tensors, completed):
            place = unplaced
            if tensor in completed:
                place = at_gradient[tensor]
            elif unit in present:
                place = at_unit[unit]
            _put(place, seconds, share)
    front, behind = (
        [(_seconds(clock, work, kind), 1.0)] if work else []
        for work in (layers.front, layers.behind)
    )
    first, last = (front, behind) if is_forward else (behind, front)
    if not is_forward and front and (gradient := _behind_layers(items, at_gradient)):
        at_gradient[gradient], last = front, []
    return PassScore(
        first=[*first, *unplaced],
        last=last,
        at_unit=at_unit,
        at_gradient=at_gradient,
        opening=next((b.unit for b in marks if b.mark is opens), None),
        closing=next((b.unit for b in reversed(marks) if b.mark is closes), None),
        moved=_moved(marks, layers, is_forward=is_forward),
    )


def _put(place: Shares, work: PassSeconds, share: float) -> None:
    """Add a share of a layer's pass. Shares that follow each other are one, unless they send."""
    if place and place[-1][0] is work and not work.sums and not work.messages:
        share += place.pop()[1]
    place.append((work, share))


def _shares(
    tensors: Sequence[tuple[TensorFacts, int]], completed: Container[str]
) -> Iterator[tuple[str, int, float]]:
    """Yield (tensor, its unit, its share) of those of a layer whose gradients complete in a pass,
    else of all: by their elements, where there are matrices by those of matrices. A layer without
    tensors has one share."""
    own = [(t, unit) for t, unit in tensors if t.name in completed] or tensors
    sizes = [t.numel if len(t.shape) > 1 else 0 for t, _ in own]
    if not any(sizes):
        sizes = [t.numel for t, _ in own]
    if not (total := sum(sizes)):
        yield "", -1, 1.0
    yield from (
        (tensor.name, unit, size / total)
        for (tensor, unit), size in zip(own, sizes, strict=True)
        if size
    )


def _moved(marks: Sequence[Boundary], layers: PlayedWork, *, is_forward: bool) -> dict[int, Moved]:
    """Return what moves at which unit, in the order of the pass: a layer's goes when the last unit
    that has tensors of it ends, and comes when the first one's backward begins."""
    if not layers.moved:
        return {}
    mark = Mark.LEAVE if is_forward else Mark.PRE_BACKWARD
    order = [boundary.unit for boundary in marks if boundary.mark is mark]
    at: defaultdict[int, list[tuple[Tier, int]]] = defaultdict(list)
    for name, parts in layers.tensors.items():
        own = [unit for unit in order if unit in {unit for _, unit in parts}]
        if own:
            at[own[-1] if is_forward else own[0]] += layers.moved.get(name, ())
    return {unit: tuple(at[unit]) for unit in order if at.get(unit)}


def _seconds(clock: Clock, work: LayerWork, kind: Kind, kept: Kept = PLAIN) -> PassSeconds:
    return clock.pass_seconds(_pass(work, kind), around(kept, kind))


def _pass(work: LayerWork, kind: Kind) -> PassWork:
    match kind:
        case Kind.FORWARD:
            return work.forward
        case Kind.BACKWARD:
            return work.backward
        case Kind.INPUT:
            return _half(work, work.inputs)
        case Kind.WEIGHT:
            return _half(work, work.weights)


def _half(work: LayerWork, half: PassWork) -> PassWork:
    if work.backward and not (work.inputs or work.weights):
        raise UnknownRate("the work of the two backward halves of this model is unknown")
    return half


def _tensors_of(
    units: Sequence[UnitFacts], layers: Sequence[str]
) -> dict[str, list[tuple[TensorFacts, int]]]:
    """Return by layer its tensors, each with its unit's index."""
    parts: dict[str, list[tuple[TensorFacts, int]]] = {name: [] for name in layers}
    for index, unit in enumerate(units):
        for tensor in unit.tensors:
            layer = next((name for name in prefixes(tensor.name) if name in parts), None)
            if layer is not None:
                parts[layer].append((tensor, index))
    return parts


def _completed(items: Iterable[Item]) -> Iterator[str]:
    """Yield the parameters whose gradients complete, of what is repeated once."""
    for item in items:
        if isinstance(item, Complete):
            yield item.parameter
        elif isinstance(item, Repeated):
            yield from _completed(item.items)


def _behind_layers(items: Iterable[Item], of_layers: Mapping[str, Shares]) -> str | None:
    """Return the first gradient behind those of all layers."""
    following: str | None = None
    for parameter in _completed(items):
        following = None if parameter in of_layers else following or parameter
    return following
