"""Memory and time of many candidates at once, in closed form: arrays over the choices of the data
axes and the flows, for one way to cut blocks and one micro-batch.

What is summed up here by formula, `derive` plays event by event for those that are best. A peak is
the largest of a few moments (`axes.pipeline.cost.moments`), and around each of these: a forward
pass in its last block and at its end, a backward pass at its begin, in the first block that it
comes to and in the last one, the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptrain.derivation.tables import Place
from ptrain.selection.activity import Activity
from ptrain.selection.arrays import numpy
from ptrain.selection.profile import Seconds, Sizes
from ptrain.selection.rows import Columns

Array = Any
# Of a model that is whole, and of stages: the order in which moments count chunks.
STAGE_PLACES = (Place.ALONE, Place.FIRST, Place.MIDDLE, Place.LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What ranks of a pipeline have of the model, the last dimension being the ranks that differ:
    `layers` on all of their stages, `front` and `behind` where embedding and head are, `boundaries`
    of a micro-batch between stages."""

    layers: Array
    front: Array
    behind: Array
    boundaries: Array

    def root(self, sizes: Sizes) -> Array:
        """Return the parameters around the blocks."""
        return around(sizes, self.front, self.behind, self.boundaries > 0)

    def at(self, indices: Array) -> Places:
        """Return those of some flows."""
        return Places(
            layers=self.layers[indices],
            front=self.front[indices],
            behind=self.behind[indices],
            boundaries=self.boundaries[indices],
        )

    def computing(self, seconds: Seconds) -> tuple[Array, Array]:
        """Return what each computes of one micro-batch, forward and backward."""
        forward, backward = (
            self.layers * seconds.block[way]
            + self.front * seconds.front[way]
            + self.behind * seconds.behind[way]
            for way in (0, 1)
        )
        return forward, backward

    def moving(self, seconds: Seconds) -> Array:
        """Return for how long each waits, in a micro-batch, for activations that leave the device
        and come back: the last block's are back when all have left, and each other's set out with
        the block behind it."""
        np, (out, back) = numpy(), seconds.moved
        stages = np.maximum(1, self.boundaries)
        between = self.behind * sum(seconds.behind) + (self.layers - stages) * seconds.block[0]
        late = np.maximum(0.0, self.layers * out - between)
        slower = max(0.0, back - seconds.block[1])
        return late + stages * back + (self.layers - stages) * slower


def around(sizes: Sizes, front: Array, behind: Array, is_staged: Array) -> Array:
    """Return the parameters around the blocks: where both ends are on stages of their own the last
    one has what is tied too."""
    return front * sizes.front + behind * (sizes.behind + is_staged * sizes.copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMoments:
    """When ranks of a pipeline may be fullest, the last dimension being these moments, each as a
    backward pass begins. What the rank has of the model: `layers`, `front`, `behind`, and of these
    what has summed a gradient before (`graded_…`), or all of the step's (`over_…`). `whole` and
    `halved`: layers that hold activations, each as often as it does, of micro-batches that are
    whole and between two halves; `chunks` and `waiting` are these by the stage's place, `on` is
    that of the stage whose pass it is, of `own` layers; `is_half` whether it has halves, and
    `is_new` whether its gradients are its stage's first. `messages` lie at the rank's boundaries
    besides."""

    layers: Array
    front: Array
    behind: Array
    graded_layers: Array
    graded_front: Array
    graded_behind: Array
    over_layers: Array
    over_front: Array
    over_behind: Array
    whole: Array
    halved: Array
    chunks: Array
    waiting: Array
    on: Array
    own: Array
    is_half: Array
    is_new: Array
    messages: Array
    is_staged: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityLevels:
    """Bytes of activations around a moment, whatever the data axes do: in the `forward` pass before
    it and as that has `ended`, as the backward pass `begins`, in its first block (`deep`), in its
    `second` and its last one (`late`) and behind that (`ends`), and as the embedding's gradient
    arrives (`embeds`)."""

    forward: Array
    ended: Array
    begins: Array
    deep: Array
    second: Array
    late: Array
    ends: Array
    embeds: Array


def activity_levels(at: RankMoments, act: Activity) -> ActivityLevels:
    """Return them by moment."""
    np, is_whole = numpy(), 1 - at.is_half

    def of_places(name: str, chunks: Array) -> Array:
        spots = [getattr(act.ends[place], name) for place in STAGE_PLACES]
        return chunks @ np.array(spots, dtype=chunks.dtype)

    saved = at.whole * act.block + at.halved * (act.block + act.half) + at.messages * act.hidden
    saved = saved + of_places("saved", at.chunks + at.waiting) + of_places("waiting", at.waiting)
    half = at.is_half * (at.own * act.half + of_places("half_begun", at.on))
    whole = is_whole * of_places("begun", at.on)
    begins = np.where(at.is_half, of_places("half_rise", at.on), of_places("backward_rise", at.on))
    # behind the half of the inputs, whose last block has risen, comes that of the weights
    deep = saved + half + whole + is_whole * act.backward_rise
    # in the first block the others of this micro-batch are free again, behind it that one, too
    ends = deep - is_whole * (act.backward_rise + at.own * act.block)
    return ActivityLevels(
        # the forward before it left its last block or its head
        forward=np.maximum(
            saved - act.block + act.forward_rise, at.is_half * (saved + half + act.half_rise)
        ),
        ended=saved + of_places("forward_rise", at.on),
        begins=saved + begins,
        deep=deep,
        second=deep - act.block,
        late=deep - is_whole * (at.own - 1) * act.block,
        ends=ends,
        embeds=ends + of_places("end_rise", at.on),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentParameters:
    """Parameters by moment: of all of a rank's `blocks` and of the `root` around them (`held`: of
    both), of what `had` gradients before and of what is `over`, and of the stage that a pass is on:
    of its `front` and its `head`. `has_others`: whether a root is another stage's anywhere."""

    blocks: Array
    root: Array
    had: Array
    over: Array
    front: Array
    head: Array
    held: Array
    has_others: bool

    @property
    def own_root(self) -> Array:
        """Return what is around the blocks of the stage that a pass is on."""
        return self.front + self.head

    @classmethod
    def of(cls, at: RankMoments, sizes: Sizes) -> MomentParameters:
        """Return those of a model of these sizes."""
        had = around(sizes, at.graded_front, at.graded_behind, at.is_staged)
        over = around(sizes, at.over_front, at.over_behind, at.is_staged)
        front = around(sizes, at.on[..., :2].sum(axis=-1), 0, at.is_staged)
        head = around(sizes, 0, at.on[..., ::3].sum(axis=-1), at.is_staged)
        blocks, root = at.layers * sizes.block, around(sizes, at.front, at.behind, at.is_staged)
        return cls(
            blocks=blocks,
            root=root,
            had=had + at.graded_layers * sizes.block,
            over=over + at.over_layers * sizes.block,
            front=front,
            head=head,
            held=root + blocks,
            has_others=bool((root != front + head).any()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeaks:
    """Bytes of each rank of flows at its fullest, and what of them is the same for all choices of
    the data axes."""

    at: RankMoments
    levels: ActivityLevels
    parts: MomentParameters
    block: int
    is_many: bool

    @classmethod
    def over(cls, at: RankMoments, sizes: Sizes, act: Activity, micro_batches: int) -> RankPeaks:
        """Return them of ranks with these moments, of a model of these sizes."""
        return cls(
            at=at,
            levels=activity_levels(at, act),
            parts=MomentParameters.of(at, sizes),
            block=sizes.block,
            is_many=micro_batches > 1,
        )

    def of(self, rows: Columns) -> Array:
        """Return the bytes by row, flow and moment."""
        np, at, levels, parts = numpy(), self.at, self.levels, self.parts
        kept = np.maximum(rows["unreduced"], rows["grads"]) if self.is_many else rows["grads"]
        passes = _backward(rows, at, levels, parts, (self.block, kept, self.is_many))
        # the roots of a rank's other stages are given back, too, until these are passed
        if parts.has_others:
            released = rows["whole"] * (1 - rows["keeps_forward"])
            passes -= released * (parts.root - parts.own_root)
        np.maximum(passes, levels.forward + _ahead(rows), out=passes)
        np.maximum(passes, levels.ended, out=passes)
        passes += rows["whole"] * (parts.root + parts.blocks * rows["keeps_forward"])
        passes += kept * parts.had
        if at.over_layers.any():  # of what is over gradients are reduced, what was kept is gone
            passes += rows["reduced"] * parts.over
            passes -= rows["whole"] * rows["keeps_forward"] * at.over_layers * self.block
        np.maximum(passes, rows["grads"] * parts.held, out=passes)
        passes += (rows["theta"] + rows["omega"]) * parts.held
        return passes

    def at_least(self, rows: Columns) -> Array:
        """Return bytes by row and flow than which those of its fullest rank are no less: of its
        states after a step, or of these and its activations as a forward pass has ended."""
        np, held, ended = numpy(), self.parts.held, self.levels.ended
        lives, fullest = rows["theta"][..., 0] + rows["omega"][..., 0], ended.argmax(axis=1)
        flows = np.arange(len(fullest))
        kept = (lives + rows["grads"][..., 0]) * held.max(axis=1)
        return np.maximum(kept, lives * held[flows, fullest] + ended[flows, fullest])


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
    def of(
        cls, rows: Columns, at: RankMoments, parts: MomentParameters, block: int, *, is_many: bool
    ) -> PassGradients:
        """Return those of choices of the data axes, in one of several micro-batches or alone."""
        is_whole = 1 - at.is_half
        # What waits for the last micro-batch has its place until it is reduced, and is free then.
        waits = rows["is_late"] * is_many
        moves = 1 - waits
        opened, flying = rows["opened"] * rows["unit"], rows["flying"] * rows["unit"]
        # Of the root a flat unit takes all at once, and tensors the head's first. On a last stage
        # a flat one has the head alone, and is done with it ahead of the blocks.
        is_done = rows["adds_first"] * at.on[..., -1] * is_whole
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
    at: RankMoments,
    levels: ActivityLevels,
    parts: MomentParameters,
    rest: tuple[int, Array, bool],
) -> Array:
    """Bytes at most in the backward pass, beside what has been there all along. In the first block
    nothing is reduced yet, from the second on what came before it may be."""
    np, (block, kept, is_many) = numpy(), rest
    own, several = parts.front + parts.head + at.own * block, at.own > 1
    of = PassGradients.of(rows, at, parts, block, is_many=is_many)
    new = kept * own * at.is_new
    of_blocks = new - kept * parts.front * at.is_new * (1 - at.is_half)  # the embedding's is last
    buffers: Array = 0
    if at.is_half.any():  # flat units have buffers for gradients from one half to the other
        buffers = rows["adds_first"] * (rows["opened"] + rows["flying"]) * own * at.is_half
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds of a step in which a rank is busy: in its passes and behind them. `longer`: how many
    times as long its passes are as what it computes in them."""

    passes: Array
    update: Array
    longer: Array


def busy(rows: Columns, places: Places, sizes: Sizes, seconds: Seconds, micro_batches: int) -> Busy:
    """Return what each rank is busy in a step: computation of all micro-batches, and what of the
    rest is not hidden behind it."""
    np, number = numpy(), micro_batches
    forward, backward = places.computing(seconds)
    units = places.layers * rows["per_layer"]
    root = places.root(sizes)
    of_root = root / rows["moved"]
    gathers = np.where(rows["keeps_backward"] > 0, 1, number)  # forward passes that gather
    again = np.where(rows["keeps_forward"] > 0, 0, number)
    reduces = np.where(rows["is_late"] > 0, 1, number)
    gather, reduce = rows["gather"], rows["reduce"]
    # a pass through a stage waits for its root and its first unit, and for what the others take
    # beyond a unit
    later = units - np.maximum(1, places.boundaries)
    ahead = rows["overlaps"] * (rows["ahead"] > 0)
    behind_forward = np.minimum(gather, seconds.block[0] / rows["per_layer"]) * ahead
    waits = gathers * (gather * (of_root + units) - behind_forward * later)
    moved = again * gather + reduces * reduce
    apart = ahead * again * gather + rows["overlaps"] * reduces * reduce
    room = np.maximum(again, reduces) * seconds.block[1] / rows["per_layer"]
    waits = waits + moved * (units + of_root) - np.minimum(apart, room) * later
    copies = (gathers + again) * rows["unpack"] + reduces * rows["pack"]
    waits = waits + copies * (units + of_root)
    added = rows["add"] * units + rows["add_end"] * root
    waits = waits + (number - 1 + rows["adds_first"]) * added
    waits = waits + reduces * (rows["fill"] * units + rows["fill_end"] * root)
    waits = waits + number * places.moving(seconds)
    computing = number * (forward + backward)
    blocks = places.layers * sizes.block
    update = rows["update"] * blocks + rows["update_end"] * root
    update = update + rows["copied"] * (root + blocks)
    return Busy(
        passes=computing + waits,
        update=update + rows["finish"] * (units + of_root),
        longer=1 + waits / computing,
    )
