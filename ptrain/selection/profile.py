"""Figures of a micro-batch on one rank, from which a search computes its estimates.

These are parameters of a block and of both ends, bytes of activations by the engine of `ptrain
predict` on models of a few layers, and seconds by the clock of that engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from ptrain.axes.candidates import AxisChoice, apply_choices
from ptrain.axes.expert.cost import rows_bytes
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.derivation.clock import Clock
from ptrain.derivation.estimate import fullest_alone
from ptrain.derivation.interconnect import Network, host_seconds
from ptrain.derivation.tape import COPIES
from ptrain.derivation.tensor import local_units
from ptrain.facts.model import LayerWork, ModelFacts, ModelWork, UnitFacts
from ptrain.facts.parameters import is_of_experts
from ptrain.facts.stages import FRONT, is_within
from ptrain.plan.lower import built_in_facts, lower
from ptrain.rates.pace import Pace, UnknownRate, operator_hook
from ptrain.selection.space import STAGES, kept_so, without_experts
from ptrain.spec.activations import PLAIN, ActivationMode, Scope
from ptrain.spec.cluster import Hook
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import PipelineSpec, ScheduleName, SplitBy
from ptrain.spec.placement import EXPERT_AXES, Axis, Factor, Tier
from ptrain.spec.spec import Spec, ranks_over
from ptrain.timeline import Kind

# -- parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameter counts of one rank's part of the model.

    Attributes:
        layers: Number of blocks.
        block: Parameters of a block.
        tensors: Tensors of a block.
        front: Parameters before the blocks.
        behind: Parameters after the blocks.
        copied: Tied parameters that a last stage holds a copy of.
        experts: Parameters of a block on only one of `shared_by` ranks.
        shared_by: Number of ranks over which experts are sharded.
        trained_share: Share of a block's parameters that is trained.
        quantized_share: Share of a block's parameters that is bytes of quantized weights.
    """

    layers: int
    block: int
    tensors: int
    front: int
    behind: int
    copied: int
    experts: int = 0
    shared_by: int = 1
    trained_share: float = 1.0
    quantized_share: float = 0.0

    def stored_itemsize(self, itemsize: int) -> float:
        """Return the mean bytes of a stored parameter; without quantization it has `itemsize`."""
        return itemsize + (1 - itemsize) * self.quantized_share


def sizes_of(spec: Spec, facts: ModelFacts) -> Sizes:
    """Return the sizes of the largest part on a rank; units of `facts` are single blocks."""
    ranks = ranks_over(spec, EXPERT_AXES)
    spec = without_experts(spec)
    plan = lower(spec, facts)
    units: Sequence[UnitFacts] = facts.units
    if plan.tensor is not None:
        units = local_units(facts, plan.tensor, spec.degree(plan.tensor.axis))[0][0]
    *blocks, root = units
    block = max(blocks, key=lambda unit: unit.numel)
    experts = sum(t.numel for t in block.tensors if is_of_experts(t.name))
    front = sum(t.numel for t in root.tensors if is_within(t.name, FRONT))
    tied = dict(chain_of(spec, facts).tied)
    return Sizes(
        layers=len(blocks),
        block=block.numel - experts + experts // ranks,
        tensors=len(block.tensors),
        front=front,
        behind=root.numel - front,
        copied=sum(t.numel for t in root.tensors if t.name in tied),
        experts=experts // ranks if ranks > 1 else 0,
        shared_by=ranks,
        trained_share=block.trained_numel / block.numel,
        quantized_share=block.quantized_numel / block.numel,
    )


# -- activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Bytes of a sample's activations.

    Attributes:
        block: Saved by a block.
        stage: Saved by a stage, beyond its blocks.
        head: Saved by the head of a last stage for each waiting backward pass.
        in_block: Additionally in use in a block at most.
        at_last: Additionally in use at the head of a last stage at most.
        at_ends: Additionally in use at the ends of an unstaged model at most.
    """

    block: float
    stage: float
    head: float
    in_block: float
    at_last: float
    at_ends: float


_RESIDENT = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.OTHER)
_RANKS = 4  # a first, two middle ones with three and with two chunks in flight, and a last one
_MICRO_BATCHES = 2 * _RANKS
# Layers of two models. With fewer layers the head or the gradient of the embedding would set the
# peak if sharded and recomputed blocks keep little; that gradient does not grow with micro-batches.
_FEW, _MANY = 256, 512


def _in_stages(schedule: ScheduleName) -> AxisChoice:
    """Return a pipeline of four stages, split by layers."""
    return AxisChoice(
        factors=(Factor(axis=Axis.PP, degree=_RANKS, placement=STAGES),),
        changes=(("pipeline", PipelineSpec(schedule=schedule, split=SplitBy.LAYERS)),),
    )


_STAGED, _ALL_FIRST = _in_stages(ScheduleName.ONE_F_ONE_B), _in_stages(ScheduleName.GPIPE)


def activity_of(spec: Spec, kept: ActivationMode) -> Activity | None:
    """Return the bytes of activations, from predicted peaks; None if no peaks are predicted.

    Two models with different numbers of layers, whose blocks set the peak, give the bytes of a
    block. A pipeline of four ranks with one layer each gives the bytes of stages, if its peaks are
    predicted. `spec` has only axes within a block.
    """
    few, many = (_predicted(spec, kept, None, layers) for layers in (_FEW, _MANY))
    if not (few.peak and many.peak):
        return None
    # Peaks are linear in the number of layers once blocks set the peak. The difference of two
    # models has the bytes of a block without those of the ends.
    block = (_in_use(many, 0) - _in_use(few, 0)) / (_MANY - _FEW)
    ends = max(0.0, _in_use(many, 0) - _MANY * block)
    alone = Activity(
        block=block,
        stage=0.0,
        head=0.0,
        in_block=ends,
        at_last=ends,
        at_ends=ends,
    )
    staged = _predicted(spec, kept, _STAGED, _RANKS)
    if not staged.peak:
        return alone
    # 1F1B keeps one chunk less on each following rank. Ranks between the ends differ in nothing
    # else, so their difference is the bytes of a chunk.
    second, third, last = (_in_use(staged, stage * spec.world_size) for stage in range(1, _RANKS))
    waiting = _in_use(_predicted(spec, kept, _ALL_FIRST, _RANKS), (_RANKS - 1) * spec.world_size)
    chunk = max(block, float(second - third))
    return replace(
        alone,
        stage=chunk - block,
        # GPipe runs all forwards first: on the last rank every micro-batch then waits with its
        # head's tensors. 1F1B has one there.
        head=max(0.0, (waiting - last) / (_MICRO_BATCHES - 1) - chunk),
        in_block=max(0.0, second - (_RANKS - 1) * chunk),
        at_last=max(0.0, last - chunk),
    )


def _predicted(
    spec: Spec, kept: ActivationMode, staged: AxisChoice | None, layers: int
) -> Estimate:
    """Return the exact estimate of a model with `layers` layers and micro-batches of one sample."""
    assert isinstance(spec.model, ModelShape), "a built-in model"
    inner = AxisChoice(factors=spec.factors, changes=(("context", spec.context),))
    samples = _MICRO_BATCHES * spec.data_degree
    batch = replace(spec.batch, micro=1, accumulate=_MICRO_BATCHES, global_samples=samples)
    small = kept_so(apply_choices(spec, filter(None, (inner, staged)), batch), kept)
    small = small.with_fields(model=replace(spec.model, layers=layers))
    return fullest_alone(small, built_in_facts(small))


def _in_use(estimate: Estimate, rank: int) -> int:
    """Return the peak bytes of a rank's passes without the states of its stages."""
    states = sum(estimate.bytes_of(state, rank) for state in _RESIDENT)
    passes = (Phase.FORWARD, Phase.BACKWARD)
    rows = (row for row in estimate.peak if row.rank == rank and row.phase in passes)
    return max(row.device_bytes for row in rows) - states


# -- seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSums:
    """Seconds of a micro-batch on one rank: (forward, backward, host launches) of each part.

    Attributes:
        front: Before the blocks.
        block: Of a block.
        behind: After the blocks.
        weights: Part of a block's backward pass for weights only.
    """

    front: tuple[float, float, float]
    block: tuple[float, float, float]
    behind: tuple[float, float, float]
    weights: float


def seconds_of(spec: Spec, work: ModelWork, clock: Clock) -> PassSums:
    """Return the seconds of a spec's computation by a clock.

    Args:
        spec: A spec with only axes within a block.
        work: Its computation.
        clock: Its clock.
    """
    # A middle layer: the first and the last ones may have other kinds, such as dense layers before
    # experts.
    middle = len(work.layers) // 2
    layer, kept = work.layers[middle], spec.activations.block_modes(len(work.layers))[middle]
    weights = clock.pass_seconds(layer.weights, operator_hook(kept, Kind.WEIGHT))
    return PassSums(
        front=_passes(clock, work.front, PLAIN),
        block=_passes(clock, layer, kept),
        behind=_passes(clock, work.behind, PLAIN),
        weights=weights.in_a_row(clock.pace),
    )


def _passes(clock: Clock, work: LayerWork, kept: ActivationMode) -> tuple[float, float, float]:
    forward, backward = (
        clock.pass_seconds(passes, operator_hook(kept, kind))
        for kind, passes in ((Kind.FORWARD, work.forward), (Kind.BACKWARD, work.backward))
    )
    host = forward.on_host + backward.on_host
    return forward.in_a_row(clock.pace), backward.in_a_row(clock.pace), host


def exchange_seconds(spec: Spec, pace: Pace, kept: ActivationMode) -> tuple[float, float]:
    """Return the seconds, forward and backward, that a block waits for rows of experts on other
    ranks.

    Recomputed blocks exchange rows again.
    """
    ranks, inside, shape = ranks_over(spec, spec.expert_axes), spec.degree(Axis.TP), spec.model
    if spec.degree(Axis.EP) == 1 or not isinstance(shape, ModelShape):
        return 0.0, 0.0
    once = pace.collective_seconds(
        Collective.ALL_TO_ALL,
        ranks=ranks,
        nodes=nodes_of(spec, ranks, 1 if spec.tensor.is_folded else inside),
        payload=rows_bytes(spec, shape),
    )
    again = kept.policy is not None and kept.policy.scope is Scope.BLOCK
    return _TRIPS * once, _TRIPS * once * (1 + again)


_TRIPS = 2  # of rows: to their experts, and back


def clock_of(spec: Spec, pace: Pace) -> Clock:
    """Return the clock of a spec with only axes within a block, which caches passes."""
    return Clock(pace, Network(spec), Axis.TP if spec.degree(Axis.TP) > 1 else None)


def nodes_of(spec: Spec, ranks: int, stride: int = 1) -> int:
    """Return the number of nodes of a group of `ranks` ranks that are `stride` apart."""
    if (cluster := spec.cluster) is None:
        return 1
    # Ranks that are `stride` apart share a node only with every stride-th of its devices.
    on_node = max(1, cluster.devices_per_node // stride)
    return max(1, -(-ranks // on_node))


_COPIED = 2**24  # bytes of a copy from which the rate is read: at 16 MiB latency is negligible


class Links:
    """Cached seconds of collectives, copies and updates on a cluster.

    `is_nominal`: the rates are declared, not measured.
    """

    def __init__(self, base: Spec, pace: Pace, devices: int, *, is_nominal: bool = False) -> None:
        self.base, self.pace, self.is_nominal = base, pace, is_nominal
        self.devices = devices
        # launch times matter only if devices run asynchronously and hooks have measured times
        self.is_issued = pace.overlaps and any(pace.hook_seconds(hook) for hook in Hook)
        self._collectives = cache(pace.collective_seconds)
        layout = base.precision.effective_layout
        update = partial(pace.update_seconds, base.optimizer.name, layout)
        self.update = cache(lambda number, tensors: update(elements=number, tensors=tensors))

    def seconds(self, collective: Collective, ranks: int, stride: int, payload: float) -> float:
        """Return the seconds of a collective over ranks that are `stride` apart; `payload` in
        bytes."""
        if ranks == 1 or not payload:
            return 0.0
        nodes = nodes_of(self.base, ranks, stride)
        return self._collectives(collective, ranks=ranks, nodes=nodes, payload=int(payload))

    @property
    def interference(self) -> float:
        """The relative slowdown of compute while a collective runs."""
        cluster = self.base.cluster
        return cluster.slowdown_beside_collectives if cluster and not self.is_nominal else 0.0

    def host_update(self) -> float:
        """Return the seconds of a host to update one element; infinite if unknown."""
        cluster, row = self.base.cluster, self.base.optimizer.properties
        size = (
            3 + 2 * len(row.moments)
        ) * self.base.precision.effective_layout.update_dtype.itemsize
        try:
            ranks = min(self.devices, cluster.devices_per_node) if cluster else 1
            return host_seconds(cluster, size, ranks)
        except UnknownRate:
            return float("inf")

    def there_and_back(self, tier: Tier) -> float:
        """Return the seconds per byte to copy to a tier and back; infinite if unknown."""
        try:
            return sum(self.pace.copy_seconds(copy, _COPIED) for copy in COPIES[tier]) / _COPIED
        except UnknownRate:
            return float("inf")
