"""Equal layers in a row are traced once: of a built-in model, whose layers have the same operators,
the first one runs, two behind it and the last one, and the second stands for all in their midst.

That the third did what the second did is looked at in every trace. What stands in for the others
hands on what it is given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor, nn

from ptrain.axes.expert.form import is_by_routing
from ptrain.derivation.layers import Places, alike, instantiate, places_of
from ptrain.facts.model import WorkByKind
from ptrain.facts.stages import is_within
from ptrain.models.trace import Born, Event, Recording, sent_again, to_timeline
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Mark, Timeline
from ptrain.traces.layer_works import work_of

Names = tuple[str, ...]  # of layers, first to last
Units = tuple[tuple[str, ...], ...]
Pairs = list[tuple[str, int]]
X = TypeVar("X")

_AHEAD = 3  # the first one, the one that stands for others, and its witness


def kind_of_row(spec: Spec, layers: Names) -> Hashable:
    """Return what each of these layers does, where all do the same; None where nobody says so, and
    where a router decides sizes, of which each layer has its own."""
    if is_by_routing(spec):
        return None
    kinds = alike(spec, layers)
    if not kinds or len({*kinds}) > 1 or spec.pipeline.is_in_halves:
        return None
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    if not shape.are_equal(int(layer.rpartition(".")[2]) for layer in layers):
        return None
    is_on_device = kinds[0].tier is Tier.DEVICE  # when copies are back depends on what runs ahead
    return kinds[0] if is_on_device else None


def running(spec: Spec, layers: Names) -> Names:
    """Return those of the layers that run for all of them."""
    is_long = len(layers) > _AHEAD + 1 and kind_of_row(spec, layers) is not None
    return (*layers[:_AHEAD], layers[-1]) if is_long else layers


def alike_of(spec: Spec, layers: Names) -> Names:
    """Return the layers that run, if they are alike; else none."""
    return () if kind_of_row(spec, layers) is None else running(spec, layers)


def running_units(units: Sequence[tuple[str, ...]], layers: Names, names: Names) -> Units:
    """Return the units that run where of the layers those of these names do."""
    skipped = [name for name in layers if name not in names]
    return tuple(modules for modules in units if not is_within(modules[0], skipped))


class _Skipped(nn.Identity):
    def forward(self, x_BTC: Tensor, *_: Any) -> Tensor:
        return x_BTC


@contextmanager
def only(model: nn.Module, layers: Names, names: Names) -> Iterator[None]:
    """Within it those of the layers that have these names run, and the others do not."""
    skipped = {name: model.get_submodule(name) for name in layers if name not in names}
    for name in skipped:
        _put(model, name, _Skipped())
    try:
        yield
    finally:
        for name, layer in skipped.items():
            _put(model, name, layer)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)


class TracedLayers:
    """What layers of these `names` did in a model, or a stage, of these `units`. They stand for as
    many equal ones, or for more."""

    def __init__(
        self, recording: Recording, names: Names, units: Units, halves: Recording | None = None
    ) -> None:
        self.recording, self.names, self.units, self.halves = recording, names, units, halves

    @cached_property
    def own_timeline(self) -> Timeline:
        """The timeline of what ran."""
        return to_timeline(self.recording)

    @cached_property
    def _own_work(self) -> WorkByKind | None:
        return work_of(self.units, self.names, self.recording, self.halves)

    def work(self, layers: Names) -> WorkByKind | None:
        """Return what the layers compute, as `work_of` does."""
        own = self._own_work
        if own is None:
            return None
        return replace(own, order=tuple(_of_all(own.order, len(layers))))

    def timeline(self, layers: Names, units: Units) -> Timeline:
        """Return the timeline of the layers, in a model or stage of those units."""
        if layers == self.names:
            return self.own_timeline
        whole, recording, places = self.own_timeline, self.recording, places_of(units)
        enter, begin = self._boundaries(Mark.ENTER), self._boundaries(Mark.PRE_BACKWARD)[::-1]
        number = len(layers)
        return Timeline(
            forward=self._items(whole.forward, enter, layers, places),
            backward=self._items(whole.backward, begin, layers[::-1], places),
            saved=tuple(_joined(_saved(recording, enter), number)),
            moved=whole.moved,
            repeated=tuple(_joined(_sent_again(recording, begin), number)),
        )

    def _boundaries(self, mark: Mark) -> list[Boundary]:
        return [Boundary(mark, self.units.index((name,))) for name in self.names]

    def _items(
        self, items: Sequence[Item], marks: list[Boundary], layers: Names, places: Places
    ) -> tuple[Item, ...]:
        """Return a pass of all layers, which stand in its order. The `marks` are where those that
        ran begin."""
        front, *parts = _parted(items, marks)
        names = [self.units[mark.unit][0] for mark in marks]
        own = [[*self._template(part, name)] for part, name in zip(parts, names, strict=True)]
        filled = [*instantiate(self._template(front), "", places)]
        for template, name in zip(_of_all(own, len(layers)), layers, strict=True):
            filled += instantiate(template, name.rpartition(".")[2], places)
        return tuple(filled)

    def _template(self, items: Sequence[Item], layer: str = "") -> Iterator[Any]:
        """Yield items as tables have them, without the layer's number in their names."""
        for item in items:
            match item:
                case Boundary(mark, unit):
                    yield mark, _pattern(self.units[unit][0], layer)
                case Complete(parameter, size, cloned, beside):
                    yield _pattern(parameter, layer), size, cloned, beside
                case _:
                    yield item


def _pattern(name: str, layer: str) -> str:
    is_own = layer and is_within(name, (layer,))
    return f"{layer.rpartition('.')[0]}.*{name[len(layer) :]}" if is_own else name


def _of_all(parts: Sequence[X], layers: int) -> list[X]:
    """Return a part for each of so many layers, of those for the layers that ran."""
    if layers == len(parts):
        return [*parts]
    first, second, third, last = parts
    assert second == third, "layers that are alike do another thing each"
    return [first, *[second] * (layers - 2), last]


def _joined(parts: Sequence[Pairs], layers: int) -> Iterator[tuple[str, int]]:
    """Yield what stands in the part in front, and in those of so many layers."""
    front, *own = parts
    for part in (front, *_of_all(own, layers)):
        yield from part


def _parted(items: Sequence[X], marks: Sequence[X]) -> list[Sequence[X]]:
    """Return what is in front of all these items, and from each to the next."""
    ends = [*map(items.index, marks), len(items)]
    assert ends == sorted(ends), "layers run one after the other"
    return [items[: ends[0]], *(items[start:end] for start, end in pairwise(ends))]


def _saved(recording: Recording, marks: Sequence[Event]) -> list[Pairs]:
    """Return what forward left for backward, by layer."""
    alive = {event.id for event in recording.saved}
    return [
        [
            (event.operator, event.size)
            for event in part
            if isinstance(event, Born) and event.id in alive
        ]
        for part in _parted(recording.forward, marks)
    ]


def _sent_again(recording: Recording, marks: Sequence[Event]) -> list[Pairs]:
    """Return what backward sent again of forward, by layer."""
    bounds = [recording.backward.index(mark) for mark in marks]
    parts: list[Pairs] = [[] for _ in range(len(bounds) + 1)]
    for place, work in recording.works.get("backward", ()):
        parts[bisect_left(bounds, place)] += sent_again(((place, work),))
    return parts
