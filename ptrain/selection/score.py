"""Memory and time of many candidates at once, in closed form: arrays over the choices of the data
axes and the flows, for one way to cut blocks and one micro-batch.

What is summed up here by formula, `derive` plays event by event for those that are best. A peak is
the largest of a few moments (`axes.pipeline.cost`), and around each of these: a forward
pass in its last block and at its end, a backward pass at its begin, in the first block that it
comes to and in the last one, the update.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.profile import Activity, IssueSeconds, Seconds, Sizes


@dataclass(frozen=True, slots=True)
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

    def computing(self, seconds: Seconds | IssueSeconds) -> tuple[Array, Array]:
        """Return what each computes of one micro-batch, forward and backward; or issues."""
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
        slower = np.maximum(0.0, back - seconds.block[1])
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


@dataclass(frozen=True, kw_only=True)
class FlowMoments:
    """The moments of several flows, one flow's behind the other's: at which place each flow's
    `starts`, and how many it has (`lengths`)."""

    at: RankMoments
    starts: Array
    lengths: Array

    @cached_property
    def stacked(self) -> Array:
        """Return the fields of `StagePass`, one below the other."""
        at, last = self.at, self.at.on[..., -1]
        own = at.own, last, at.is_half, at.is_new, at.over_layers
        return numpy().stack([*own, at.layers, at.graded_layers])

    @cached_property
    def chunks(self) -> Array:
        """Return the chunks by the stage's place, those between two halves included."""
        return self.at.chunks + self.at.waiting

    @cached_property
    def stage(self) -> Array:
        """Return the place of the stage whose pass it is, by its number among `STAGE_PLACES`."""
        return self.at.on.argmax(axis=-1)

    @cached_property
    def has_halves(self) -> bool:
        """Return whether any are between two halves."""
        return bool(self.at.halved.any() or self.at.waiting.any())

    def most(self, values: Array) -> Array:
        """Return the largest of each flow's values."""
        return numpy().maximum.reduceat(values, self.starts)

    def fullest(self, values: Array) -> Array:
        """Return the place of the first of each flow's largest values."""
        parts = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        places = [start + int(values[start : start + length].argmax()) for start, length in parts]
        return numpy().array(places)

    def of_pairs(self, flows: Array) -> tuple[Array, Array, Array]:
        """Return, for flows that are named as often as there are rows with them, the places of
        their moments, of which of these pairs each is, and where each pair's begin."""
        np, lengths = numpy(), self.lengths[flows]
        begins = np.cumsum(lengths) - lengths
        pairs = np.repeat(np.arange(len(flows)), lengths)
        return np.arange(len(pairs)) + (self.starts[flows] - begins)[pairs], pairs, begins


@dataclass(frozen=True, slots=True)
class StagePass:
    """The stage that a pass is on: its `own` layers, whether it is the last, and whether the pass
    is a half (`is_half`) and the stage's first (`is_new`); `over_layers`, `layers` and
    `graded_layers` are its rank's."""

    own: Array
    is_last: Array
    is_half: Array
    is_new: Array
    over_layers: Array
    layers: Array
    graded_layers: Array


@dataclass(frozen=True)
class HeldActivities:
    """Bytes of activations by moment, of a micro-batch with these."""

    moments: FlowMoments
    act: Activity

    @property
    def at(self) -> RankMoments:
        """Return the moments one by one."""
        return self.moments.at

    @cached_property
    def saved(self) -> Array:
        """Return what is kept for backward passes."""
        at, act = self.at, self.act
        saved = at.whole * act.block
        if self.moments.has_halves:
            saved = saved + at.halved * (act.block + act.half)
        saved = saved + at.messages * act.hidden
        saved = saved + self.moments.chunks @ self.act.by_place["saved"]
        if self.moments.has_halves:
            saved = saved + at.waiting @ self.act.by_place["waiting"]
        return saved

    def on_stage(self, name: str) -> Array:
        """Return what the stage has whose pass it is."""
        return self.act.by_place[name].take(self.moments.stage)

    @cached_property
    def ended(self) -> Array:
        """Return what is there as the forward pass before a moment has ended."""
        return self.saved + self.on_stage("forward_rise")

    @cached_property
    def levels(self) -> ActivityLevels:
        """Return what is there around it."""
        np, at, act, on = numpy(), self.at, self.act, self.on_stage
        is_whole, saved = 1 - at.is_half, self.saved
        half = at.is_half * (at.own * act.half + on("half_begun"))
        begins = np.where(at.is_half, on("half_rise"), on("backward_rise"))
        # behind the half of the inputs, whose last block has risen, comes that of the weights
        deep = saved + half + is_whole * on("begun") + is_whole * act.backward_rise
        # in the first block the others of this micro-batch are free again, behind it that one, too
        ends = deep - is_whole * (act.backward_rise + at.own * act.block)
        return ActivityLevels(
            # the forward before it left its last block or its head
            forward=np.maximum(
                saved - act.block + act.forward_rise, at.is_half * (saved + half + act.half_rise)
            ),
            begins=saved + begins,
            deep=deep,
            second=deep - act.block,
            late=deep - is_whole * (at.own - 1) * act.block,
            ends=ends,
            embeds=ends + on("end_rise"),
        )


@dataclass(frozen=True, slots=True)
class ActivityLevels:
    """Bytes of activations around a moment, whatever the data axes do: in the `forward` pass before
    it, as the backward pass `begins`, in its first block (`deep`), in its `second` and its last one
    (`late`) and behind that (`ends`), and as the embedding's gradient arrives (`embeds`)."""

    forward: Array
    begins: Array
    deep: Array
    second: Array
    late: Array
    ends: Array
    embeds: Array


@dataclass(frozen=True)
class MomentParameters:
    """Parameters by moment: of all of a rank's `blocks` and of the `root` around them (`held`: of
    both), of what `had` gradients before and of what is `over`, and of the stage that a pass is on:
    of its `front` and its `head`."""

    blocks: Array
    root: Array
    had: Array
    over: Array
    front: Array
    head: Array
    held: Array

    @cached_property
    def stacked(self) -> Array:
        """Return them one below the other."""
        return numpy().stack([getattr(self, part.name) for part in fields(self)])

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds of a step in which a rank is busy: in its passes and behind them. `longer`: how many
    times as long its passes are as what it computes in them."""

    passes: Array
    update: Array
    longer: Array

    def of_others(self, computing: Array, whole: Array, own: Array) -> Array:
        """Return by which factor the passes of all other ranks together are longer than what these
        compute, by candidate: `own` is the place of the rank that is left out, `whole` what all
        compute together, and ranks in the middle are alike."""
        np = numpy()
        rows = np.arange(len(own))
        first, last = computing[:, 0], computing[:, -1]
        middle = whole - first - last
        others = whole - computing[rows, own]
        passes = self.passes[:, 0] + self.passes[:, -1] - self.passes[rows, own]
        passes = passes + middle * self.longer[:, 1]
        return np.divide(passes, others, out=np.ones_like(passes), where=others > 0)


def busy(
    rows: Columns, places: Places, sizes: Sizes, seconds: Seconds, micro_batches: Array
) -> Busy:
    """Return what each rank is busy in a step: computation of all micro-batches, and what of the
    rest is not hidden behind it. Rows, seconds and micro-batches may be those of several blocks."""
    np, number = numpy(), micro_batches
    forward, backward = places.computing(seconds)
    units = places.layers * rows["per_layer"]
    root = places.root(sizes)
    of_root = root / rows["moved"]
    gathers, again, reduces = _moves(rows, number)
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
    moves = (rows["finish"] + rows["spread"]) * (units + of_root)
    # of a cluster that declares no operations per second nothing is computed, and nobody idles
    share = np.divide(waits, computing, out=np.zeros_like(waits), where=computing > 0)
    return Busy(
        passes=computing + waits,
        update=update + moves - rows["spread_beside"] * _hidden(rows, units, root),
        longer=1 + share,
    )


def _hidden(rows: Columns, units: Array, root: Array) -> Array:
    """Return the seconds of gathers that go on beside updates: each begins when its unit is updated
    and that before it is over. The root is the last, and its own has nothing beside it."""
    np = numpy()
    updated, spread = rows["update"] * rows["moved"], rows["spread"]
    ahead_of_root = units * updated + rows["update_end"] * root
    gathered = np.maximum(updated + units * spread, units * updated + spread)
    return np.maximum(0, ahead_of_root + units * spread - np.maximum(ahead_of_root, gathered))


def _moves(rows: Columns, number: Array) -> tuple[Array, Array, Array]:
    """How many forward and backward passes gather each unit in a step, and how many reduce it."""
    np = numpy()
    return (
        np.where(rows["keeps_backward"] > 0, 1, number),
        np.where(rows["keeps_forward"] > 0, 0, number),
        np.where(rows["is_late"] > 0, 1, number),
    )


def issued(
    rows: Columns, places: Places, sizes: Sizes, issuing: IssueSeconds, number: Array
) -> Array:
    """Return how long each rank's host issues in a step, but for what it does by stages: all
    passes, and what is sent of each unit, of which what is around the blocks is one."""
    np, root = numpy(), places.root(sizes)
    forward, backward = places.computing(issuing)
    gathers, again, reduces = _moves(rows, number)
    sent = (gathers + again) * rows["issue_gather"] + reduces * rows["issue_reduce"]
    of_root = np.where(rows["is_in_buckets"] > 0, root / rows["moved"], root > 0)
    units = places.layers * rows["per_layer"] + of_root
    return number * (forward + backward) + units * (sent + rows["issue_settled"])
