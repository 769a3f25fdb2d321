"""What a recording says that each layer computed, the front of a model before its layers and what
is behind them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from ptrain.facts.operators import InnerCollective
from ptrain.models.trace import Completion, Event, Recording
from ptrain.models.work import OperatorSizes
from ptrain.timeline import Boundary, Mark

Computed = list[OperatorSizes | InnerCollective]  # in the order of execution
Units = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWorks:
    """By pass, `front` before the first layer, by layer and `behind` the last one."""

    front: dict[str, Computed] = field(default_factory=dict)
    layers: tuple[dict[str, Computed], ...] = ()
    behind: dict[str, Computed] = field(default_factory=dict)


def by_layer(recording: Recording, units: Units, blocks: Sequence[str]) -> LayerWorks | None:
    """Return what a recording computed by layer; None where its boundaries do not tell the layers
    apart: where a block is no unit, or is not run once, in its turn."""
    places = {modules: place for place, modules in enumerate(units)}
    numbers = [places.get((block,)) for block in blocks]
    if not numbers or None in numbers:
        return None
    works = LayerWorks(layers=tuple({} for _ in blocks))
    for name, events in recording.passes.items():
        bounds = _bounds(name, events, [number for number in numbers if number is not None], blocks)
        if bounds is None:
            return None
        is_reversed = name in ("backward", "input")
        parts = [works.front, *works.layers, works.behind]
        ordered = parts[::-1] if is_reversed else parts
        for part in parts:
            part[name] = []
        for place, work in recording.works[name]:
            ordered[bisect_left(bounds, place)][name].append(work.what)
    return works


def whole(recording: Recording) -> dict[str, Computed]:
    """Return what a recording computed by pass."""
    return {name: [work.what for _, work in works] for name, works in recording.works.items()}


def _bounds(
    name: str, events: Sequence[Event], numbers: Sequence[int], blocks: Sequence[str]
) -> list[int] | None:
    """Return the place of the event with which each layer begins and that with which the last one
    ends, in the pass's own order. The half of the weights has no boundaries: there a layer ends
    with its last gradient, and none is in front of the first."""
    if name == "weight":
        ends = [_last_gradient(events, f"{block}.") for block in blocks]
        bounds = [-1, *ends]
        return bounds if bounds == sorted(bounds) else None
    first, last = (
        (Mark.ENTER, Mark.LEAVE) if name == "forward" else (Mark.PRE_BACKWARD, Mark.POST_BACKWARD)
    )
    ordered = numbers if name == "forward" else numbers[::-1]
    marks = [*(Boundary(first, number) for number in ordered), Boundary(last, ordered[-1])]
    if any(events.count(mark) != 1 for mark in marks):
        return None
    bounds = [events.index(mark) for mark in marks]
    return bounds if bounds == sorted(bounds) else None


def _last_gradient(events: Sequence[Event], prefix: str) -> int:
    return max(
        (
            place
            for place, event in enumerate(events)
            if isinstance(event, Completion) and event.parameter.startswith(prefix)
        ),
        default=-1,
    )
