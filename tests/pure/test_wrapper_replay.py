"""The replay of torch's wrappers, compared with independent closed forms of memory and traffic."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from ptrain.axes.data.cost import (
    GatherCounts,
    count_gathers,
    count_reductions,
    kept_ranks,
    local_rows,
    padded_rows,
)
from ptrain.cost import Collective, Phase, State, add_traffic
from ptrain.derivation.ghosts.in_place import InPlace
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.ghosts.wrapping import WrapContext, by_shard
from ptrain.facts.model import ModelFacts
from ptrain.optimizers.ghost import muon_temporaries
from ptrain.plan.lower import lower
from ptrain.spec.dials import GradientSync, ReduceScatterVia, Reshard, SyncPolicy
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP32, LAYOUTS, ZERO16, DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FullyShard
from tests.pure.build import BY_HAND, GATHERED, WHOLE, ZERO_1, make_facts, make_spec, tuple_of
from tests.pure.replayed_steps import traffic_of_ranks

# Two blocks and a root, of which 4 ranks have unequal rows.
BLOCK = ((5, 3), (2,))
FACTS = make_facts(BLOCK, BLOCK, ((1, 4), (7, 2)))
RANKS = 4
FULLY = {Axis.DP_SHARD: (RANKS, GATHERED)}
HYBRID = {Axis.DP_REPLICATE: (3, WHOLE), Axis.DP_SHARD: (RANKS, GATHERED)}
POLICIES = [
    SyncPolicy(gradients=sync, reshard_after_forward=forward, reshard_after_backward=backward)
    for sync, forward, backward in product(
        GradientSync, (True, False, Reshard.NON_ROOT, 2), (True, False)
    )
]


def plan_spec(mesh, **options) -> tuple[Spec, Plan]:
    spec = make_spec(mesh, clip=None, model=BY_HAND, **options)
    return spec, lower(spec, FACTS)


def calls(spec: Spec, plan: Plan, facts: ModelFacts = FACTS) -> dict:
    """{(collective, state, phase): (calls, payload, sent)}."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (
            row.calls,
            row.payload_bytes,
            row.sent_bytes,
        )
        for row in traffic_of_ranks(make_wrapping(spec, plan, facts))
    }


def part_numel(shape: tuple[int, ...], sync: SyncPolicy) -> int:
    """Return the elements of a rank's part: of too few rows for all ranks an equal part along
    another dimension, unless a smaller group keeps rows."""
    is_divided = any(size % RANKS == 0 for size in shape[1:])
    if shape[0] < RANKS and is_divided and sync.reshard_after_forward != 2:
        return math.prod(shape) // RANKS
    return padded_rows(shape, RANKS)


def count_fsdp2_calls(step: FullyShard, layout, count: int) -> dict:
    """The same of FSDP2, by how often a unit is gathered and reduced, and how long its rows are."""
    totals: dict[tuple, Counter] = {}

    def call(collective, state, phase, times: int, payload: int, ranks: int) -> None:
        factor = 2 if collective is Collective.ALL_REDUCE else 1
        ring = math.ceil(factor * (ranks - 1) * payload / ranks)
        total = totals.setdefault((collective, state, phase), Counter())
        total.update(calls=times, payload=times * payload, sent=times * ring)

    for unit in FACTS.units:
        shard = sum(part_numel(tensor.shape, step.sync) for tensor in unit.tensors)
        times = count_gathers(step.sync, count, is_root=unit.is_root)
        between = kept_ranks(step.sync, RANKS, is_root=unit.is_root)
        whole, theta = RANKS * shard * layout.parameters.itemsize, State.PARAMETERS
        again = between if between > 1 else RANKS
        call(Collective.ALL_GATHER, theta, Phase.FORWARD, times.forward, whole, RANKS)
        call(Collective.ALL_GATHER, theta, Phase.BACKWARD, times.backward, whole, again)
        size, num = shard * layout.reduced.itemsize, count_reductions(step.sync, count)
        gradients, backward = State.GRADIENTS, Phase.BACKWARD
        call(Collective.REDUCE_SCATTER, gradients, backward, num, RANKS * size, RANKS)
        if step.replicate_axes:
            call(Collective.ALL_REDUCE, gradients, backward, num, size, 3)
    return {key: tuple(total.values()) for key, total in totals.items() if total["calls"]}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mesh", [FULLY, HYBRID], ids=["fully", "hybrid"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fsdp2_sends_as_often_as_its_policy_requires(mesh, policy: SyncPolicy, count: int):
    spec, plan = plan_spec(mesh, accumulate=count, sync=policy, layout=ZERO16)
    assert isinstance(plan.wrap, FullyShard)
    assert calls(spec, plan) == count_fsdp2_calls(plan.wrap, plan.update.layout, count)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_fsdp2_in_flight_sends_as_often_as_its_schedule_counts(policy: SyncPolicy):
    """Counts of one micro-batch after the other: then both are the same."""
    spec, plan = plan_spec(FULLY, accumulate=5, sync=policy)
    ghost = make_wrapping(spec, plan, FACTS)

    def times(sync: SyncPolicy, *, is_root: bool) -> GatherCounts:
        return count_gathers(sync, 5, is_root=is_root)

    assert add_traffic(ghost.traffic(times)) == add_traffic(ghost.traffic(None))


def test_a_reduction_by_exchange_names_the_replacement():
    spec, plan = plan_spec(FULLY, reduce_scatter=ReduceScatterVia.ALL_TO_ALL)
    told = {
        row.key.via
        for row in traffic_of_ranks(make_wrapping(spec, plan, FACTS))
        if row.key.state is State.GRADIENTS
    }
    assert told == {"all_to_all"}


@pytest.mark.parametrize("overlaps", [True, False])
def test_ddp_sends_each_bucket_once_during_or_after_backward(overlaps: bool):
    facts = replace(FACTS, gradient_order=tuple(t.name for t in FACTS.tensors)[::-1])
    spec, plan = plan_spec({Axis.DP_REPLICATE: (2, WHOLE)}, accumulate=3, bucket_bytes=70)
    plan = plan.replace_steps(replace(plan.wrap, overlaps=overlaps))
    # in bytes, as they arrive: 56 and 16; 8 and 60 and 8; 60 are left for the end
    whole = FACTS.numel * 4
    found = calls(spec, plan, facts)
    assert found[Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD] == (3, whole, whole)
    indices = 4 * (len(FACTS.tensors) + 1) + 4 * 3
    assert found[Collective.BROADCAST, State.OTHER, Phase.SETUP][:2] == (2, indices)


def test_zero_redundancy_keeps_and_broadcasts_a_bucket_of_each_owner():
    spec, plan = plan_spec({Axis.DP_REPLICATE: (RANKS, ZERO_1)})
    # the largest first, each to the rank that has least: 15, 15, 14, and 4 + 2 + 2
    owned, tensors = [15, 15, 14, 8], [1, 1, 1, 3]
    kinds, kind_of = by_shard(make_wrapping(spec, plan, FACTS))
    omega = [kinds[kind][1].device_bytes for kind in kind_of]
    assert omega == [8 * numel + 4 * count for numel, count in zip(owned, tensors, strict=True)]
    found = calls(spec, plan)[Collective.BROADCAST, State.PARAMETERS, Phase.UPDATE]
    assert found[:2] == (RANKS, 4 * sum(owned))


def test_an_owner_of_nothing_has_a_bucket_of_one_element():
    facts = make_facts(((6,),))
    spec, plan = plan_spec({Axis.DP_REPLICATE: (3, ZERO_1)})
    kinds, kind_of = by_shard(make_wrapping(spec, plan, facts))
    parameters, omega, gradients, _ = kinds[kind_of[2]]
    assert (parameters.device_bytes, omega.device_bytes) == (24 + 4 + 4, 0)
    assert gradients.device_bytes == 24


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_update_in_place_keeps_and_casts_the_layouts_states(layout, optimizer: str):
    spec, plan = plan_spec({}, layout=layout, optimizer=optimizer, momentum=0.9)
    moments = 2 if optimizer == "adamw" else 1
    update = InPlace(WrapContext(spec=spec, plan=plan, facts=FACTS))
    master = layout.master.itemsize if layout.master else 0
    kept = FACTS.numel * (moments * layout.moments.itemsize + master)
    counters = 4 * len(FACTS.tensors) if optimizer == "adamw" else 0
    assert update.optimizer_bytes(0) == kept + counters
    casts = (layout.gradients is not layout.update_dtype) + moments * (
        layout.moments is not layout.update_dtype
    )
    is_own = optimizer == "sgd" and layout.update_dtype.itemsize == 2
    scalars = 3 * 4 * is_own  # of ptrain's SGD with momentum
    rises = [unit.numel * casts * layout.update_dtype.itemsize + scalars for unit in FACTS.units]
    assert list(update.temporary_bytes(0)) == rises[1:], (
        "a block, which stands for both, and the root"
    )


@pytest.mark.parametrize("layout", [FP32, ZERO16], ids=lambda layout: layout.name)
def test_muon_works_in_place_on_a_matrix_at_a_time(layout):
    spec, plan = plan_spec({}, layout=layout, optimizer="muon")
    block = FACTS.units[0]
    casts = (layout.gradients is not layout.update_dtype) + 0
    temporaries = muon_temporaries((5, 3), DType.FP32, scaled=layout.scales_loss)
    update = InPlace(WrapContext(spec=spec, plan=plan, facts=FACTS))
    assert next(iter(update.temporary_bytes(0))) == casts * 4 * block.numel + temporaries


@pytest.mark.parametrize("shard", range(RANKS))
def test_the_shards_of_fsdp2_are_the_master_copies_of_materialized_parameters(shard: int):
    spec, plan = plan_spec({Axis.DP_SHARD: (RANKS, tuple_of("M,S,S"))}, layout=ZERO16)
    layout = replace(ZERO16, gradients=DType.FP32)
    step = FullyShard(
        shard_axes=(Axis.DP_SHARD,),
        replicate_axes=(),
        sync=SyncPolicy(),
        reduce_scatter=ReduceScatterVia.NATIVE,
        materialized=True,
    )
    plan = plan.replace_steps(step, replace(plan.update, layout=layout))
    kinds, kind_of = by_shard(make_wrapping(spec, plan, FACTS))
    parameters, omega, gradients, _ = kinds[kind_of[shard]]
    padded = sum(part_numel(tensor.shape, spec.sync) for tensor in FACTS.tensors)
    rows = sum(
        1 if tensor.shape == (1, RANKS) else local_rows(tensor.shape, RANKS, shard)
        for tensor in FACTS.tensors
    )
    assert parameters.device_bytes == 0
    assert omega.device_bytes == 4 * padded + 8 * rows + 4 * len(FACTS.tensors)
    assert gradients.device_bytes == 4 * padded
