"""The step of the expert axis, and the rows that ranks exchange for it in a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ptrain.facts.model import prefixes
from ptrain.spec.placement import Axis
from ptrain.spec.routing import Bound, Choices, Histogram
from ptrain.spec.spec import Spec, positions, ranks_over
from ptrain.steps.wraps import PlanStep
from ptrain.units import ceil_div, grouped

Span = tuple[int, int]  # first token, and the one behind the last
ByLayer = Mapping[str, Sequence["RankRows"]]  # of each layer those of every micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(PlanStep):
    """Theta, Omega and G of a layer's experts are S on `axes`, by expert: a rank has some of them,
    all tokens that go to these, of all ranks' samples, travel to it, and what it makes of them
    travels back. For all else `axis` is a data axis: its ranks have samples of their own. Those of
    `folded`, an axis that cuts operators, have the same tokens of them: one routes a slice of
    these. What routers choose of whole samples is then counted over `counting` axes, whose ranks
    route the tokens in `spans`.

    `modules` are those that hold the experts of a layer, and units of their own; each of their
    tensors has an expert for every place of its first dimension, a `number` of them. A token
    chooses so many (`chosen`), each of which gets a row of `features` elements, in one of its
    `places` for a rank's tokens of a sample where an expert has some: not all that are routed to
    it then. Where it `overlaps`, experts that all tokens go to compute while the others' rows
    travel.
    """

    axis: Axis
    modules: tuple[str, ...]
    number: int
    chosen: int
    features: int
    places: int | None = None
    overlaps: bool = False
    folded: tuple[Axis, ...] = ()
    counting: tuple[Axis, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes along which ranks have experts of their own."""
        return (self.axis, *self.folded)

    def has(self, modules: Sequence[str]) -> bool:
        """Return whether a unit of these modules is one of experts."""
        return any(name in self.modules for name in modules)

    def is_inside(self, module: str) -> bool:
        """Return whether a module runs on the rows that its experts get, of all ranks' tokens."""
        return any(name in self.modules for name in prefixes(module))

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return self.axes


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows that a rank sends to all experts, `kept` of them to its own, and those that its own
    experts get."""

    sent: int
    kept: int
    received: int

    def __add__(self, other: Self) -> RankRows:
        return RankRows(
            self.sent + other.sent, self.kept + other.kept, self.received + other.received
        )

    def times(self, number: int) -> RankRows:
        """Return them so many times."""
        return RankRows(number * self.sent, number * self.kept, number * self.received)


def choices(spec: Spec, step: ExpertParallel) -> int:
    """Return how many experts the tokens of a rank's micro-batch choose, all together: the rows
    that it sends, but with a capacity."""
    return spec.batch.micro * spec.routed_tokens * step.chosen


def even(spec: Spec, step: ExpertParallel) -> RankRows:
    """Return the rows of every rank where an expert gets as many as any other: of what experts do
    not divide each rank gets as many, its own first. With a capacity these are places, whatever is
    routed."""
    ranks, number = ranks_over(spec, spec.expert_axes), choices(spec, step)
    if step.places is not None:
        number = spec.batch.micro * step.number * step.places
    share, more = divmod(number, step.number)
    return RankRows(number, step.number // ranks * share + ceil_div(more, ranks), number)


def layers_of(step: ExpertParallel) -> tuple[str, ...]:
    """Return the modules that have experts, first to last."""
    return tuple(module.rpartition(".")[0] for module in step.modules)


class Loads(ABC):
    """Where rows go, of ranks by the place of their tokens: that along all axes along which ranks
    have tokens of their own."""

    def __init__(self, spec: Spec) -> None:
        own = spec.expert_axes
        others = [factor.axis for factor in spec.factors if factor.axis not in own]
        groups = grouped(zip(positions(spec, others), token_places(spec), strict=True))
        self._group = {place: tuple(group) for group in groups.values() for place in group}

    def group(self, place: int) -> tuple[int, ...]:
        """Return the places that a place exchanges rows with, in the order of their experts."""
        return self._group[place]

    @abstractmethod
    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        """Return how many rows of a layer go to each expert, by micro-batch."""

    @abstractmethod
    def of(self, place: int) -> ByLayer:
        """Return the rows of the ranks with these tokens: the very same of places that have the
        same."""


def token_places(spec: Spec) -> tuple[int, ...]:
    """Return the place of each rank's tokens."""
    return positions(spec, spec.routing_axes)


class CountedLoads(Loads):
    """By a histogram of what the ranks' tokens choose."""

    def __init__(self, spec: Spec, histogram: Histogram) -> None:
        super().__init__(spec)
        self._histogram = histogram

    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        return self._histogram.of(layer, place)

    def of(self, place: int) -> ByLayer:
        return {layer: self._of_layer(layer, place) for layer in self._histogram.layers}

    def _of_layer(self, layer: str, place: int) -> tuple[RankRows, ...]:
        group = self.group(place)
        of_group = zip(*(self.choices(layer, source) for source in group), strict=True)
        return tuple(_rows(choices, group.index(place)) for choices in of_group)


class BoundLoads(Loads):
    """By an end of what routing can do: all tokens choose first the experts of their own rank, or
    all of them those of one. A token has no expert twice: where it chooses more than a rank has,
    the others follow."""

    def __init__(self, spec: Spec, step: ExpertParallel, bound: Bound, micro_batches: int) -> None:
        super().__init__(spec)
        layers, ranks = layers_of(step), range(ranks_over(spec, spec.expert_axes))
        favourites = ranks if bound is Bound.BEST else [0] * len(ranks)
        self._times = micro_batches
        self._choices = [_favouring(spec, step, favourite) for favourite in favourites]
        self._rows = [
            dict.fromkeys(layers, (_rows(self._choices, rank),) * micro_batches) for rank in ranks
        ]

    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        return (self._choices[self.group(place).index(place)],) * self._times

    def of(self, place: int) -> ByLayer:
        return self._rows[self.group(place).index(place)]


def _favouring(spec: Spec, step: ExpertParallel, rank: int) -> Choices:
    """Return what the tokens of a micro-batch choose where they take the experts of `rank` first,
    as often each."""
    own = step.number // ranks_over(spec, spec.expert_axes)
    tokens = choices(spec, step) // step.chosen
    first = tokens * min(step.chosen, own)
    others = _spread(choices(spec, step) - first, step.number - own)
    before = rank * own
    return (*others[:before], *_spread(first, own), *others[before:])


def _spread(number: int, experts: int) -> Choices:
    share, more = divmod(number, max(experts, 1))
    return tuple(share + (expert < more) for expert in range(experts))


def _rows(of_group: Sequence[Choices], rank: int) -> RankRows:
    """Return the rows of one of the ranks that exchange them, of each of which `of_group` has what
    it sends to every expert."""
    own = len(of_group[rank]) // len(of_group)
    experts = slice(rank * own, (rank + 1) * own)
    received = [sum(choices[experts]) for choices in of_group]
    return RankRows(sum(of_group[rank]), received[rank], sum(received))
