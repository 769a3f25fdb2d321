"""The computation of a recording by layer: before the layers, in each of them, and after them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from ptrain.facts.model import (
    InnerCollective,
    LayerWork,
    ModelWork,
    Operator,
    PassWork,
    WorkByKind,
)
from ptrain.models.trace import Event, GradientComplete, Recording
from ptrain.models.work import OperatorSizes, RecordedCollective
from ptrain.spec.cluster import OperatorKind
from ptrain.timeline import Boundary, Mark

Computed = list[OperatorSizes | RecordedCollective]  # in the order of execution
Units = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWorks:
    """Computation by pass: before the first layer (`front`), per layer, and after the last
    (`behind`)."""

    front: dict[str, Computed] = field(default_factory=dict)
    layers: tuple[dict[str, Computed], ...] = ()
    behind: dict[str, Computed] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[dict[str, Computed], ...]:
        """The computation before, in and after the layers."""
        return self.front, *self.layers, self.behind


def by_layer(recording: Recording, units: Units, blocks: Sequence[str]) -> LayerWorks | None:
    """Return the computation of a recording by layer.

    Args:
        recording: The recording of one micro-batch.
        units: Module names of the wrap units.
        blocks: Names of the layers, first to last.

    Returns:
        The works by layer and pass. None if the recording's boundaries do not separate the layers:
        a block is no wrap unit, or does not run exactly once and in order.
    """
    places = {modules: place for place, modules in enumerate(units)}
    numbers = [places.get((block,)) for block in blocks]
    if not numbers or None in numbers:
        return None
    works = LayerWorks(layers=tuple({} for _ in blocks))
    for name, events in recording.passes.items():
        bounds = layer_bounds(
            name, events, [number for number in numbers if number is not None], blocks
        )
        if bounds is None:
            return None
        is_reversed = name in ("backward", "input")
        ordered = works.parts[::-1] if is_reversed else works.parts
        for part in ordered:
            part[name] = []
        for place, work in recording.works[name]:
            ordered[bisect_left(bounds, place)][name].append(work.record)
    return works


def work_of(
    units: Units, blocks: Sequence[str], whole: Recording, halves: Recording | None = None
) -> WorkByKind | None:
    """Return the computation of a model or stage, by kind of operator.

    Args:
        units: Module names of the wrap units.
        blocks: Names of the layers.
        whole: Recording with full backward passes.
        halves: Recording of the same micro-batch with the backward pass in halves, if any.

    Returns:
        The work. If layers cannot be separated, the first layer has all of it; without layers
            `front` has. None if an operator's computation is unknown.
    """
    return (
        None
        if whole.is_opaque
        else WorkByKind.from_model(_model_work(units, blocks, whole, halves))
    )


def _model_work(
    units: Units, blocks: Sequence[str], whole: Recording, halves: Recording | None
) -> ModelWork:
    """Return the work by layer."""
    works = by_layer(whole, units, blocks)
    in_halves = None if halves is None else by_layer(halves, units, blocks)
    if works is None or (halves is not None and in_halves is None):
        return _undivided_work(len(blocks), whole, halves)
    front, *layers, behind = (
        _layer_work(computed, of_halves)
        for computed, of_halves in zip(
            works.parts,
            in_halves.parts if in_halves else ({},) * len(works.parts),
            strict=True,
        )
    )
    return ModelWork(front=front, layers=tuple(layers), behind=behind)


def _undivided_work(layers: int, whole: Recording, halves: Recording | None) -> ModelWork:
    """Return the work of recordings whose layers cannot be separated."""
    all_of_it = _layer_work(_by_pass(whole), _by_pass(halves) if halves else {})
    nothing = LayerWork(forward=(), backward=())
    if not layers:
        return ModelWork(front=all_of_it, layers=(), behind=nothing)
    # The sum over layers is right, although their division is unknown. A wrap then finds all
    # compute in the first layer.
    others = (nothing,) * (layers - 1)
    return ModelWork(front=nothing, layers=(all_of_it, *others), behind=nothing)


def _by_pass(recording: Recording) -> dict[str, Computed]:
    return {name: [work.record for _, work in works] for name, works in recording.works.items()}


def _layer_work(whole: dict[str, Computed], halves: dict[str, Computed]) -> LayerWork:
    return LayerWork(
        forward=pass_work(whole["forward"]),
        backward=pass_work(whole["backward"]),
        inputs=pass_work(halves.get("input", [])),
        weights=pass_work(halves.get("weight", [])),
    )


def pass_work(computed: Computed) -> PassWork:
    """Return the operators of a pass, with equal consecutive ones merged and views last."""

    def entry(group: WorkGroup) -> Operator | InnerCollective:
        operator = group.what.operator
        # A collective that overlaps others is never merged: each has a different wait.
        if isinstance(operator, InnerCollective) and group.beside:
            return operator._replace(beside=group.beside)
        return operator._replace(times=group.times)

    return tuple([entry(group) for group in group_work(computed)])


@dataclass(frozen=True, slots=True)
class WorkGroup:
    """One operator or collective with its number of consecutive runs.

    `beside`: for a collective, the number of later groups that run before it is awaited.
    """

    what: OperatorSizes | RecordedCollective
    times: int = 1
    beside: int = 0


def group_work(computed: Computed) -> list[WorkGroup]:
    """Return the works of a pass, with equal consecutive ones merged and views last.

    A collective in flight splits groups, so that its overlap ends at a group boundary.
    """
    awaited = _arrivals(computed)
    edges = sorted(awaited.values())

    def alike(entry: tuple[int, OperatorSizes | RecordedCollective]) -> tuple[object, ...]:
        place, what = entry
        return what.operator, awaited.get(place), bisect_right(edges, place)

    groups = [[*group] for _, group in groupby(enumerate(views_last(computed)), key=alike)]
    number_of = {place: number for number, group in enumerate(groups) for place, _ in group}

    def merged(number: int) -> WorkGroup:
        place, what = groups[number][0]
        if place not in awaited:
            return WorkGroup(what, times=len(groups[number]))
        return WorkGroup(what, beside=number_of.get(awaited[place], len(groups)) - number - 1)

    return [merged(number) for number in range(len(groups))]


def _arrivals(computed: Computed) -> dict[int, int]:
    """Return for each awaited collective the index at which it is awaited; indices skip views."""
    places = [*accumulate((not _is_view(what) for what in computed), initial=0)]
    return {
        places[number]: places[min(number + 1 + what.beside, len(computed))]
        for number, what in enumerate(computed)
        if isinstance(what, RecordedCollective) and what.beside
    }


def views_last(computed: Computed) -> Computed:
    """Return the works with views moved to the end, where they merge into one entry.

    The order of views does not matter, because they run no kernel.
    """
    return sorted(computed, key=_is_view)


def _is_view(what: OperatorSizes | RecordedCollective) -> bool:
    return isinstance(what, OperatorSizes) and what.kind is OperatorKind.VIEW


def layer_bounds(
    name: str, events: Sequence[Event], numbers: Sequence[int], blocks: Sequence[str]
) -> list[int] | None:
    """Return the event index at which each layer starts, and the one at which the last layer ends.

    The weight half has no boundaries. There a layer ends with its last gradient, and nothing comes
    before the first layer.

    Args:
        name: Name of the pass: `forward`, `backward`, `input` or `weight`.
        events: Events of the pass.
        numbers: Index of each layer's wrap unit, first layer first.
        blocks: Names of the layers, first to last.

    Returns:
        One index more than there are layers, in the order of the pass. None if layers do not run
        once and in order.
    """
    if name == "weight":
        ends = [_last_gradient(events, f"{block}.") for block in blocks]
        bounds = [-1, *ends]
        return bounds if bounds == sorted(bounds) else None
    first, last = (
        (Mark.ENTER, Mark.LEAVE) if name == "forward" else (Mark.PRE_BACKWARD, Mark.POST_BACKWARD)
    )
    ordered = numbers if name == "forward" else numbers[::-1]
    marks = [*(Boundary(first, number) for number in ordered), Boundary(last, ordered[-1])]
    places = defaultdict[Boundary, list[int]](list)
    for place, event in enumerate(events):
        if isinstance(event, Boundary):
            places[event].append(place)
    if any(len(places[mark]) != 1 for mark in marks):
        return None
    bounds = [places[mark][0] for mark in marks]
    return bounds if bounds == sorted(bounds) else None


def _last_gradient(events: Sequence[Event], prefix: str) -> int:
    """Return the index of the last gradient of parameters with this prefix, or -1."""
    return max(
        (
            place
            for place, event in enumerate(events)
            if isinstance(event, GradientComplete) and event.parameter.startswith(prefix)
        ),
        default=-1,
    )
