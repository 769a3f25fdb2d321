"""What a rank with experts of its own allocates, as a formula of the rows that these get: by two
traces of the same operators, between which each layer gets another number of rows more.

A storage that is as large in both is a storage of that size. One that has grown as the rows of a
layer have is as many bytes of each row. Where another one has grown, or operators differ, there is
no formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ptrain.axes.expert.form import is_by_routing
from ptrain.axes.expert.run.apply import assume
from ptrain.axes.expert.run.exchange import heavier
from ptrain.facts.rows_timeline import RowsItem, RowsSize, RowsTimeline, StorageEvent, StorageEvents
from ptrain.facts.stages import is_within
from ptrain.models.trace import (
    Born,
    Completion,
    Died,
    Event,
    Recording,
    between_boundaries,
    completion,
    last_views,
)
from ptrain.spec.spec import Spec
from ptrain.steps.experts import choices, layers_of
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary

Sizes = Mapping[int, RowsSize]


class _NoFormula(Exception):
    """What is allocated is no formula of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLoads:
    """The second trace of a model: the experts of its first layer with some get a row more than in
    the first trace, where all get as many `rows`, those of the next one two, and so on. So no two
    layers' storages grow in the same ratio."""

    layers: tuple[str, ...]
    rows: int

    def assume(self, model: nn.Module) -> None:
        """From now on the experts of `model` get so many."""
        assume(model, lambda layer: partial(heavier, more=1 + self.layers.index(layer)))

    def formula(self, first: Recording, second: Recording) -> RowsTimeline | None:
        """Return the formula of the rows that both traces are of; None where there is none."""
        try:
            return self._formula(first, second)
        except _NoFormula:
            return None

    def _formula(self, first: Recording, second: Recording) -> RowsTimeline:
        if _operators(first) != _operators(second):
            raise _NoFormula("other operators run where more rows come")
        sizes = {
            number: self._size(size, second.sizes[number]) for number, size in first.sizes.items()
        }
        return RowsTimeline(
            forward=tuple(_items(first.forward, sizes, first.sizes)),
            backward=tuple(_items(first.backward, sizes, first.sizes)),
            saved=tuple((event.operator, sizes[event.id]) for event in first.saved),
            moved=tuple((tier, sizes[number]) for number, tier in first.moved),
            repeated=first.repeated,
        )

    def _size(self, first: int, second: int) -> RowsSize:
        """Return the size of a storage that was so large in the two traces."""
        if first == second:
            return RowsSize(first)
        for layer in range(len(self.layers)):
            of_row, rest = divmod(first, self.rows)
            if not rest and of_row * (self.rows + 1 + layer) == second:
                return RowsSize(of_row, layer)
        raise _NoFormula(f"a storage of {first} bytes has grown to {second}")


def uneven_loads(spec: Spec, plan: Plan, within: Sequence[str] | None = None) -> UnevenLoads | None:
    """Return how to trace what the plan has made of a model, or of some layers of it, once more;
    None where it allocates the same wherever tokens go."""
    step = plan.experts
    if step is None or not is_by_routing(spec):
        return None
    layers = layers_of(step)
    own = layers if within is None else tuple(x for x in layers if is_within(x, within))
    return UnevenLoads(layers=own, rows=choices(spec, step)) if own else None


def _operators(recording: Recording) -> object:
    """What happened, whatever the sizes."""
    passes = {
        name: [replace(event, size=0) if isinstance(event, Born) else event for event in events]
        for name, events in recording.passes.items()
    }
    return passes, recording.sizes.keys(), recording.moved, recording.repeated


def _items(events: Sequence[Event], sizes: Sizes, known: Mapping[int, int]) -> Iterator[RowsItem]:
    last = last_views(events)
    for part in between_boundaries(events):
        match part:
            case Boundary():
                yield part
            case Completion():
                own = (part.id, *part.freed)
                if any(sizes[number] != RowsSize(known[number]) for number in own):
                    raise _NoFormula(f"the gradient of {part.parameter} is of a router's rows")
                yield completion(part, last, known)
            case lives:
                happened = (StorageEvent(sizes[e.id], isinstance(e, Died)) for e in lives)
                yield StorageEvents(tuple(happened))
