"""Memory and time of many candidates at once, in closed form: arrays over the choices of the data
axes and the flows, for one way to cut blocks and one micro-batch.

What is summed up here by formula, `derive` plays event by event for those that are best. The peak
is the largest of a few moments: forward at its end, backward at its begin, in its first block and
in its last one, the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ptrain.selection.arrays import numpy
from ptrain.selection.profile import Activity, Seconds, Sizes
from ptrain.selection.rows import Columns

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What ranks of a pipeline have of the model, the last dimension being the ranks that differ:
    `layers` on all of their stages, `front` and `behind` where embedding and head are, `in_flight`
    micro-batches of all of its stages at most, `heads` of the last stage alone, of `outputs` of
    which the logits are there, and `boundaries`, tensors of a micro-batch between stages."""

    layers: Array
    front: Array
    behind: Array
    in_flight: Array
    heads: Array
    outputs: Array
    boundaries: Array

    def root(self, sizes: Sizes) -> Array:
        """Return the parameters around the blocks."""
        behind = sizes.behind + (self.boundaries > 0) * sizes.copied
        return self.front * sizes.front + self.behind * behind

    def at(self, indices: Array) -> Places:
        """Return those of some flows."""
        return Places(
            layers=self.layers[indices],
            front=self.front[indices],
            behind=self.behind[indices],
            in_flight=self.in_flight[indices],
            heads=self.heads[indices],
            outputs=self.outputs[indices],
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


def peaks(rows: Columns, places: Places, sizes: Sizes, act: Activity, micro_batches: int) -> Array:
    """Return the bytes of each rank at its fullest."""
    np = numpy()
    root, blocks = places.root(sizes), places.layers * sizes.block
    parameters = root + blocks
    rest = (rows["theta"] + rows["omega"]) * parameters
    many = micro_batches > 1
    kept = np.maximum(rows["unreduced"], rows["grads"]) if many else rows["grads"]
    grown = kept * parameters
    unit, whole = rows["unit"], rows["whole"]
    gone = 1 - rows["keeps_forward"]
    ahead = whole * unit * gone * (1 + rows["ahead"])
    gathered = whole * (root + blocks * rows["keeps_forward"])
    inner = places.layers * act.block + places.boundaries * act.hidden
    behind = places.behind * places.heads * act.behind
    logits = places.behind * (places.boundaries > 0) * act.logits
    behind = behind + places.outputs * logits
    saved = places.in_flight * (inner + places.front * act.front) + behind
    base = rest + gathered + (grown if many else 0.0)
    in_forward = base + (saved - act.block + act.forward_rise) + ahead
    top = base + saved + places.behind * max(act.behind_rise - act.behind, act.head_rise)
    turn = act.backward_rise + ahead + unit * (rows["opened"] + rows["flying"])
    deep = base + (saved - behind) + turn
    late = rest + gathered + grown + (saved - behind - inner + act.block) + turn
    return np.maximum.reduce(
        [in_forward, top, deep, late, np.broadcast_to(rest + grown, deep.shape)]
    )


def step_seconds(
    rows: Columns, places: Places, sizes: Sizes, seconds: Seconds, micro_batches: int
) -> Array:
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
    adds = (number - 1 + rows["adds_first"]) * rows["add"] * (units + of_root)
    after = rows["update"] * (root + places.layers * sizes.block)
    after = after + rows["finish"] * (units + of_root)
    return number * (forward + backward) + waits + adds + after
