"""Traffic of one steady step, call by call: the `exact` column of Theorem 2.

Theorem 2 as printed forgets that a rank which updates a part of what it stores must gather the
rest; here every collective that the plan's wrap issues is counted, with its padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Protocol, assert_never

from ptrain.axes.data.costs import (
    Gathers,
    bucket_caps,
    bucket_sizes,
    gathers,
    kept_ranks,
    padded_rows,
    reductions,
)
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, add_traffic
from ptrain.derivation.calls import group_over, reduce_scatter_calls
from ptrain.derivation.flat_rows import flat_sent, scalars
from ptrain.derivation.memory import owned, spread_buckets
from ptrain.facts.model import ModelFacts
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate

_INDEX_BYTES = 4  # DDP broadcasts bucket indices as int32


class Times(Protocol):
    """How often the root is gathered in a step, and how often any other unit."""

    def __call__(self, *, is_root: bool) -> Gathers: ...


def sent(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[Traffic, ...]:
    """What every rank sends: once (setup) and in each step."""
    return add_traffic((*wrapped(spec, plan, facts), *norm(spec, plan)))


def wrapped(
    spec: Spec, plan: Plan, facts: ModelFacts, times: Times | None = None
) -> Iterator[Traffic]:
    """What the wrap sends. `times`: how often a unit is gathered, where micro-batches do not go
    forward and backward one after the other."""
    match plan.wrap:
        case LocalGradients():
            return
        case Replicate():
            yield from _replicated(spec, plan, plan.wrap, facts)
        case FullyShard():
            sync, num_micro = plan.wrap.sync, plan.accumulate.micro_batches
            in_turn = partial(gathers, sync, num_micro)
            yield from _fully_sharded(spec, plan, plan.wrap, facts, times or in_turn)
        case FlatUnits():
            yield from flat_sent(spec, plan, plan.wrap, facts)
        case _:
            assert_never(plan.wrap)


def buckets(plan: Plan, wrap: Replicate, facts: ModelFacts) -> list[int]:
    """Bytes of the gradient buckets, in the order in which they are reduced."""
    itemsize = plan.update.layout.gradients.itemsize
    numel = {tensor.name: tensor.numel for tensor in facts.tensors}
    return bucket_sizes(
        (numel[name] * itemsize for name in facts.gradient_order),
        bucket_caps(wrap.bucket_bytes),
    )


def _replicated(spec: Spec, plan: Plan, wrap: Replicate, facts: ModelFacts) -> Iterator[Traffic]:
    group = group_over(spec, wrap.axes)
    sizes = buckets(plan, wrap, facts)
    for size, times in Counter(sizes).items():
        calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, times)
        yield calls.over(group, size)
    rebuild = Calls(Collective.BROADCAST, State.OTHER, Phase.SETUP)
    yield rebuild.over(group, _INDEX_BYTES * (len(facts.tensors) + 1))
    yield rebuild.over(group, _INDEX_BYTES * len(sizes))
    if wrap.zero_redundancy:
        updated = Calls(Collective.BROADCAST, State.PARAMETERS, Phase.UPDATE)
        for size in spread_buckets(plan.update.layout, owned(facts, group.ranks)):
            yield updated.over(group, size)


def _fully_sharded(
    spec: Spec, plan: Plan, wrap: FullyShard, facts: ModelFacts, gathered: Times
) -> Iterator[Traffic]:
    layout, num_micro = plan.update.layout, plan.accumulate.micro_batches
    shards, replicas = group_over(spec, wrap.shard_axes), group_over(spec, wrap.replicate_axes)
    for (padded, is_root), times in shard_sizes(facts, shards.ranks).items():
        payload = shards.ranks * padded * layout.parameters.itemsize
        kept = kept_ranks(wrap.sync, shards.ranks, is_root=is_root)
        yield from _gathers(gathered(is_root=is_root), times, shards, kept, payload)
        reduced = padded * layout.reduced.itemsize
        num = times * reductions(wrap.sync, num_micro)
        yield reduce_scatter_calls(wrap.reduce_scatter, Phase.BACKWARD, num).over(
            shards, shards.ranks * reduced
        )
        if wrap.replicate_axes:
            calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, num)
            yield calls.over(replicas, reduced)


def _gathers(
    times: Gathers, units: int, shards: Group, kept: int, payload: int
) -> Iterator[Traffic]:
    """Forward from all shards; backward from those of the group that kept the unit. One that stays
    whole after forward is gathered in backward where another micro-batch's has given it back."""
    between = Group(shards.axes, kept) if kept > 1 else shards
    for phase, num, group in (
        (Phase.FORWARD, times.forward, shards),
        (Phase.BACKWARD, times.backward, between),
    ):
        if num:
            calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, phase, units * num)
            yield calls.over(group, payload)


def shard_sizes(facts: ModelFacts, ranks: int) -> Counter[tuple[int, bool]]:
    """Elements of one rank's padded shard, and whether it is the root's -> number of units."""
    sizes: Counter[tuple[int, bool]] = Counter()
    units = Counter(
        (tuple(tensor.shape for tensor in unit.tensors), unit.is_root) for unit in facts.units
    )
    for (shapes, is_root), times in units.items():
        if shapes:
            sizes[sum(padded_rows(shape, ranks) for shape in shapes), is_root] += times
    return sizes


def norm(spec: Spec, plan: Plan) -> Iterator[Traffic]:
    """One scalar per axis: the square of the norm, of at least fp32, and of a scaled loss whether
    any gradient overflowed, in fp32; and their copies between tiers."""
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    if plan.clip is not None:
        scalar = max(4, plan.update.layout.gradients.itemsize)
        for axis in (*plan.clip.operator_axes, *plan.clip.axes):
            yield calls.over(group_over(spec, (axis,)), scalar)
    for axis in plan.update.scale_axes:
        yield calls.over(group_over(spec, (axis,)), DType.FP32.itemsize)
    if isinstance(plan.wrap, FlatUnits):
        yield from scalars(plan, plan.wrap)
