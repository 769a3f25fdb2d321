"""Estimate bytes and seconds of a step from the figures of its parts.

States are parameters divided by the ranks that share them, and activations are summed over chunks
in flight. A step takes the compute time of the slowest rank, the idle time of its schedule, and the
communication that does not overlap. Short, wrapper-specific operations are left out: `derive`
replays the best candidates event by event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, prod

from ptrain.axes.candidates import AxisChoice, apply_choices
from ptrain.axes.data.form import (
    form_of,
    has_distribution,
    joins_units,
    reduces_in_backward,
    tier_of,
    units_ahead,
)
from ptrain.axes.pipeline.catalogue import make_schedule, size_of, stages_of
from ptrain.axes.pipeline.cost import PipelineSize
from ptrain.axes.pipeline.cost import stages_of as stages_of_rank
from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.axes.pipeline.simulate import equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import stage_layers
from ptrain.cost import Collective, State
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Layers
from ptrain.optimizers.update import optimizer_itemsize
from ptrain.selection.profile import Activity, Links, PassSums, Sizes
from ptrain.spec.cluster import Hook
from ptrain.spec.dials import GradientSync, UnitKind
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import CUT, Axis, Distribution, Tier
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import REPLICAS, Form
from ptrain.units import group_by_key

_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
_BESIDE = ("unit", "overlap", "prefetch", "bucket_bytes")
Mask = Sequence[bool]


class DataWay:
    """A choice of the data axes for any degrees, together with choices of other axes.

    Attributes:
        choice: The choice.
        spec: A spec with this choice and those of other axes, which affect the wrapper.
        form: The wrapper.
        cut: By state, which axes shard it.
        overlaps: Gradients are reduced during backward.
        ahead: Number of units that are all-gathered in advance.
        is_late: Gradients are reduced once per step.
        is_made: Parameters are cast from a master copy for use.
        is_brought: Parameters are all-gathered or copied for use.
        is_bucket: The bucket size decides which units are all-gathered or reduced together.
        keeps_forward: All-gathered parameters stay until the backward pass.
        keeps_backward: All-gathered parameters stay until the next micro-batch.
    """

    def __init__(self, base: Spec, choice: AxisChoice, beside: Sequence[AxisChoice]) -> None:
        spec = apply_choices(base, (choice, *beside))
        self.choice, self.spec, self.form = choice, spec, (form := form_of(spec))
        self.cut = {
            state: tuple(f.placement[state].distribution in CUT for f in choice.factors)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        self.is_made = has_distribution(choice.factors, _THETA, Distribution.MATERIALIZED)
        is_whole = not (self.is_made or any(self.cut[_THETA]))
        self.overlaps = reduces_in_backward(spec, form, keeps_parts=any(self.cut[_GRADS]))
        # FSDP2 prefetches one unit in backward by default. A rank with full parameters prefetches
        # nothing.
        ahead = (units_ahead(spec, form) or 0) if form is Form.FLAT else int(not is_whole)
        self.ahead = 0 if spec.unit_size.kind is UnitKind.MODEL else ahead
        self.is_late = spec.sync.gradients is GradientSync.LAST
        self.is_brought = not (is_whole and self.is_near(_THETA))
        self.is_bucket = form in REPLICAS or joins_units(spec, form)
        self.keeps_forward = self.is_brought and not spec.sync.reshard_after_forward
        self.keeps_backward = self.is_brought and not spec.sync.reshard_after_backward

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """The choice without the dials that the descent sets."""
        choice = self.choice
        changes = tuple((name, str(value)) for name, value in choice.changes if name not in _BESIDE)
        return tuple(factor.placement for factor in choice.factors), changes

    def is_near(self, state: State) -> bool:
        """Return True if a state is on the device."""
        return tier_of(self.choice.factors, state) is Tier.DEVICE

    def parts(self, state: State, degrees: Sequence[int]) -> int:
        """Return the number of shards of a state."""
        return prod(d for d, is_in in zip(degrees, self.cut[state], strict=True) if is_in)

    def layers_of_unit(self, sizes: Sizes) -> float:
        """Return the number of layers that are all-gathered or reduced together."""
        bucket = self.spec.bucket_bytes / self.spec.precision.effective_layout.reduced.itemsize
        if self.form in REPLICAS:
            # DDP fills buckets across blocks, so fractions of a block are right on average. Flat
            # units are joined block by block.
            return min(bucket / sizes.block, sizes.layers)
        if self.is_bucket:
            return min(max(1, bucket // sizes.block), sizes.layers)
        match (unit := self.spec.unit_size).kind:
            case UnitKind.MODEL:
                return sizes.layers
            case UnitKind.SUB_BLOCK:
                return 0.5
            case _:
                return unit.count or 1


def representatives(ways: Iterable[DataWay]) -> list[DataWay]:
    """Return the way with most overlap of each group that differs only in dials of the descent."""
    alike = group_by_key((way.kind, way) for way in ways)
    # The way with most overlap is a lower bound of the time of its group. The descent tries the
    # dials exactly, so nothing faster is lost by estimating the others with it.
    return [max(some, key=lambda way: (way.overlaps, way.ahead)) for some in alike.values()]


def inside(degrees: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the degrees for experts: the innermost axis divided by the `ranks` that share
    experts."""
    *outer, last = degrees or (1,)
    return (*outer, last // ranks) if degrees else ()


# -- bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBytes:
    """Bytes per parameter on a rank, in pairs for other parameters and for experts: parameters and
    optimizer state (`lives`), gradients after a step (`grads`) and between micro-batches (`kept`).
    `whole`: bytes per all-gathered parameter; `moving`: bytes of units that are all-gathered and
    reduced."""

    lives: tuple[float, float]
    grads: tuple[float, float]
    kept: tuple[float, float]
    whole: float
    moving: float
    keeps_forward: bool


def way_bytes(base: Spec, way: DataWay, degrees: tuple[int, ...], sizes: Sizes) -> WayBytes:
    """Return the bytes of a way with these degrees."""
    layout = base.precision.effective_layout
    held = sizes.stored_itemsize(layout.parameters.itemsize)
    reduced = layout.reduced.itemsize * sizes.trained_share
    optimizer = optimizer_itemsize(base.optimizer, layout) * sizes.trained_share
    lives, grads = [], []
    for own in (degrees, inside(degrees, sizes.shared_by)):
        has_theta = not way.is_made and way.is_near(_THETA)
        theta = held / way.parts(_THETA, own) if has_theta else 0.0
        omega = optimizer / way.parts(_OMEGA, own) if way.is_near(_OMEGA) else 0.0
        lives.append(theta + omega)
        parts = way.parts(_GRADS, own)
        kept = layout.gradients.itemsize * sizes.trained_share
        grads.append(kept / parts if way.is_near(_GRADS) else 0.0)
    is_cut = any(way.cut[_GRADS])
    late = float(reduced) if is_cut and way.is_late else 0.0
    whole = float(held) if way.is_brought else 0.0
    unit = way.layers_of_unit(sizes) * sizes.block
    # The unit in use and the prefetched ones are all-gathered at a time, next to one unit's full
    # gradient and the input of its reduction.
    moving = whole * (not way.keeps_forward) * (1 + way.ahead)
    moving += (layout.parameters.itemsize * sizes.trained_share + reduced * way.overlaps) * is_cut
    return WayBytes(
        lives=(lives[0], lives[1]),
        grads=(grads[0], grads[1]),
        kept=(max(late, grads[0]), max(late, grads[1])),
        whole=whole,
        moving=moving * unit,
        keeps_forward=way.keeps_forward,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The part of a model on a pipeline rank: `layers` on all of its `stages`, and the ends of the
    model that it has. `chunks`: chunks in flight at most; `later`: those in flight when gradients
    of all its stages exist; `waiting`: other micro-batches that wait at the end of a last stage."""

    layers: int
    stages: int
    front: bool
    behind: bool
    is_staged: bool
    chunks: int
    later: int
    waiting: int

    def root(self, sizes: Sizes) -> int:
        """Return the number of parameters outside of blocks."""
        head = sizes.behind + self.is_staged * sizes.copied
        return self.front * sizes.front + self.behind * head


def levels_of(
    shares: Iterable[RankShare], sizes: Sizes, act: Activity, micro: int, number: int
) -> Iterator[tuple[float, ...]]:
    """Yield the inputs of `peak` for each rank: parameter counts and bytes of activations."""
    for share in shares:
        layers = share.layers / share.stages
        chunk = micro * (act.block * layers + act.stage * share.is_staged)
        head = (act.at_last if share.is_staged else act.at_ends) * micro * share.behind
        own = share.layers * sizes.experts
        blocks, root = share.layers * sizes.block, share.root(sizes)
        head += act.head * micro * share.waiting
        # -inf: with a single micro-batch no pass runs next to earlier gradients
        later = share.later * chunk if number > 1 else -inf
        saved = share.chunks * chunk
        yield blocks + root - own, own, root, blocks, saved, later, micro * act.in_block, head


def peak(rank: tuple[float, ...], way: WayBytes) -> float:
    """Return the largest bytes of a rank at once: in the optimizer step, in the passes of the first
    micro-batch, or in later ones, which run with gradients of others allocated."""
    others, own, root, blocks, saved, later, in_block, head = rank
    lives = way.lives[0] * others + way.lives[1] * own
    grads = way.grads[0] * others + way.grads[1] * own
    kept = way.kept[0] * others + way.kept[1] * own
    used = max(in_block + way.moving, head)
    used += way.whole * (root + blocks * way.keeps_forward)
    return lives + max(grads, saved + used, kept + later + used)


# -- seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSeconds:
    """The figures that do not depend on the data axes: the `number` of micro-batches, and `layers`,
    `stages` and other parameters (`root`) of the rank that computes most. Seconds of a block's
    passes; per step of computing, of the bubble (`idle`) and of the host's launches
    (`issued`, 0 if never the limit)."""

    number: int
    layers: int
    stages: int
    root: int
    forward: float  # of a block
    backward: float
    computing: float
    idle: float
    issued: float


class WaySeconds:
    """The seconds of a step by a choice of the data axes with degrees; ranks of the innermost data
    axis are `within` ranks apart."""

    def __init__(
        self, links: Links, way: DataWay, degrees: tuple[int, ...], sizes: Sizes, within: int
    ) -> None:
        self.links, self.way, self.degrees, self.sizes = links, way, degrees, sizes
        layout = links.base.precision.effective_layout
        self.held = sizes.stored_itemsize(layout.parameters.itemsize)
        self.reduced = layout.reduced.itemsize * sizes.trained_share
        self.layers = way.layers_of_unit(sizes)
        self.unit = self.layers * sizes.block
        self.gather = self.reduce = self.spread = 0.0  # of a unit
        share = sizes.experts / sizes.block
        self._send(degrees, within, self.unit * (1 - share))
        if share:
            others = inside(degrees, sizes.shared_by)
            self._send(others, within * sizes.shared_by, self.unit * share)
        # Offloaded parameters are copied for each use, and gradients as they are reduced.
        if way.is_brought and not way.is_near(_THETA):
            self.gather += self._copy_seconds(_THETA, self.held)
        if not way.is_near(_GRADS):
            self.reduce += self._copy_seconds(
                _GRADS, layout.gradients.itemsize * sizes.trained_share
            )
        self._hook()

    def _copy_seconds(self, state: State, itemsize: float) -> float:
        """Return the seconds that a rank copies its part of a unit in one direction."""
        is_on_file = tier_of(self.way.choice.factors, state) is Tier.FILE
        tiers = (Tier.HOST, Tier.FILE) if is_on_file else (Tier.HOST,)
        seconds = sum(map(self.links.there_and_back, tiers)) / 2
        return seconds * itemsize * self.unit / self.way.parts(state, self.degrees)

    def _send(self, degrees: tuple[int, ...], within: int, size: float) -> None:
        """Add the communication for `size` parameters of a unit. Shards are reduced first, so
        replicas sum only a shard. Left out are sums that flat units make once per step."""
        way, held, reduced = self.way, self.held * size, self.reduced * size
        theta, omega, grads = (way.cut[state] for state in (_THETA, _OMEGA, _GRADS))
        if way.form is Form.LOCAL or not degrees:
            return
        # The mesh lists the outermost axis first. Ranks of an axis are apart by all ranks of the
        # axes inside of it, which decides how many nodes a group spans.
        strides = [within * prod(degrees[at + 1 :]) for at in range(len(degrees))]

        def over(collective: Collective, mask: Mask, size: float) -> float:
            at = [place for place in range(len(degrees)) if mask[place]]
            ranks = prod(degrees[place] for place in at)
            return self.links.seconds(collective, ranks, strides[at[-1]], size) if at else 0.0

        if way.is_brought:
            self.gather += over(Collective.ALL_GATHER, omega if way.is_made else theta, held)
        else:
            later = [o and not t for o, t in zip(omega, theta, strict=True)]
            self.spread += over(Collective.ALL_GATHER, later, held / way.parts(_THETA, degrees))
        is_flat = way.form is Form.FLAT and any(grads)
        shards = grads if is_flat else [o or g for o, g in zip(omega, grads, strict=True)]
        self.reduce += over(Collective.REDUCE_SCATTER, shards, reduced)
        if not is_flat:
            parts = prod(d for d, is_in in zip(degrees, shards, strict=True) if is_in)
            rest = [not is_in for is_in in shards]
            self.reduce += over(Collective.ALL_REDUCE, rest, reduced / parts)

    def _hook(self) -> None:
        """Add the time of hooks."""
        way, pace = self.way, self.links.pace
        is_flat = way.form is Form.FLAT
        gather = Hook.FLAT_GATHER if is_flat else Hook.FSDP2_GATHER
        reduce = Hook.FLAT_REDUCE if is_flat else Hook.FSDP2_REDUCE
        if way.form in REPLICAS:
            reduce = Hook.DDP_BUCKET
        is_sent = bool(self.degrees) and way.form is not Form.LOCAL
        self.hooks = (
            way.is_brought * pace.hook_seconds(gather),
            is_sent * pace.hook_seconds(reduce),
        )
        if not pace.overlaps:  # on CPU hooks run between operators, so their time adds up
            self.gather, self.reduce = self.gather + self.hooks[0], self.reduce + self.hooks[1]

    @cached_property
    def copied(self) -> float:
        """The seconds per parameter of copies between tiers in an update: of state there and back
        if the device updates it, else of parameters that come back."""
        way, links = self.way, self.links
        if way.is_near(_OMEGA):
            return 0.0
        layout, parts = links.base.precision.effective_layout, way.parts(_OMEGA, self.degrees)
        state = optimizer_itemsize(links.base.optimizer, layout) / parts
        is_on_file = tier_of(way.choice.factors, _OMEGA) is Tier.FILE
        seconds = state * links.there_and_back(Tier.FILE) if is_on_file else 0.0
        if way.spec.offload.update is Tier.DEVICE:
            return seconds + state * links.there_and_back(Tier.HOST)
        held = layout.parameters.itemsize / parts
        seconds += held * links.there_and_back(Tier.HOST)
        return seconds if links.is_nominal else seconds + links.host_update() / parts

    def step(self, flow: FlowSeconds) -> float:
        """Return the seconds of a step."""
        way, number, links, pace = self.way, flow.number, self.links, self.links.pace
        units = flow.layers / self.layers
        every = units + flow.root / self.unit
        gathers = 1 if way.keeps_backward else number
        again = 0 if way.keeps_forward else number
        reduces = 1 if way.is_late else number
        sent = (gathers + again) * self.gather + reduces * self.reduce
        waits = sent * every
        if way.overlaps and pace.overlaps:
            ahead = bool(way.ahead)
            beside = ahead * gathers * min(self.gather, flow.forward * self.layers)
            apart = reduces * self.reduce + ahead * again * self.gather
            room = max(again, reduces) * flow.backward * self.layers
            # a stage's first unit has no earlier compute to overlap with
            hidden = max(0.0, units - flow.stages) * (beside + min(apart, room))
            waits -= hidden / (1 + links.interference)
        held = flow.layers * self.sizes.block + flow.root
        tensors = units + 1 if way.form is Form.FLAT else flow.layers * self.sizes.tensors
        elements = int(held / way.parts(_OMEGA, self.degrees))
        update = links.update(max(1, elements), max(1, int(tensors)))
        seconds = flow.computing + waits + flow.idle + update + held * self.copied
        seconds += self.spread * every
        if not flow.issued:
            return seconds
        hooks = (gathers + again) * self.hooks[0] + reduces * self.hooks[1]
        hooks += (self.spread > 0) * pace.hook_seconds(Hook.FLAT_GATHER)
        # the root is one unit, however large, unless buckets decide
        calls = every if way.is_bucket else units + (flow.root > 0)
        return max(seconds, flow.issued + calls * hooks)


# Rounds of as many micro-batches as ranks, from which on more micro-batches add no idle time.
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlow:
    """A choice of the pipeline: ranks, stages per rank, and schedule (None for one rank)."""

    choice: AxisChoice
    ranks: int
    per_rank: int
    schedule: ScheduleName | None

    def size(self, micro_batches: int) -> PipelineSize:
        """Return the pipeline with this number of micro-batches; a single rank runs them one by
        one."""
        shape = PipelineShape(
            ranks=self.ranks, stages_per_rank=self.per_rank, microbatches=micro_batches
        )
        return size_of(self.schedule or ScheduleName.NAIVE, shape)


def flow_of(base: Spec, choice: AxisChoice) -> PipelineFlow:
    """Return the flow of a pipeline choice."""
    ranks = choice.degree(Axis.PP)
    if ranks == 1:
        return PipelineFlow(choice=choice, ranks=1, per_rank=1, schedule=None)
    said = apply_choices(base, (choice,)).pipeline
    assert isinstance(said.schedule, ScheduleName), "a schedule with a name"
    per_rank = said.stages_over(ranks) // ranks
    return PipelineFlow(choice=choice, ranks=ranks, per_rank=per_rank, schedule=said.schedule)


class PipelineFlows:
    """The flows of one model's candidates, with a cache of its splits into stages.

    `shares` returns the shares of ranks that differ: the first, the middle one with most layers,
    the last.
    """

    def __init__(self, base: Spec, facts: ModelFacts, links: Links) -> None:
        self.base, self.links = base, links
        self.layers: Layers = stage_layers(base, facts)
        self.shares, self.counts = cache(self._shares), cache(self._counts)

    def _shares(self, flow: PipelineFlow, number: int) -> tuple[RankShare, ...]:
        size, counts, shares = flow.size(number), self.counts(flow), dict[RankShare, None]()
        own = [stages_of_rank(size, rank) for rank in range(flow.ranks)]
        held = [sum(counts[stage] for stage in stages) for stages in own]
        middle = max(range(1, flow.ranks - 1), key=held.__getitem__, default=0)
        for rank in (0, middle, flow.ranks - 1):
            chunks, behind = size.cost.in_flight(size, rank), len(counts) - 1 in own[rank]
            is_all_first = chunks >= number * flow.per_rank  # all forwards, then all backwards
            share = RankShare(
                layers=held[rank],
                stages=flow.per_rank,
                front=0 in own[rank],
                behind=behind,
                is_staged=flow.schedule is not None,
                chunks=chunks,
                later=min(chunks, (number - 1) * flow.per_rank),
                waiting=(number - 1) * (behind and is_all_first),
            )
            shares[share] = None
        return tuple(shares)

    def _counts(self, flow: PipelineFlow) -> tuple[int, ...]:
        if flow.schedule is None:
            return (len(self.layers.layers),)
        cut = stages_of(apply_choices(self.base, (flow.choice,)), self.layers)
        return tuple(len(stage.layers) for stage in cut)

    def seconds(self, flow: PipelineFlow, number: int, sums: PassSums, sizes: Sizes) -> FlowSeconds:
        """Return the seconds of the rank that computes most, independent of the data axes."""
        shares = self.shares(flow, number)
        passes = [_passes(share, sums) for share in shares]
        busy = max(passes, key=lambda of_rank: of_rank[0] + of_rank[1])
        share = shares[passes.index(busy)]
        forward, backward, _ = busy
        hook = self.links.pace.hook_seconds(Hook.PIPELINE_PASS) * share.is_staged
        issued = number * (max(host for *_, host in passes) + 2 * share.stages * hook)
        return FlowSeconds(
            number=number,
            layers=share.layers,
            stages=share.stages,
            root=share.root(sizes),
            forward=sums.block[0],
            backward=sums.block[1],
            computing=number * (forward + backward),
            idle=self._idle(flow, number, sums, (forward, backward)),
            issued=issued * self.links.is_issued,
        )

    def _idle(
        self, flow: PipelineFlow, number: int, sums: PassSums, busy: tuple[float, float]
    ) -> float:
        """Return the seconds of a step that the rank with the longest wait is idle, by the
        literature's formulas for equal stages, scaled down if other stages are shorter. `busy`:
        forward and backward seconds per micro-batch on the busiest rank."""
        name, per_rank = flow.schedule, flow.per_rank
        if name is None or not any(busy):  # or no rates of operators are known
            return 0.0
        others = (
            len(self.layers.layers) * sum(sums.block[:2])
            + sum(sums.front[:2])
            + sum(sums.behind[:2])
        )
        others -= sum(busy)
        forward, backward = busy[0] / per_rank, busy[1] / per_rank
        share = sums.weights / sums.block[1] if sums.block[1] else 0.0
        weight = backward * share
        cost = StageCost(forward=forward, input=backward - weight, weight=weight)
        size = flow.size(number)
        form = size.cost.bubble(size, cost, 0)
        few = replace(size, microbatches=min(number, _ROUNDS * size.ranks))
        idle = _simulated(few) * (forward + backward) / 3 if form is None else form.idle
        return idle * min(1.0, others / ((flow.ranks - 1) * sum(busy)))


@cache
def _simulated(size: PipelineSize) -> float:
    """Return the idle time in thirds of a micro-batch's passes on a stage, for equal stages."""
    planned = make_schedule(size.schedule, size)
    makespan = simulate(planned, equal_stages(planned)).makespan
    return makespan - 3 * size.microbatches * size.stages_per_rank


def _passes(share: RankShare, sums: PassSums) -> tuple[float, ...]:
    """Return seconds per micro-batch: forward, backward, and the host's launches."""
    parts = zip(sums.block, sums.front, sums.behind, strict=True)
    return tuple(share.layers * a + share.front * b + share.behind * c for a, b, c in parts)
