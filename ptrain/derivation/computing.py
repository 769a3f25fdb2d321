"""Places the compute of a model on the timeline of a step.

A layer's forward pass is computed when the units that have its tensors are entered. Its backward
pass is computed as its gradients complete, a share before each gradient. Shares are proportional to
the elements of matrices, because these are multiplied. Work before the layers (the embedding) comes
first in forward and last in backward; work after the layers (the head) the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, assert_never

from ptrain.cost import Collective
from ptrain.derivation.clock import Arrival, Clock, PassSeconds
from ptrain.derivation.layers import Representatives
from ptrain.derivation.tape import COPIES, Marks, Tape
from ptrain.facts.model import (
    LayerWork,
    ModelWork,
    PassWork,
    TensorFacts,
    UnitFacts,
    module_prefixes,
)
from ptrain.facts.stages import Stage
from ptrain.rates.pace import UnknownRate, operator_hook
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Kind, Mark, Repeated, Run, boundaries

Shares = list[tuple[PassSeconds, float]]
Moved = tuple[tuple[Tier, int], ...]

_ENDS = Mark.ENTER, Mark.LEAVE
_BACKWARD_ENDS = Mark.PRE_BACKWARD, Mark.POST_BACKWARD


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class PlayedWork:
    """The work of a model's or a stage's layers that are simulated.

    Attributes:
        layers: The work of each layer, by name.
        tensors: The tensors of each layer, each with the index of its unit.
        kept: How each layer's activations are kept.
        front: The work before the layers. None if another stage has it.
        behind: The work after the layers. None if another stage has it.
        moved: By layer, the (tier, bytes) that its forward pass moves off the device.
    """

    layers: Mapping[str, LayerWork]
    tensors: Mapping[str, Sequence[tuple[TensorFacts, int]]]
    kept: Mapping[str, ActivationMode]
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
    """Return the part of a model's work that belongs to a stage.

    Args:
        spec: The spec, for the activation modes.
        work: The work of the full model.
        blocks: The names of the model's layers. Empty for built-in models.
        stage: The stage.
        units: The units that are simulated.
        ends: Whether the stage has the model's start, and whether it has its end.
        played: The units that represent equal ones. None if each unit is simulated.
        moved: (tier, bytes) of each activation that a forward pass of the stage moves.
    """
    numbers = {name: number for number, name in enumerate(block_names(blocks, work))}
    names = [stage.layers[place] for place, _ in played.turns] if played else stage.layers
    kept = spec.activations.block_modes(len(work.layers))
    modes = {name: kept[numbers[name]] for name in stage.layers}
    return PlayedWork(
        kept=modes,
        moved=_moved_by_layer(modes, moved),
        layers={name: work.layers[numbers[name]] for name in names},
        tensors=_tensors_of(units, names),
        front=work.front if ends[0] else None,
        behind=work.behind if ends[1] else None,
    )


def block_names(blocks: Sequence[str], work: ModelWork) -> Sequence[str]:
    """Return the names of a model's layers.

    Args:
        blocks: The names of the layers of a traced model. Empty for built-in models.
        work: The work of the full model, which has the number of layers.

    Returns:
        `blocks`, or `blocks.0`, `blocks.1` and so on if it is empty.
    """
    return blocks or [f"blocks.{number}" for number in range(len(work.layers))]


def _moved_by_layer(
    modes: Mapping[str, ActivationMode], moved: Sequence[tuple[str, int]]
) -> dict[str, Moved]:
    """Return the (tier, bytes) that each layer moves.

    The bytes of a tier are shared equally by the layers that keep activations there.
    """
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
    """The compute of one kind of pass, placed on its timeline.

    Attributes:
        first: Work after the first mark of the pass.
        last: Work before the last mark of the pass.
        at_unit: Work at the start of each unit's part.
        at_gradient: Work before each gradient completes.
        opening: The unit of the first mark. None without marks.
        closing: The unit of the last mark. None without marks.
        moved: By unit, the activations that leave the device when its forward ends and are back
            before its backward.
    """

    first: Shares
    last: Shares
    at_unit: Mapping[int, Shares]
    at_gradient: Mapping[str, Shares]
    opening: int | None
    closing: int | None
    moved: Mapping[int, Moved]


class ActivationMoves:
    """The copies of offloaded activations in one pass, as `activations.run.apply` issues them.

    Copies to and from the host run on separate lanes. When a layer's activations have returned, the
    copy for the next layer of the backward pass starts. Files are written and read synchronously by
    the rank.
    """

    def __init__(self, clock: Clock, moved: Mapping[int, Moved]) -> None:
        self.clock, self.moved = clock, moved
        self.order = [*moved]
        self.coming: list[Arrival] | None = None

    def leave(self, unit: int) -> None:
        """Copy a unit's activations off the device at the end of its forward pass.

        Args:
            unit: Index of the unit in the stage. A unit without moved activations is ignored.
        """
        for tier, size in self.moved.get(unit, ()):
            arrival = self.clock.copy(COPIES[tier][0], size)
            if tier is Tier.FILE:
                arrival.wait()

    def come_back(self, unit: int) -> None:
        """Wait for a unit's activations at the start of its backward pass."""
        if unit not in self.moved:
            return
        # No block prefetches the last one's activations, so their return starts here and is
        # exposed.
        if self.coming is None:  # the first one: its copy to the host must have ended
            self.coming = self._start_return(unit, self.clock.free.get(Collective.DEVICE_TO_HOST))
        for arrival in self.coming:
            arrival.wait()
        self.coming = None
        for tier, size in self.moved[unit]:
            if tier is Tier.FILE:
                self.clock.copy(COPIES[tier][1], size).wait()
        if unit != self.order[-1]:
            self.coming = self._start_return(self.order[self.order.index(unit) + 1], None)

    def _start_return(self, unit: int, since: float | None) -> list[Arrival]:
        away = None if since is None else max(since, self.clock.now)
        return [
            self.clock.copy(COPIES[tier][1], size, away)
            for tier, size in self.moved[unit]
            if tier is not Tier.FILE
        ]


class Computing(Marks):
    """A wrap together with the compute of the model, in one pass."""

    def __init__(self, wrap: Marks, clock: Clock, score: PassScore) -> None:
        self.wrap, self.clock, self.score = wrap, clock, score
        self.first, self.last = list(score.first), list(score.last)
        self.moves = ActivationMoves(clock, score.moved)

    def enter(self, unit: int) -> None:
        self.wrap.enter(unit)
        self._begin(unit)

    def leave(self, unit: int) -> None:
        if unit == self.score.closing:
            self._play_once(self.last)
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
            self._play_once(self.last)
        self.wrap.after_backward(unit)

    def finish(self) -> None:
        """End the pass. A pass without marks computes all its work here."""
        self._play_once(self.first)
        self._play_once(self.last)

    def _begin(self, unit: int) -> None:
        if unit == self.score.opening:
            self._play_once(self.first)
        for work, share in self.score.at_unit.get(unit, ()):
            self.clock.compute(work, share)

    def _play_once(self, shares: Shares) -> None:
        """Compute work and remove it from the list, so that it is computed once."""
        for work, share in shares:
            self.clock.compute(work, share)
        shares.clear()


def play_pass(items: Sequence[Item], tape: Tape, wrap: Marks, score: PassScore | None) -> None:
    """Simulate a pass on the tape, with the model's compute if there is a clock.

    Args:
        items: The timeline of the pass.
        tape: Counts memory, and time if it has a clock.
        wrap: Receives the boundaries of units and the completed gradients.
        score: The compute of the pass. None simulates only memory and the wrap's communication.
    """
    if score is None or tape.clock is None:
        play_items(items, tape, wrap)
        return
    computing = Computing(wrap, tape.clock, score)
    play_items(items, tape, computing)
    computing.finish()


def play_items(items: Iterable[Item], tape: Tape, wrap: Marks) -> None:
    """Simulate timeline items: memory on the tape, marks and gradients in the wrap.

    Args:
        items: The timeline. Repeated items are executed once and counted several times.
        tape: Counts the bytes of each run of allocations.
        wrap: Receives the boundaries of units and the completed gradients.
    """
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
            tape.repeat(item.times, partial(play_items, item.items, tape, wrap))
        else:
            assert_never(item)


def score_pass(clock: Clock, kind: Kind, items: Sequence[Item], layers: PlayedWork) -> PassScore:
    """Return the compute of a pass, placed on its timeline.

    Args:
        clock: The clock, for the seconds of each layer.
        kind: The kind of pass.
        items: The timeline of the pass.
        layers: The work of the layers.
    """
    is_forward = kind is Kind.FORWARD
    marks = [*boundaries(items)]
    opens, closes = _ENDS if is_forward else _BACKWARD_ENDS
    completed = set() if is_forward else {*_completed_parameters(items)}
    at_unit, at_gradient = defaultdict[int, Shares](list), defaultdict[str, Shares](list)
    present, unplaced = {boundary.unit for boundary in marks}, Shares()
    for name, tensors in layers.tensors.items():
        # All shares of a layer are of one PassSeconds, so that consecutive ones can be merged by
        # identity.
        seconds = _layer_seconds(clock, layers.layers[name], kind, layers.kept[name])
        for tensor, unit, share in _tensor_shares(tensors, completed):
            place = unplaced
            if tensor in completed:
                place = at_gradient[tensor]
            elif unit in present:
                place = at_unit[unit]
            _append_share(place, seconds, share)
    front, behind = (
        [(_layer_seconds(clock, work, kind), 1.0)] if work else []
        for work in (layers.front, layers.behind)
    )
    first, last = (front, behind) if is_forward else (behind, front)
    # The embedding's backward is the last work of the pass, but its gradient completes before wraps
    # end the root's unit. The work belongs before that gradient, which a reduction may overlap.
    if not is_forward and front and (gradient := _gradient_after_layers(items, at_gradient)):
        at_gradient[gradient], last = front, []
    return PassScore(
        first=[*first, *unplaced],
        last=last,
        at_unit=at_unit,
        at_gradient=at_gradient,
        opening=next((b.unit for b in marks if b.mark is opens), None),
        closing=next((b.unit for b in reversed(marks) if b.mark is closes), None),
        moved=_moved_at_units(marks, layers, is_forward=is_forward),
    )


def _append_share(place: Shares, work: PassSeconds, share: float) -> None:
    """Append a share of a layer's pass. Consecutive shares are merged, unless the pass
    communicates."""
    if place and place[-1][0] is work and not work.sums and not work.messages:
        share += place.pop()[1]
    place.append((work, share))


def _tensor_shares(
    tensors: Sequence[tuple[TensorFacts, int]], completed: Container[str]
) -> Iterator[tuple[str, int, float]]:
    """Yield (tensor, index of its unit, share) of a layer.

    Shares are those of the tensors whose gradients complete in the pass, or of all tensors if none
    do. They are proportional to the elements of matrices, or of all tensors if there are no
    matrices. A layer without tensors has one share.
    """
    own = [(t, unit) for t, unit in tensors if t.name in completed] or tensors
    # Vectors (norms, biases) are a small part of the products, but often complete first or last.
    # They would shift compute to the wrong gradients.
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


def _moved_at_units(
    marks: Sequence[Boundary], layers: PlayedWork, *, is_forward: bool
) -> dict[int, Moved]:
    """Return the activations that move at each unit, in the order of the pass.

    A layer's activations leave when its last unit ends, and return when the backward of its first
    unit begins.
    """
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


def _layer_seconds(
    clock: Clock, work: LayerWork, kind: Kind, kept: ActivationMode = PLAIN
) -> PassSeconds:
    return clock.pass_seconds(_pass_work(work, kind), operator_hook(kept, kind))


def _pass_work(work: LayerWork, kind: Kind) -> PassWork:
    match kind:
        case Kind.FORWARD:
            return work.forward
        case Kind.BACKWARD:
            return work.backward
        case Kind.INPUT:
            return _require_half(work, work.inputs)
        case Kind.WEIGHT:
            return _require_half(work, work.weights)


def _require_half(work: LayerWork, half: PassWork) -> PassWork:
    if work.backward and not (work.inputs or work.weights):
        raise UnknownRate("the work of the two backward halves of this model is unknown")
    return half


def _tensors_of(
    units: Sequence[UnitFacts], layers: Sequence[str]
) -> dict[str, list[tuple[TensorFacts, int]]]:
    """Return the tensors of each layer, each with the index of its unit."""
    parts: dict[str, list[tuple[TensorFacts, int]]] = {name: [] for name in layers}
    for index, unit in enumerate(units):
        for tensor in unit.tensors:
            layer = next((name for name in module_prefixes(tensor.name) if name in parts), None)
            if layer is not None:
                parts[layer].append((tensor, index))
    return parts


def _completed_parameters(items: Iterable[Item]) -> Iterator[str]:
    """Yield the parameters whose gradients complete, those of repeated items once."""
    for item in items:
        if isinstance(item, Complete):
            yield item.parameter
        elif isinstance(item, Repeated):
            yield from _completed_parameters(item.items)


def _gradient_after_layers(items: Iterable[Item], of_layers: Mapping[str, Shares]) -> str | None:
    """Return the first gradient that completes after all gradients of layers, or None."""
    following: str | None = None
    for parameter in _completed_parameters(items):
        following = None if parameter in of_layers else following or parameter
    return following
