"""Estimate the bytes and the seconds of a step from what its parts take, in plain numbers.

A peak is the largest of a few moments of a rank: a forward pass in its last block, a backward pass
as it begins, in its first block, in its last one and behind it, and the update; once with the first
gradients and once with those of micro-batches before. A step takes what the slowest rank computes
and what of its communication does not fit beside that, and what its schedule leaves idle.

Both are estimates: `derive` plays the candidates that are best by them event by event, and a search
leaves out only what is further from a bound than they are from what is exact (`task.SLACK`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ptrain.cost import State
from ptrain.optimizers.update import optimizer_itemsize
from ptrain.selection.profile import Activity, Links, Sizes
from ptrain.selection.ways import DataWay, UnitSeconds, inside
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR, Form

_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBytes:
    """Bytes per parameter that a rank has: `lives` of Theta and Omega between steps, `grads` when
    backward is over and `kept` from one micro-batch to the next, each of its own experts too;
    `whole` of a unit that is gathered, `ahead` bytes of those that are there at once, `opened` of a
    unit's gradients while they arrive and `flying` while they are reduced, `summed` of what copies
    of a shard have summed."""

    lives: float
    lives_of_experts: float
    grads: float
    grads_of_experts: float
    kept: float
    kept_of_experts: float
    whole: float
    ahead: float
    opened: float
    flying: float
    summed: float
    unit: float
    is_cast: bool
    is_flat: bool
    waits: bool
    is_late: bool
    keeps_forward: bool
    keeps_backward: bool


def way_bytes(
    base: Spec,
    way: DataWay,
    degrees: tuple[int, ...],
    sizes: Sizes,
    unit: float,
    *,
    is_many: bool,
) -> WayBytes:
    """Return the bytes of a way beside one micro-batch or several; `unit`: parameters of its
    largest unit."""
    layout, near = base.precision.effective, way.near
    held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
    optimizer = optimizer_itemsize(base.optimizer, layout)
    fewer = inside(degrees, sizes.shared_by)
    lives, grads = [], []
    for own in (degrees, fewer):
        theta = 0.0 if way.is_made or not near[_THETA] else held / way.parts(_THETA, own)
        omega = optimizer / way.parts(_OMEGA, own) if near[_OMEGA] else 0.0
        lives.append(theta + omega)
        parts = way.parts(_GRADS, own)
        grads.append(layout.gradients.itemsize / parts if near[_GRADS] else 0.0)
    is_cut, is_flat = any(way.cut[_GRADS]), way.form is Form.FLAT
    late = float(reduced) if is_cut and way.is_late and is_many else 0.0
    whole = float(held) if way.is_brought else 0.0
    flying = reduced if is_cut and (not is_flat or way.overlaps) else 0
    if not is_cut and is_flat and layout.keeps_both:
        flying = reduced
    sums_copies = way.form in BY_TENSOR and not all(way.cut[_GRADS])
    return WayBytes(
        lives=lives[0],
        lives_of_experts=lives[1],
        grads=grads[0],
        grads_of_experts=grads[1],
        kept=max(late, grads[0]),
        kept_of_experts=max(late, grads[1]),
        whole=whole,
        ahead=whole * (not way.keeps_forward) * unit * (1 + way.ahead),
        opened=float(reduced if is_flat else held) if is_cut else 0.0,
        flying=float(flying),
        summed=reduced / way.parts(_GRADS, degrees) if sums_copies else 0.0,
        unit=unit,
        is_cast=layout.reduced is not layout.gradients,
        is_flat=is_flat,
        waits=way.is_late and is_many,
        is_late=way.is_late,
        keeps_forward=way.keeps_forward,
        keeps_backward=way.keeps_backward,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank of a pipeline has: `layers` on all of its `stages`, `own` on that of a pass, the
    `front` and the `behind` of the model, and so many chunks in flight, with gradients of all of
    its stages (`later`) and without (`chunks`); `ends` of them at one of these ends,
    `halved` of which the half of the weights is still to come."""

    layers: int
    own: int
    stages: int
    front: bool
    behind: bool
    is_staged: bool
    chunks: int
    later: int
    ends: float
    halved: int


class RankLevels:
    """Bytes of a rank's activations around its fullest backward passes, and what it has of the
    model, for micro-batches of some activity."""

    def __init__(self, rank: RankShare, sizes: Sizes, act: Activity) -> None:
        ends = act.ends_of(front=rank.front, behind=rank.behind)
        self.own, self.is_staged, self.block = rank.own, rank.is_staged, sizes.block
        self.head = rank.behind * (sizes.behind + rank.is_staged * sizes.copied)
        self.front = rank.front * sizes.front
        self.root = self.front + self.head
        self.blocks = rank.layers * sizes.block
        self.held = self.root + self.blocks
        self.experts = rank.layers * sizes.own_experts
        self.is_last = rank.behind
        per_chunk = act.block * rank.layers / rank.stages
        more = act.hidden * (not rank.behind) * rank.is_staged + ends.saved * rank.ends
        more += rank.halved * act.half * rank.layers / rank.stages
        if rank.behind:
            more += rank.halved * (ends.saved + ends.waiting)
        self.saved = rank.chunks * per_chunk + more
        self.later = rank.later * per_chunk + more
        self.act, self.ends = act, ends

    def peak(self, way: WayBytes, limit: float, *, is_many: bool) -> float:
        """Return the most bytes at once; of what is above the limit in any case no more than is
        always there."""
        own, others = self.experts, self.held - self.experts
        lives = way.lives * others + way.lives_of_experts * own
        most = max(self.saved, way.grads * others + way.grads_of_experts * own)
        if lives + most > limit:
            return lives + most
        if not is_many or self.later < self.saved:
            most = max(most, self._passing(way, self.saved, is_new=True))
        if is_many:
            kept = way.kept * others + way.kept_of_experts * own
            if lives + kept + self.later > limit:
                return lives + kept + self.later
            most = max(most, kept + self._passing(way, self.later, is_new=False))
        return lives + most

    def _passing(self, way: WayBytes, saved: float, *, is_new: bool) -> float:
        """Bytes at most in a backward pass and the forward pass before it."""
        act, ends, own, block = self.act, self.ends, self.own, self.block
        moves, released = not way.waits, way.whole * (not way.keeps_forward)
        is_done = way.is_flat and self.is_last
        root = 0.0 if is_done else way.opened * (self.front * way.is_flat + self.head)
        opened, flying = way.opened * way.unit, way.flying * way.unit
        first = opened + root + way.flying * is_done * self.head
        if way.waits and not is_new:
            first = 0.0
        if not moves:
            opened = flying = root = 0.0
        given = way.whole * (not way.keeps_backward)
        gone = given * is_done * self.head
        given *= way.keeps_forward * block
        again = way.is_cast or (not is_new and not way.is_late)
        summed = (own - 1) * (way.summed * block * again - given)
        new = way.kept * (own * block + self.root) if is_new else 0.0
        of_blocks = new - way.kept * self.front * is_new
        several = own > 1 and own * block > way.unit * 1.001
        deep = saved + ends.begun + act.backward_rise
        late = deep - (own - 1) * act.block
        done = deep - act.backward_rise - own * act.block + flying + new + summed - given
        tail = way.opened * moves * self.root
        level = max(
            saved + ends.backward_rise - released * self.root,
            saved - act.block + act.forward_rise + way.ahead,
            saved + ends.forward_rise,
            deep + way.ahead + first - gone,
            late + way.ahead + opened + root + several * flying + of_blocks + summed - gone,
            done + tail - gone,
            done + ends.end_rise + root - gone,
        )
        return level + way.whole * (self.root + self.blocks * way.keeps_forward)


def peak_of(ranks: Sequence[RankLevels], way: WayBytes, limit: float, *, is_many: bool) -> float:
    """Return the peak of the fullest rank, as far as it matters below the limit."""
    most = 0.0
    for rank in ranks:
        most = max(most, rank.peak(way, limit, is_many=is_many))
        if most > limit:
            break
    return most


# -- seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSeconds:
    """What is the same for all choices of the data axes: so many micro-batches, the `layers` and
    other parameters of the rank that computes most on its `stages`, the seconds that it computes
    and waits for activations (`moving`), and that its schedule leaves idle (`idle`), with passes of
    all other ranks where it is `serial`; `issued` by its host."""

    number: int
    layers: int
    stages: int
    root: int
    block: int
    root_added: float
    root_filled: float
    forward: float  # of a block
    backward: float
    computing: float
    moving: float
    idle: float
    issued: float


@dataclass(frozen=True)
class WaySeconds:
    """Seconds of a step by a choice of the data axes with degrees."""

    links: Links
    way: DataWay
    degrees: tuple[int, ...]
    unit: UnitSeconds
    tensors: int
    parts: int  # of Omega

    @cached_property
    def copied(self) -> float:
        """Of a parameter: state that is updated on the device goes there and back. How long a host
        takes for an update nobody measures: that is endless."""
        way, links = self.way, self.links
        if way.near[_OMEGA]:
            return 0.0
        layout = links.base.precision.effective
        parts = self.parts
        state = optimizer_itemsize(links.base.optimizer, layout) / parts
        seconds = state * links.there_and_back(Tier.FILE) if way.is_on_file else 0.0
        if way.is_copied_back:
            return seconds + state * links.there_and_back(Tier.HOST)
        held = layout.parameters.itemsize / parts
        return seconds + held * links.there_and_back(Tier.HOST) if links.is_nominal else inf

    def step(self, flow: FlowSeconds) -> float:
        """Return the seconds of a step."""
        way, unit, number = self.way, self.unit, flow.number
        units = flow.layers * unit.per_layer
        every = units + flow.root / unit.moved
        later = units - flow.stages
        gathers = 1 if way.keeps_backward else number
        again = 0 if way.keeps_forward else number
        reduces = 1 if way.is_late else number
        overlaps = way.overlaps and self.links.pace.overlaps
        is_ahead = overlaps and way.ahead > 0
        waits = (
            (gathers + again) * (unit.gather + unit.unpack) + reduces * (unit.reduce + unit.pack)
        ) * every + number * flow.moving
        is_flat = way.form is Form.FLAT
        if unit.add:
            waits += (number - 1 + is_flat) * (unit.add * units + flow.root_added)
        if is_flat:
            waits += reduces * (unit.fill * units + flow.root_filled)
        if overlaps:
            beside, apart = 0.0, reduces * unit.reduce
            if is_ahead:
                beside = gathers * min(unit.gather, flow.forward / unit.per_layer)
                apart += again * unit.gather
            room = max(again, reduces) * flow.backward / unit.per_layer
            waits -= later * (beside + min(apart, room))
        held = flow.layers * flow.block + flow.root
        elements = max(1, int(held / self.parts))
        number_of = units + 1 if is_flat else flow.layers * self.tensors
        update = self.links.update(elements, max(1, int(number_of)))
        copied = held * self.copied if not way.near[_OMEGA] else 0.0
        spread = unit.spread * every
        if way.gathers_beside and self.links.pace.overlaps:
            spread = max(unit.spread, spread - update)
        longer = 1 + waits / flow.computing if flow.computing else 1.0
        seconds = flow.computing + waits + flow.idle * longer
        seconds += update + copied + unit.finish * every + spread
        if flow.issued:
            sent = (gathers + again) * unit.issue_gather + reduces * unit.issue_reduce
            seconds = max(seconds, flow.issued + every * (sent + unit.issue_settled))
        return seconds
