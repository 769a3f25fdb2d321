"""Memory and time of many candidates at once, in closed form: arrays over the choices of the data
axes, for one way to cut blocks, one flow through the ranks, one micro-batch.

What is summed up here by formula, `derive` plays event by event for those that are best. The peak
is the largest of a few moments: forward at its end, backward at its begin, in its first block and
in its last one, the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ptrain.selection.arrays import numpy
from ptrain.selection.profile import Activity, Seconds, Sizes

Array = Any
Columns = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one rank of a pipeline has of the model: layers on all of its stages, whether the
    embedding is there and the head, and how many chunks of its stages are in flight at most, as
    micro-batches of all of its stages."""

    layers: int
    has_front: bool
    has_behind: bool
    in_flight: float
    boundaries: int = 0  # tensors at stages' boundaries, of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block of candidates: the ranks of a pipeline that differ, `idle` seconds of a step that
    the schedule leaves, `crossing` seconds of a micro-batch at all boundaries of a rank.
    `sends_apart`: what crosses boundaries moves beside what is computed."""

    places: Sequence[Place]
    micro_batches: int
    stages_per_rank: int
    is_pipeline: bool


def peaks(rows: Columns, step: Step, sizes: Sizes, activity: Activity) -> Array:
    """Return the bytes of the fullest rank at its fullest, for each row."""
    np = numpy()
    best = np.zeros(len(rows["theta"]))
    for place in step.places:
        best = np.maximum(best, _peak(rows, step, place, sizes, activity))
    return best


def _root(place: Place, sizes: Sizes) -> int:
    return place.has_front * sizes.front + place.has_behind * sizes.behind


def _peak(rows: Columns, step: Step, place: Place, sizes: Sizes, act: Activity) -> Array:
    np = numpy()
    root, blocks = _root(place, sizes), place.layers * sizes.block
    parameters = root + blocks
    rest = (rows["theta"] + rows["omega"]) * parameters
    many = step.micro_batches > 1
    summed = np.maximum(rows["unreduced"], rows["grads"]) if many else rows["grads"]
    before = (summed * parameters) if many else 0.0 * rest
    unit, whole = rows["unit"], rows["whole"]
    stays = whole * blocks * rows["keeps_forward"]
    root_whole = whole * root
    ahead = whole * unit * (1 - rows["keeps_forward"])
    inner = place.layers * act.block + place.boundaries * act.hidden
    front = place.has_front * act.front
    saved = place.in_flight * (inner + front) + place.has_behind * act.behind
    base = rest + before + root_whole + stays
    in_forward = base + (saved - act.block) + act.forward_rise + ahead * (1 + rows["ahead"])
    top = base + saved + place.has_behind * (act.behind_rise - act.behind)
    head = base + saved + place.has_behind * act.head_rise
    turn = act.backward_rise + ahead * (1 + rows["ahead"])
    turn = turn + unit * (rows["opened"] + rows["flying"])
    deep = base + saved - place.has_behind * act.behind + turn
    grown = rest + root_whole + stays + summed * parameters
    last = grown + (saved - place.has_behind * act.behind - inner + act.block) + turn
    update = rest + rows["grads"] * parameters
    return np.maximum.reduce([in_forward, top, head, deep, last, update])


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Seconds beside those of rows: `idle` of a step's schedule, and `crossing` of a micro-batch
    over one boundary, which moves `apart` from what is computed or not."""

    idle: float
    crossing: float
    is_apart: bool


def step_seconds(
    rows: Columns, step: Step, sizes: Sizes, seconds: Seconds, links: Links
) -> Array:
    """Return the seconds of a step on the rank that takes longest, for each row."""
    np = numpy()
    slowest = np.zeros(len(rows["theta"]))
    for place in step.places:
        slowest = np.maximum(slowest, _busy(rows, step, place, sizes, seconds, links))
    return slowest + links.idle


def compute_seconds(place: Place, seconds: Seconds) -> tuple[float, float]:
    """Return what a rank computes of one micro-batch, forward and backward."""
    forward, backward = (
        place.layers * seconds.block[way]
        + place.has_front * seconds.front[way]
        + place.has_behind * seconds.behind[way]
        for way in (0, 1)
    )
    return forward, backward


def _busy(
    rows: Columns, step: Step, place: Place, sizes: Sizes, seconds: Seconds, links: Links
) -> Array:
    """Computation of all micro-batches, and what of the rest is not hidden behind it."""
    np = numpy()
    number = step.micro_batches
    forward, backward = compute_seconds(place, seconds)
    units = place.layers * rows["per_layer"]
    of_root = _root(place, sizes) / rows["unit"]
    apart = rows["overlaps"]
    gathers = np.where(rows["keeps_backward"], 1, number)  # forward passes that gather
    again = np.where(rows["keeps_forward"], 0, number)
    reduces = np.where(rows["is_late"], 1, number)
    gather, reduce = rows["gather"], rows["reduce"]
    of_forward = seconds.block[0] / rows["per_layer"]
    of_backward = seconds.block[1] / rows["per_layer"]
    # a pass waits for its root and its first unit, and for what the others take beyond a unit
    ahead = apart * (rows["ahead"] > 0)
    hidden = np.minimum(gather, of_forward) * (units - 1) * ahead
    waits = gathers * (gather * (of_root + units) - hidden)
    moved = again * gather + reduces * reduce
    room = np.maximum(again, reduces) * of_backward
    can_hide = np.where(ahead > 0, again * gather, 0.0) + apart * reduces * reduce
    hidden = np.minimum(can_hide, room) * (units - 1)
    waits = waits + moved * (units + of_root) - hidden
    update = rows["update"] + rows["copy"]
    after = update * (_root(place, sizes) + place.layers * sizes.block)
    after = after + rows["finish"] * (units + of_root)
    crossings = 0.0 if links.is_apart else number * place.boundaries * links.crossing
    return number * (forward + backward) + waits + after + crossings
