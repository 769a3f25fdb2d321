"""What a micro-batch takes of one rank, layer by layer, as a search adds it up: bytes, read off the
committed tables, and seconds, by the rates of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ptrain.axes.expert.cost import rows_bytes
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.costs import Collective
from ptrain.derivation.activation_moves import COPIES
from ptrain.derivation.clock import Clock
from ptrain.derivation.network import Network
from ptrain.derivation.tensor import local_units
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.facts.operators import LayerWork, ModelWork, PassWork
from ptrain.facts.parameters import is_of_experts
from ptrain.facts.stages import FRONT, is_within
from ptrain.plan.lower import lower
from ptrain.rates.pace import Pace, around
from ptrain.selection.issuing import IssueSeconds, issue_seconds
from ptrain.selection.space import without_experts
from ptrain.spec.activations import PLAIN, Kept, Scope
from ptrain.spec.axis import EXPERT_AXES, Axis
from ptrain.spec.layout import ranks_over
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters of one rank's part of the model: of a block, of each of its `tensors`, in front of
    the blocks and behind them; `copied` those in front that a last stage has too. `experts`: of a
    block those that no other rank along an axis of experts has, which has `shared_by` ranks."""

    block: int
    largest_part: int  # of a block's sub-blocks
    front: int
    behind: int
    copied: int
    tensors: tuple[int, ...]
    experts: int = 0
    shared_by: int = 1

    @property
    def own_experts(self) -> int:
        """Return the same where other ranks have others, else none."""
        return self.experts if self.shared_by > 1 else 0


def sizes_of(spec: Spec, facts: ModelFacts) -> Sizes:
    """Return the sizes of the largest part that a rank of the axes within a block has. `facts` are
    of units of one block."""
    ranks = prod(spec.degree(axis) for axis in EXPERT_AXES)
    spec = without_experts(spec)
    plan = lower(spec, facts)
    units: Sequence[UnitFacts] = facts.units
    if plan.tensor is not None:
        units = local_units(facts, plan.tensor, spec.degree(plan.tensor.axis))[0][0]
    *blocks, root = units
    block = max(blocks, key=lambda unit: unit.numel)
    front = sum(t.numel for t in root.tensors if is_within(t.name, FRONT))
    tied = dict(chain_of(spec, facts).tied)
    parts: dict[str, int] = {}
    tensors = {
        t.name: t.numel // ranks if is_of_experts(t.name) else t.numel for t in block.tensors
    }
    for name, size in tensors.items():
        part = ".".join(name.split(".")[:3])
        parts[part] = parts.get(part, 0) + size
    return Sizes(
        block=sum(tensors.values()),
        largest_part=max(parts.values()),
        front=front,
        behind=root.numel - front,
        copied=sum(t.numel for t in root.tensors if t.name in tied),
        tensors=tuple(tensors.values()),
        experts=sum(size for name, size in tensors.items() if is_of_experts(name)),
        shared_by=ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a micro-batch on one rank, forward and backward: in front of the blocks, of a block, and
    behind them; what the axes within a block send is in them. `weights`: of a block's backward, the
    part that is of weights alone. Of a schedule in halves a backward pass takes as long as one that
    is whole: on processors, whose halves are recorded apart, `exact` has another rate of the host's
    for these (`Hook.HALVES_OPERATOR`), and a search only for `weights`. `moved`: in which a block's
    activations leave the device and come back, on lanes of their own. `issuing` are a host's that
    runs ahead, with backward passes that are whole and with such that are halves."""

    front: tuple[float, float]
    block: tuple[float, float]
    behind: tuple[float, float]
    weights: float
    moved: tuple[float, float] = (0.0, 0.0)
    issuing: tuple[IssueSeconds, IssueSeconds] | None = None

    def after(self, forward: float, backward: float) -> Seconds:
        """Return those of blocks that besides wait so long."""
        there, back = self.block
        return replace(self, block=(there + forward, back + backward))


def exchange_seconds(spec: Spec, shape: ModelShape, pace: Pace, kept: Kept) -> tuple[float, float]:
    """Return for how long a block waits, forward and backward, for rows that go to experts of other
    ranks and come back; what is computed again sends again."""
    ranks, inside = ranks_over(spec, spec.expert_axes), spec.degree(Axis.TP)
    if spec.degree(Axis.EP) == 1:
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
    """Return the clock of a spec with axes within a block alone, which asks for a pass once."""
    shared = Axis.TP if spec.degree(Axis.TP) > 1 else None
    return Clock(pace, Network(spec), shared)


def seconds_of(
    spec: Spec, work: ModelWork, clock: Clock, moved: int, *, is_issued: bool
) -> Seconds:
    """Return the seconds by its clock for the work of a spec with axes within a block alone, of
    which a block moves so many bytes off the device; `is_issued`: those of its host, too."""
    middle = len(work.layers) // 2
    layer, kept = work.layers[middle], spec.activations.of(len(work.layers))[middle]
    out, back = (
        clock.pace.copy_seconds(copy, moved) if moved else 0.0
        for copy in COPIES[Tier.HOST if kept.tier is Tier.DEVICE else kept.tier]
    )
    forward, backward = _both(clock, layer, kept)
    if kept.tier is Tier.FILE:  # which is written and read by the one that computes
        forward, backward, out, back = forward + out, backward + back, 0.0, 0.0
    return Seconds(
        front=_both(clock, work.front, PLAIN),
        block=(forward, backward),
        behind=_both(clock, work.behind, PLAIN),
        weights=_seconds(clock, layer.weights, around(kept, Kind.WEIGHT)),
        moved=(out, back),
        issuing=issue_seconds(clock, work, kept) if is_issued else None,
    )


def _both(clock: Clock, work: LayerWork, kept: Kept) -> tuple[float, float]:
    return (
        _seconds(clock, work.forward, around(kept, Kind.FORWARD)),
        _seconds(clock, work.backward, around(kept, Kind.BACKWARD)),
    )


def _seconds(clock: Clock, work: PassWork, hook: Hook) -> float:
    """Operators one after the other, and what they await of the ranks that share them."""
    return clock.pass_seconds(work, hook).in_a_row(clock.pace)


def nodes_of(spec: Spec, ranks: int, stride: int = 1) -> int:
    """Return on how many nodes a group of so many ranks is, each `stride` behind the one before."""
    cluster = spec.cluster
    if cluster is None:
        return 1
    on_node = max(1, cluster.devices_per_node // stride)
    return max(1, -(-ranks // on_node))
