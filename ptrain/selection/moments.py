"""When the ranks of a flow may be fullest (`axes.pipeline.cost`), with what they have of a
model then, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import add, and_, ge, gt, mul, sub
from typing import Any, NamedTuple

from ptrain.axes.pipeline.cost import (
    FlightMoment,
    PipelineSize,
    chunks_between,
    chunks_in_flight,
    stages_of,
)
from ptrain.derivation.tables import Place
from ptrain.selection.arrays import numpy
from ptrain.selection.profile import STAGE_PLACES
from ptrain.selection.score import FlowMoments, RankMoments

_ENDLESS = 4  # micro-batches for a rank: with more of them the fullest moments are the same
_BY_PLACE = ("chunks", "waiting", "on")
_NUMBERED = {place: number for number, place in enumerate(STAGE_PLACES)}
_NOWHERE = (0,) * len(STAGE_PLACES)


class MomentRow(NamedTuple):
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
        fields: tuple[Any, ...] = self
        at = _FIRST_BY_PLACE
        after = fields[at + len(_BY_PLACE) :]
        return [*fields[:at], *self.chunks, *self.waiting, *self.on, *after]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what rows share that can be compared: whose rank, and of which pass."""
        return self.layers, self.front, self.behind, self.on, self.is_half, self.over_layers


_FIRST_BY_PLACE = MomentRow._fields.index(_BY_PLACE[0])


class _Fullness(NamedTuple):
    """What of a row there is more of where its rank is fuller: what it holds, what has gradients
    ahead of the pass and behind it."""

    held: tuple[int, ...]
    graded: tuple[int, ...]
    then: tuple[int, ...]
    is_new: bool
    row: MomentRow

    @classmethod
    def of(cls, row: MomentRow) -> _Fullness:
        chunks = map(add, row.chunks, row.waiting)
        layers = row.whole + row.halved, row.halved
        graded = then = row.graded_layers, row.graded_front, row.graded_behind
        if row.is_new:
            on = row.on
            then = tuple(map(add, graded, (row.own, on[0] + on[1], on[0] + on[-1])))
        held = (*layers, *chunks, *row.waiting, row.own, row.messages)
        return cls(held, graded, then, row.is_new, row)

    def is_above(self, other: _Fullness) -> bool:
        """Return whether there is never less of anything than at another moment."""
        return all(map(ge, self.held, other.held)) and (
            all(map(ge, self.graded, other.then))
            or (self.is_new == other.is_new and all(map(ge, self.graded, other.graded)))
        )


def unlike(size: PipelineSize) -> int:
    """Return the fewest micro-batches with which a rank is as full as with the size's."""
    number, most = size.microbatches, _ENDLESS * size.ranks
    if number <= most or number % size.ranks:
        return number
    is_same = chunks_in_flight(size, 0) == chunks_in_flight(replace(size, microbatches=most), 0)
    return most if is_same else number


def fullest(size: PipelineSize, counts: Sequence[int]) -> tuple[MomentRow, ...]:
    """Return the moments of the ranks of a pipeline, whose stages have so many layers, at which one
    may be the fullest."""
    alike: dict[tuple[object, ...], list[_Fullness]] = {}
    one, of_stages = replace(size, microbatches=1), tuple(counts)
    for rank in _unlike_ranks(size, counts):
        own = _stages_of_rank(one, rank, of_stages, max(0, chunks_between(size, rank)))
        for row in map(own.row, dict.fromkeys(size.cost.moments(size, rank))):
            others, fullness = alike.setdefault(row.kind, []), _Fullness.of(row)
            if any(other.is_above(fullness) for other in others):
                continue
            others[:] = [other for other in others if not fullness.is_above(other)]
            others.append(fullness)
    return tuple(fullness.row for group in alike.values() for fullness in group)


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
    """The stages of a rank: `layers` of each, its place, the number of that (`spots`) and a row in
    which it alone is 1 (`marks`), and whether it has one of the ends; and what all have."""

    layers: tuple[int, ...]
    places: tuple[Place, ...]
    spots: tuple[int, ...]
    marks: tuple[tuple[int, ...], ...]
    front: tuple[bool, ...]
    behind: tuple[bool, ...]
    messages: tuple[int, ...]  # that lie there besides as a pass of one of them begins
    is_staged: bool
    total: int
    has_front: bool
    has_behind: bool
    parts: dict[tuple[bool, ...], tuple[int, bool, bool]] = field(default_factory=dict)

    def row(self, moment: FlightMoment) -> MomentRow:
        """Return a moment of the rank's."""
        places, layers, on, over = self.places, self.layers, moment.on, moment.over
        whole, halved = moment.whole, moment.halved
        if has_halves := any(halved):
            # nobody waits for gradients of tokens: the first stage has no halves
            halved = tuple(map(mul, halved, (place is not Place.FIRST for place in places)))
            whole = tuple(map(add, whole, map(sub, moment.halved, halved)))
        graded = tuple(map(gt, moment.graded, over))
        graded_layers, graded_front, graded_behind = self._parts(graded)
        over_layers, over_front, over_behind = self._parts(over)
        return MomentRow(
            layers=self.total,
            front=self.has_front,
            behind=self.has_behind,
            graded_layers=graded_layers,
            graded_front=graded_front,
            graded_behind=graded_behind,
            over_layers=over_layers,
            over_front=over_front,
            over_behind=over_behind,
            whole=_sum(layers, whole),
            halved=_sum(layers, halved) if has_halves else 0,
            chunks=self._by_place(whole),
            waiting=self._by_place(halved) if has_halves else _NOWHERE,
            on=self.marks[on],
            own=layers[on],
            is_half=moment.is_half and places[on] is not Place.FIRST,
            is_new=not moment.graded[on],
            messages=self.messages[on],
            is_staged=self.is_staged,
        )

    def _parts(self, stages: tuple[bool, ...]) -> tuple[int, bool, bool]:
        """Layers of some of the stages, and whether these have the ends."""
        if stages not in self.parts:
            has_front, has_behind = (
                any(map(and_, end, stages)) for end in (self.front, self.behind)
            )
            self.parts[stages] = _sum(self.layers, stages), has_front, has_behind
        return self.parts[stages]

    def _by_place(self, numbers: Sequence[int]) -> tuple[int, ...]:
        sums = [0] * len(STAGE_PLACES)
        for spot, number in zip(self.spots, numbers, strict=True):
            sums[spot] += number
        return tuple(sums)


@lru_cache(maxsize=2**12)
def _stages_of_rank(
    size: PipelineSize, rank: int, counts: tuple[int, ...], between: int
) -> _RankStages:
    """The stages of a rank, of however many micro-batches: `between` chunks lie between the rank
    before and this one, and the gradient that came."""
    own = stages_of(size, rank)
    places = tuple(_place(stage, size.stages) for stage in own)
    layers = tuple(counts[stage] for stage in own)
    front = tuple(place in (Place.FIRST, Place.ALONE) for place in places)
    behind = tuple(place in (Place.LAST, Place.ALONE) for place in places)
    return _RankStages(
        layers=layers,
        places=places,
        spots=tuple(_NUMBERED[place] for place in places),
        marks=tuple(tuple(int(at is place) for at in STAGE_PLACES) for place in places),
        front=front,
        behind=behind,
        messages=tuple(
            0 if place is Place.ALONE else (place is not Place.LAST) + between for place in places
        ),
        is_staged=size.stages > 1,
        total=sum(layers),
        has_front=any(front),
        has_behind=any(behind),
    )


def _place(stage: int, stages: int) -> Place:
    if stages == 1:
        return Place.ALONE
    return {0: Place.FIRST, stages - 1: Place.LAST}.get(stage, Place.MIDDLE)


def _sum(sizes: Sequence[int], times: Sequence[int]) -> int:
    return sum(map(mul, sizes, times))


def as_arrays(flows: Sequence[tuple[MomentRow, ...]]) -> FlowMoments:
    """Return the moments of flows."""
    np = numpy()
    table = np.array([row.numbers for rows in flows for row in rows], dtype=np.float32)
    lengths = np.array([len(rows) for rows in flows])
    columns: dict[str, Any] = {}
    at = 0
    for name in MomentRow._fields:
        if name in _BY_PLACE:
            columns[name] = table[:, at : at + len(STAGE_PLACES)]
            at += len(STAGE_PLACES)
        else:
            columns[name] = np.ascontiguousarray(table[:, at])
            at += 1
    starts = np.cumsum(lengths) - lengths
    return FlowMoments(at=RankMoments(**columns), starts=starts, lengths=lengths)
