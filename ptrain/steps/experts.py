"""The step of the expert axis, and the rows that ranks exchange for it in a micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ptrain.facts.model import module_prefixes
from ptrain.spec.placement import Axis
from ptrain.spec.routing import Bound, Choices, Histogram
from ptrain.spec.spec import Spec, indices_in_groups, ranks_over
from ptrain.steps.wraps import PlanStep
from ptrain.units import ceil_div, group_by_key

Span = tuple[int, int]  # the first token, and the one after the last
ByLayer = Mapping[str, Sequence["RankRows"]]  # by layer, the rows of every micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(PlanStep):
    """The experts of each MoE layer, sharded over `axes` by expert.

    Parameters, optimizer state and gradients of experts are S on `axes`. Each rank has some of the
    experts. The rows of all ranks' tokens travel to their experts, and the results travel back. For
    all other tensors, `axis` is a data axis: its ranks have different samples.

    Attributes:
        axis: The mesh axis `ep`.
        modules: The modules with the experts of a layer, one per layer. Each is a wrap unit, and
            each of its tensors has one row of its first dimension per expert.
        number: Experts per layer.
        chosen: Experts per token (top-k).
        features: Elements of a row.
        places: Rows that an expert takes per sample and rank, if it has a capacity; further rows
            are dropped.
        overlaps: Shared experts compute while rows travel.
        folded: The operator axes whose ranks also have different experts. They have the same
            tokens, and each routes a shard of them.
        counting: The axes over which router choices are counted, if they shard the tokens of a
            sample.
        spans: The tokens that each rank of `counting` routes.
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
        """All axes along which ranks have different experts."""
        return (self.axis, *self.folded)

    def has_experts(self, modules: Sequence[str]) -> bool:
        """Return True if a unit of these modules contains experts."""
        return any(name in self.modules for name in modules)

    def is_inside(self, module: str) -> bool:
        """Return True if a module is inside the experts, so that it runs on the rows of all ranks'
        tokens."""
        return any(name in self.modules for name in module_prefixes(module))

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        return self.axes


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows that a rank sends to all experts, those of them for local experts, and rows that local
    experts receive."""

    num_sent: int
    num_kept: int
    num_received: int

    def __add__(self, other: Self) -> RankRows:
        return RankRows(
            self.num_sent + other.num_sent,
            self.num_kept + other.num_kept,
            self.num_received + other.num_received,
        )

    def scale(self, number: int) -> RankRows:
        """Return the counts multiplied by `number`."""
        return RankRows(number * self.num_sent, number * self.num_kept, number * self.num_received)


def num_choices(spec: Spec, step: ExpertParallel) -> int:
    """Return the number of experts that the tokens of a rank's micro-batch choose, in total.

    Without a capacity, this is the number of rows that the rank sends.
    """
    return spec.batch.micro * spec.routed_tokens * step.chosen


def even_rows(spec: Spec, step: ExpertParallel) -> RankRows:
    """Return the rows of every rank if all experts receive equal numbers of rows.

    The remainder goes to one expert after another, beginning with the rank's local experts, so that
    all ranks receive the same number. With a capacity, the number of places is counted, whatever
    the routing is.
    """
    ranks, number = ranks_over(spec, spec.expert_axes), num_choices(spec, step)
    if step.places is not None:
        number = spec.batch.micro * step.number * step.places
    # Equal numbers on all ranks make the figures of a balanced routing independent of the rank.
    share, more = divmod(number, step.number)
    return RankRows(number, step.number // ranks * share + ceil_div(more, ranks), number)


def layers_of(step: ExpertParallel) -> tuple[str, ...]:
    """Return the names of the layers with experts, first to last."""
    return tuple(module.rpartition(".")[0] for module in step.modules)


class Loads(ABC):
    """The routing of rows, by the index of the tokens: the position along all axes whose ranks have
    different tokens."""

    def __init__(self, spec: Spec) -> None:
        own = spec.expert_axes
        others = [factor.axis for factor in spec.factors if factor.axis not in own]
        groups = group_by_key(zip(indices_in_groups(spec, others), token_places(spec), strict=True))
        self._group = {place: tuple(group) for group in groups.values() for place in group}

    def group(self, place: int) -> tuple[int, ...]:
        """Return the token indices that exchange rows with `place`, in the order of their
        experts.

        Args:
            place: Index of the tokens, from 0.
        """
        return self._group[place]

    @abstractmethod
    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        """Return the number of rows that go to each expert of a layer, by micro-batch.

        Args:
            layer: Name of the layer.
            place: Index of the tokens, from 0.
        """

    @abstractmethod
    def rows_by_layer(self, place: int) -> ByLayer:
        """Return the rows of the ranks with these tokens, by layer.

        Args:
            place: Index of the tokens, from 0.

        Returns:
            Rows that the rank sends and receives. Equal results are one object.
        """


def token_places(spec: Spec) -> tuple[int, ...]:
    """Return the token index of each rank."""
    return indices_in_groups(spec, spec.routing_axes)


class CountedLoads(Loads):
    """The routing given by a histogram of the choices of all ranks' tokens."""

    def __init__(self, spec: Spec, histogram: Histogram) -> None:
        super().__init__(spec)
        self._histogram = histogram

    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        return self._histogram.rank_choices(layer, place)

    def rows_by_layer(self, place: int) -> ByLayer:
        return {layer: self._of_layer(layer, place) for layer in self._histogram.layers}

    def _of_layer(self, layer: str, place: int) -> tuple[RankRows, ...]:
        group = self.group(place)
        of_group = zip(*(self.choices(layer, source) for source in group), strict=True)
        return tuple(_rank_rows(choices, group.index(place)) for choices in of_group)


class BoundLoads(Loads):
    """The best or worst routing: all tokens first choose the experts of their own rank, or all
    choose those of rank 0.

    A token chooses an expert once. If it chooses more experts than a rank has, the others follow.
    """

    def __init__(self, spec: Spec, step: ExpertParallel, bound: Bound, micro_batches: int) -> None:
        super().__init__(spec)
        layers, ranks = layers_of(step), range(ranks_over(spec, spec.expert_axes))
        favourites = ranks if bound is Bound.BEST else [0] * len(ranks)
        self._times = micro_batches
        self._choices = [_biased_choices(spec, step, favourite) for favourite in favourites]
        self._rows = [
            dict.fromkeys(layers, (_rank_rows(self._choices, rank),) * micro_batches)
            for rank in ranks
        ]

    def choices(self, layer: str, place: int) -> Sequence[Choices]:
        return (self._choices[self.group(place).index(place)],) * self._times

    def rows_by_layer(self, place: int) -> ByLayer:
        return self._rows[self.group(place).index(place)]


def _biased_choices(spec: Spec, step: ExpertParallel, rank: int) -> Choices:
    """Return the choices of a micro-batch whose tokens choose the experts of `rank` first, equally
    often."""
    own = step.number // ranks_over(spec, spec.expert_axes)
    tokens = num_choices(spec, step) // step.chosen
    # A token chooses different experts, so a rank with fewer experts than choices cannot take all
    # rows.
    first = tokens * min(step.chosen, own)
    others = _split_evenly(num_choices(spec, step) - first, step.number - own)
    before = rank * own
    return (*others[:before], *_split_evenly(first, own), *others[before:])


def _split_evenly(number: int, experts: int) -> Choices:
    # A rank may have all experts, so that no other expert is left.
    share, more = divmod(number, max(experts, 1))
    return tuple(share + (expert < more) for expert in range(experts))


def _rank_rows(of_group: Sequence[Choices], rank: int) -> RankRows:
    """Return the rows of one rank of a group; `of_group` has the rows that each rank sends to each
    expert."""
    own = len(of_group[rank]) // len(of_group)
    experts = slice(rank * own, (rank + 1) * own)
    received = [sum(choices[experts]) for choices in of_group]
    return RankRows(sum(of_group[rank]), received[rank], sum(received))
