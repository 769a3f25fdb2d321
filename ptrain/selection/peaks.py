"""Peaks of many candidates at once, in closed form: for each row of choices of the data axes and
each flow, at every moment at which one of its ranks may be fullest (`axes.pipeline.cost`).

Few of a block's candidates fit. A cheap lower bound rules most of them out; of the others the
moments are summed one after the other, as many as each flow has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
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
from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.profile import STAGE_PLACES, Activity
from ptrain.selection.rows import OF_MEMORY
from ptrain.selection.score import (
    ActivityLevels,
    FlowMoments,
    HeldActivities,
    MomentParameters,
    RankMoments,
    StagePass,
)
from ptrain.units import grouped

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
        return [*fields[:at], *self.chunks, *self.waiting, *self.on, *fields[at + len(_BY_PLACE) :]]

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
    between = grouped(
        (tuple(counts[stage] for stage in stages_of(size, rank)), rank)
        for rank in range(1, size.ranks - 1)
    )
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


AT_ONCE = 2**13  # moments: arrays of so many stay near the processor
TOGETHER = 2**16  # moments that are gathered, of several blocks, so that few arrays are short
_MORE = 1 + 1e-3  # than one, of what is rounded
_ROUNDED = 1 - 1e-6  # sums of the same bytes in another order, in fp32
# Rows of `stacked`: `kept` of gradients from one micro-batch to the next, of experts too, and
# whether what is reduced `waits` for the last one.
_STACKED = (*OF_MEMORY, "kept", "kept_of_experts", "waits")
_LEVELS = tuple(level.name for level in fields(ActivityLevels))


def stacked(rows: Columns, *, is_many: bool) -> Array:
    """Return the bytes of rows one below the other, with what follows of many micro-batches or of
    one alone."""
    np = numpy()
    grads, of_experts, late = rows["grads"], rows["grads_of_experts"], rows["unreduced"]
    if is_many:
        grads, of_experts = np.maximum(late, grads), np.maximum(late, of_experts)
    columns = [rows[name] for name in OF_MEMORY]
    return np.stack([*columns, grads, of_experts, rows["is_late"] * is_many])


@dataclass(frozen=True, kw_only=True)
class RankPeaks:
    """Bytes of each rank of flows at its fullest, of a micro-batch with these activities: of many,
    or of one alone (`is_many`). Of a `block` the `experts` are states of other columns."""

    moments: FlowMoments
    act: Activity
    parts: MomentParameters
    block: int
    is_many: bool
    experts: int = 0

    @cached_property
    def _activities(self) -> HeldActivities:
        return HeldActivities(self.moments, self.act)

    @cached_property
    def levels(self) -> Array:
        """Return the levels of activities by moment, and below them how the forward pass ends."""
        of = self._activities
        return numpy().stack([*(getattr(of.levels, name) for name in _LEVELS), of.ended])

    def at_least(self, rows: Columns) -> Array:
        """Return bytes by row and flow than which those of its fullest rank are no less: of its
        states after a step, or of these and its activations as a forward pass has ended."""
        np, held, ended = numpy(), self.parts.held, self._activities.ended
        fullest = self.moments.fullest(ended)
        lives = rows["theta"] + rows["omega"]
        kept = (lives + rows["grads"])[:, None] * self.moments.most(held)
        now = lives[:, None] * held[fullest] + ended[fullest]
        return np.maximum(kept, now) * _ROUNDED

    def of(self, rows: Columns, at: Array, flows: Array) -> Array:
        """Return the most bytes of pairs of a row, the one `at` a place, and a flow."""
        pairs = OpenPairs(self, stacked(rows, is_many=self.is_many), at, flows)
        return next(together([pairs]))


class OpenPairs:
    """Pairs of a row, the one `at` a place of what is stacked, and a flow, whose peaks are to be
    summed up: at each of the moments that the flow has."""

    def __init__(self, ranks: RankPeaks, rows: Array, at: Array, flows: Array) -> None:
        self.ranks, self.rows = ranks, rows
        self.places, pairs, self.begins = ranks.moments.of_pairs(flows)
        self.at = at[pairs]

    def taken(self, start: int, end: int) -> tuple[Array, ...]:
        """Return what is known of some of the moments: of their rows, passes, parts and levels."""
        places, ranks = self.places[start:end], self.ranks
        return (
            self.rows.take(self.at[start:end], axis=1),
            ranks.moments.stacked.take(places, axis=1),
            ranks.parts.stacked.take(places, axis=1),
            ranks.levels.take(places, axis=1),
        )


def together(pairs: Sequence[OpenPairs]) -> Iterator[Array]:
    """Yield the peaks of several, of ranks whose blocks have as many parameters."""
    np, passes = numpy(), []
    for pieces in _pieces([len(of.places) for of in pairs]):
        taken = [pairs[number].taken(start, end) for number, start, end in pieces]
        joined = (np.concatenate(parts, axis=1) for parts in zip(*taken, strict=True))
        passes.append(_passes(pairs[0].ranks, *joined))
    moments, at = np.concatenate(passes), 0
    for of in pairs:
        yield np.maximum.reduceat(moments[at : at + len(of.places)], of.begins)
        at += len(of.places)


def _pieces(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what is computed at once: of which array, from which place to which."""
    pieces, room = [], AT_ONCE
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            pieces.append((number, start, end))
            room -= end - start
            start = end
            if not room:
                yield pieces
                pieces, room = [], AT_ONCE
    if pieces:
        yield pieces


def _passes(ranks: RankPeaks, of_rows: Array, passing: Array, parted: Array, leveled: Array) -> Any:
    """Bytes of rows at a moment each."""
    np, rows = numpy(), dict(zip(_STACKED, of_rows, strict=True))
    at, parts = StagePass(*passing), MomentParameters(*parted)
    *levels, as_ended = leveled
    block, kept = ranks.block, rows["kept"]
    passes = _backward(rows, at, ActivityLevels(*levels), parts, block)
    of_experts = _of_experts(rows, at, ranks.experts) if ranks.experts else None
    if of_experts is not None:
        passes += of_experts.new
    # the roots of a rank's other stages are given back, too, until these are passed
    released = rows["whole"] * (1 - rows["keeps_forward"])
    passes -= released * (parts.root - parts.own_root)
    np.maximum(passes, levels[_LEVELS.index("forward")] + _ahead(rows), out=passes)
    np.maximum(passes, as_ended, out=passes)
    passes += rows["whole"] * (parts.root + parts.blocks * rows["keeps_forward"])
    passes += kept * parts.had
    if of_experts is not None:
        passes += of_experts.had
    if at.over_layers.any():  # of what is over gradients are reduced, what was kept is gone
        passes += rows["reduced"] * parts.over
        passes -= rows["whole"] * rows["keeps_forward"] * at.over_layers * block
    grads, lives = rows["grads"] * parts.held, (rows["theta"] + rows["omega"]) * parts.held
    if of_experts is not None:
        grads, lives = grads + of_experts.grads, lives + of_experts.lives
    np.maximum(passes, grads, out=passes)
    passes += lives
    return passes


def _of_experts(rows: Columns, at: StagePass, experts: int) -> ExpertBytes:
    """By how much more of their states there is than of as many parameters of a block."""
    more, held = rows["kept_of_experts"] - rows["kept"], experts * at.layers
    return ExpertBytes(
        new=more * experts * at.own * at.is_new,
        had=more * experts * at.graded_layers,
        grads=(rows["grads_of_experts"] - rows["grads"]) * held,
        lives=(rows["lives_of_experts"] - rows["theta"] - rows["omega"]) * held,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBytes:
    """Of a rank's experts, bytes beyond those of other parameters: of gradients that a pass makes
    (`new`), that were there before (`had`) and after all, and of what lives between steps."""

    new: Array
    had: Array
    grads: Array
    lives: Array


def _ahead(rows: Columns) -> Array:
    """Bytes of a unit that is used and of those that are gathered ahead of it."""
    return rows["whole"] * (1 - rows["keeps_forward"]) * rows["unit"] * (1 + rows["ahead"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGradients:
    """Bytes of a backward pass over what was there before: of a unit whose gradients arrive
    (`opened`) and of one that is reduced (`flying`), of the `root` while its blocks are passed and
    behind them (`tail`), and of all this in the `first` block. `summed` stays of each block that
    is done and `given` is given back of it, `gone` of the head ahead of all blocks."""

    first: Array
    opened: Array
    flying: Array
    root: Array
    tail: Array
    summed: Array
    given: Array
    gone: Array

    @classmethod
    def of(cls, rows: Columns, at: StagePass, parts: MomentParameters, block: int) -> PassGradients:
        """Return those of choices of the data axes, in one of several micro-batches or alone."""
        is_whole = 1 - at.is_half
        # What waits for the last micro-batch has its place until it is reduced, and is free then.
        waits = rows["waits"]
        moves = 1 - waits
        opened, flying = rows["opened"] * rows["unit"], rows["flying"] * rows["unit"]
        # Of the root a flat unit takes all at once, and tensors the head's first. On a last stage
        # a flat one has the head alone, and is done with it ahead of the blocks.
        is_done = rows["adds_first"] * at.is_last * is_whole
        root = rows["opened"] * (parts.front * rows["adds_first"] + parts.head) * (1 - is_done)
        first = opened + root + rows["flying"] * is_done * parts.head
        released = rows["whole"] * (1 - rows["keeps_backward"]) * is_whole
        # what copies of a shard have summed stays beside what it is added to until all are done
        again = numpy().maximum(rows["is_cast"], (1 - at.is_new) * (1 - rows["is_late"]))
        return cls(
            first=first * (1 - waits * (1 - at.is_new)),
            opened=opened * moves,
            flying=flying * moves,
            root=root * moves,
            tail=rows["opened"] * moves * (parts.front + parts.head),
            summed=rows["outputs"] * block * again,
            given=released * rows["keeps_forward"] * block,
            gone=released * is_done * parts.head,
        )


def _backward(
    rows: Columns,
    at: StagePass,
    levels: ActivityLevels,
    parts: MomentParameters,
    block: int,
) -> Array:
    """Bytes at most in the backward pass, beside what has been there all along. In the first block
    nothing is reduced yet, from the second on what came before it may be."""
    np, kept = numpy(), rows["kept"]
    own = parts.front + parts.head + at.own * block
    # of several units one is reduced while the next one's gradients arrive
    several = (at.own > 1) & (at.own * block > rows["unit"] * _MORE)
    of = PassGradients.of(rows, at, parts, block)
    new = kept * own * at.is_new
    of_blocks = new - kept * parts.front * at.is_new * (1 - at.is_half)  # the embedding's is last
    buffers: Array = 0
    if at.is_half.any():
        # Flat units have buffers for gradients from one half to the other: what is reduced of a cut
        # one is the buffer in which they arrived.
        buffers = rows["adds_first"] * np.maximum(rows["opened"], rows["flying"])
        buffers = buffers * own * at.is_half
        buffers = buffers * np.maximum(at.is_new, 1 - rows["is_late"])
        new, of_blocks = np.maximum(new - buffers, 0), np.maximum(of_blocks - buffers, 0)
    ahead = _ahead(rows)
    # the loss comes before the root is gathered again
    fullest = levels.begins - rows["whole"] * (1 - rows["keeps_forward"]) * parts.own_root
    second = ahead + of.opened + of.flying + of.root + of.summed
    late = ahead + of.opened + of.root + several * of.flying + of_blocks
    end = of.flying + new
    for level in (
        levels.deep + ahead + of.first - of.gone,
        np.where(several, levels.second + second - of.gone, 0),
        levels.late + late + (at.own - 1) * (of.summed - of.given) - of.gone,
        levels.ends + end + at.own * (of.summed - of.given) + of.tail - of.gone,
        levels.embeds + end + at.own * (of.summed - of.given) + of.root - of.gone,
    ):
        fullest = np.maximum(fullest, level)
    return fullest + buffers
