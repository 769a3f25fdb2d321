"""When the ranks of a flow may be fullest (`axes.pipeline.cost.moments`), with what they have of a
model then, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import add, ge, gt, mul, sub
from typing import Any

from ptrain.axes.pipeline.cost.chunks import PipelineSize, chunks_between, stages_of
from ptrain.axes.pipeline.cost.moments import FlightMoment, moments
from ptrain.derivation.tables import Place
from ptrain.selection.arrays import numpy
from ptrain.selection.score import STAGE_PLACES, FlowMoments, RankMoments
from ptrain.spec.pipeline import ScheduleName

_ENDLESS = 6  # micro-batches for a rank: with more of them the fullest moments are the same
_GROWING = (ScheduleName.GPIPE, ScheduleName.BFS)
_BY_PLACE = ("chunks", "waiting", "on")
_NUMBERED = {place: number for number, place in enumerate(STAGE_PLACES)}


@dataclass(frozen=True, kw_only=True)
class MomentRow:
    """One of the moments, its fields those of `score.RankMoments`."""

    layers: int
    front: bool
    behind: bool
    graded_layers: int
    graded_front: bool
    graded_behind: bool
    over_layers: int
    over_front: bool
    over_behind: bool
    whole: int
    halved: int
    chunks: tuple[int, ...]
    waiting: tuple[int, ...]
    on: tuple[int, ...]
    own: int
    is_half: bool
    is_new: bool
    messages: int
    is_staged: bool

    @property
    def numbers(self) -> list[float]:
        """Return its fields in a row, with those that have a number for each place."""
        spots: list[float] = []
        for name in _NAMES:
            value = getattr(self, name)
            spots += value if name in _BY_PLACE else (value,)
        return spots

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what rows share that can be compared: whose rank, and of which pass."""
        return self.layers, self.front, self.behind, self.on, self.is_half, self.over_layers

    @cached_property
    def _held(self) -> tuple[int, ...]:
        chunks = map(add, self.chunks, self.waiting)
        layers = self.whole + self.halved, self.halved
        return (*layers, *chunks, *self.waiting, self.own, self.messages)

    @cached_property
    def _graded(self) -> tuple[int, ...]:
        return self.graded_layers, self.graded_front, self.graded_behind

    @cached_property
    def _graded_then(self) -> tuple[int, ...]:
        """What has gradients behind the pass."""
        if not self.is_new:
            return self._graded
        front, behind = self.on[0] + self.on[1], self.on[0] + self.on[-1]
        own = self.own, front, behind
        return tuple(map(add, self._graded, own))

    def is_fuller(self, other: MomentRow) -> bool:
        """Return whether there is never less of anything than at another moment."""
        return all(map(ge, self._held, other._held)) and (
            all(map(ge, self._graded, other._graded_then))
            or (self.is_new == other.is_new and all(map(ge, self._graded, other._graded)))
        )


_NAMES = tuple(spot.name for spot in fields(MomentRow))


def unlike(size: PipelineSize) -> int:
    """Return the fewest micro-batches with which a rank is as full as with the size's."""
    number, most = size.microbatches, _ENDLESS * size.ranks
    is_same = size.schedule not in _GROWING and number > most and number % size.ranks == 0
    return most if is_same else number


def fullest(size: PipelineSize, counts: Sequence[int]) -> tuple[MomentRow, ...]:
    """Return the moments of the ranks of a pipeline, whose stages have so many layers, at which one
    may be the fullest."""
    alike: dict[tuple[object, ...], list[MomentRow]] = {}
    for rank in _unlike_ranks(size, counts):
        own = _RankStages.of(size, rank, counts)
        for row in map(own.row, dict.fromkeys(moments(size, rank))):
            others = alike.setdefault(row.kind, [])
            if any(other.is_fuller(row) for other in others):
                continue
            others[:] = [other for other in others if not row.is_fuller(other)]
            others.append(row)
    return tuple(row for group in alike.values() for row in group)


def _unlike_ranks(size: PipelineSize, counts: Sequence[int]) -> Iterator[int]:
    """The first and the last; of those between with as many layers the first and the last again:
    from rank to rank there is more in flight or less."""
    between: dict[tuple[int, ...], list[int]] = {}
    for rank in range(1, size.ranks - 1):
        key = tuple(counts[stage] for stage in stages_of(size, rank))
        between.setdefault(key, []).append(rank)
    yield from {0, size.ranks - 1, *(rank for alike in between.values() for rank in alike[:1])} | {
        alike[-1] for alike in between.values()
    }


@dataclass(frozen=True, kw_only=True)
class _RankStages:
    """The stages of a rank: `layers` of each, its place, and whether it has one of the ends."""

    layers: tuple[int, ...]
    places: tuple[Place, ...]
    front: tuple[bool, ...]
    behind: tuple[bool, ...]
    messages: tuple[int, ...]  # that lie there besides as a pass of one of them begins
    is_staged: bool

    @classmethod
    def of(cls, size: PipelineSize, rank: int, counts: Sequence[int]) -> _RankStages:
        own = stages_of(size, rank)
        places = tuple(_place(stage, size.stages) for stage in own)
        return cls(
            layers=tuple(counts[stage] for stage in own),
            places=places,
            front=tuple(place in (Place.FIRST, Place.ALONE) for place in places),
            behind=tuple(place in (Place.LAST, Place.ALONE) for place in places),
            messages=tuple(_messages(size, rank, place) for place in places),
            is_staged=size.stages > 1,
        )

    def row(self, moment: FlightMoment) -> MomentRow:
        """Return a moment of the rank's."""
        places, layers, on, over = self.places, self.layers, moment.on, moment.over
        whole, halved = moment.whole, moment.halved
        if any(halved):
            # nobody waits for gradients of tokens: the first stage has no halves
            halved = tuple(map(mul, halved, (place is not Place.FIRST for place in places)))
            whole = tuple(map(add, whole, map(sub, moment.halved, halved)))
        graded = tuple(map(gt, moment.graded, over))
        return MomentRow(
            layers=sum(layers),
            front=any(self.front),
            behind=any(self.behind),
            graded_layers=_sum(layers, graded),
            graded_front=bool(_sum(self.front, graded)),
            graded_behind=bool(_sum(self.behind, graded)),
            over_layers=_sum(layers, over),
            over_front=bool(_sum(self.front, over)),
            over_behind=bool(_sum(self.behind, over)),
            whole=_sum(layers, whole),
            halved=_sum(layers, halved),
            chunks=_by_place(places, whole),
            waiting=_by_place(places, halved),
            on=_by_place((places[on],), (1,)),
            own=layers[on],
            is_half=moment.is_half and places[on] is not Place.FIRST,
            is_new=not moment.graded[on],
            messages=self.messages[on],
            is_staged=self.is_staged,
        )


def _messages(size: PipelineSize, rank: int, place: Place) -> int:
    """The gradient that came, and what lies between the rank before and this one."""
    if place is Place.ALONE:
        return 0
    return (place is not Place.LAST) + max(0, chunks_between(size, rank))


def _place(stage: int, stages: int) -> Place:
    if stages == 1:
        return Place.ALONE
    return {0: Place.FIRST, stages - 1: Place.LAST}.get(stage, Place.MIDDLE)


def _sum(sizes: Sequence[int], times: Sequence[int]) -> int:
    return sum(map(mul, sizes, times))


def _by_place(places: Sequence[Place], numbers: Sequence[int]) -> tuple[int, ...]:
    sums = [0] * len(STAGE_PLACES)
    for place, number in zip(places, numbers, strict=True):
        sums[_NUMBERED[place]] += number
    return tuple(sums)


def as_arrays(flows: Sequence[tuple[MomentRow, ...]]) -> FlowMoments:
    """Return the moments of flows."""
    np = numpy()
    table = np.array([row.numbers for rows in flows for row in rows], dtype=np.float32)
    lengths = np.array([len(rows) for rows in flows])
    columns: dict[str, Any] = {}
    at = 0
    for name in _NAMES:
        if name in _BY_PLACE:
            columns[name] = table[:, at : at + len(STAGE_PLACES)]
            at += len(STAGE_PLACES)
        else:
            columns[name] = np.ascontiguousarray(table[:, at])
            at += 1
    starts = np.cumsum(lengths) - lengths
    return FlowMoments(at=RankMoments(**columns), starts=starts, lengths=lengths)
