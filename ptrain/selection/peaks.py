"""Peaks of many candidates at once, in closed form: of a row of choices of the data axes and a flow
at each moment at which one of its ranks may be fullest.

Few of a block's candidates fit. What each has at least costs little, and rules most of them out; of
the others the moments are summed up one behind the other, as many as each flow has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.profile import Activity
from ptrain.selection.rows import OF_MEMORY
from ptrain.selection.score import (
    ActivityLevels,
    FlowMoments,
    HeldActivities,
    MomentParameters,
    StagePass,
)

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
