"""The options of DDP and FSDP2 in the prediction, computed by hand: traffic and memory of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ptrain.axes.data.cost import assign_owners, kept_ranks, padded_rows
from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import facts
from ptrain.spec.dials import (
    WHOLE_BUCKET,
    GradientSync,
    Overlap,
    Reshard,
    SyncPolicy,
    UnitKind,
    UnitSize,
)
from ptrain.spec.placement import Axis
from ptrain.spec.precision import LAYOUTS
from tests.pure.build import (
    BY_HAND,
    GATHERED,
    ODD_SHAPE,
    WHOLE,
    ZERO_1,
    make_facts,
    make_spec,
    tuple_of,
)

# Two blocks and a root; 5 x 3, 2, and 7 x 2 rows do not divide by 2 or 4, but 1 x 4 columns do.
BLOCK = ((5, 3), (2,))
FACTS = make_facts(BLOCK, BLOCK, ((1, 4), (7, 2)))
NUMEL = 2 * 17 + 18
MATERIALIZED = tuple_of("M,S,S")
SHARD, REPLICATE = Axis.DP_SHARD, Axis.DP_REPLICATE


def exact(axis: Axis, placement: Any, ranks: int = 2, **turned: Any) -> Estimate:
    """The exact column of units made by hand, with these fields of the spec."""
    spec = make_spec({axis: (ranks, placement)}, model=BY_HAND, clip=None)
    return derive(replace(spec, **turned), FACTS).exact


def traced_exact(placement: Any, ranks: int = 2, **turned: Any) -> Estimate:
    """The exact column of a built-in model, whose activations are known: with peaks."""
    spec = make_spec({SHARD: (ranks, placement)}, model=ODD_SHAPE, clip=None)
    shape_facts: ModelFacts = facts(ODD_SHAPE, spec.batch.sequence)
    return derive(replace(spec, **turned), shape_facts).exact


def rows(estimate: Estimate, kind: Collective, phase: Phase) -> tuple[int, int, int]:
    """(calls, payload, sent) of one kind of call in one phase."""
    found = [r for r in estimate.traffic if r.key.collective is kind and r.key.phase is phase]
    return (
        sum(row.calls for row in found),
        sum(row.payload_bytes for row in found),
        sum(row.sent_bytes for row in found),
    )


def peak(estimate: Estimate, phase: Phase) -> int:
    return max(row.device_bytes for row in estimate.peak if row.phase is phase)


# -- DDP


def test_a_bucket_per_tensor_or_one_for_all_moves_the_same_bytes():
    per_tensor = exact(REPLICATE, WHOLE, bucket_bytes=1)
    whole = exact(REPLICATE, WHOLE, bucket_bytes=WHOLE_BUCKET)
    reduced = Collective.ALL_REDUCE, Phase.BACKWARD
    assert rows(per_tensor, *reduced)[:2] == (6, 4 * NUMEL)
    assert rows(whole, *reduced)[:2] == (1, 4 * NUMEL)


def test_reductions_after_backward_have_the_traffic_of_overlapped_ones():
    beside, after = exact(REPLICATE, WHOLE), exact(REPLICATE, WHOLE, overlap=Overlap.NONE)
    assert beside.traffic == after.traffic


def test_the_largest_tensor_goes_first_each_to_the_rank_that_has_least():
    assert assign_owners([15, 2, 15, 2, 4, 14], 2) == [0, 1, 1, 1, 1, 0]  # 29 and 23
    assert assign_owners([7], 3) == [0]


def test_a_spread_update_is_sent_by_its_owners_and_keeps_whole_tensors():
    estimate = exact(REPLICATE, ZERO_1)
    owned = [15 + 14, 15 + 4 + 2 + 2]
    sent = [4 * numel // 2 for numel in owned]
    assert rows(estimate, Collective.BROADCAST, Phase.UPDATE) == (2, 4 * NUMEL, sum(sent))
    for rank, (numel, tensors) in enumerate(zip(owned, (2, 4), strict=True)):
        assert estimate.bytes_of(State.OPTIMIZER, rank) == 8 * numel + 4 * tensors
        assert estimate.bytes_of(State.PARAMETERS, rank) == 4 * NUMEL


def test_a_rank_that_owns_nothing_sends_one_element():
    estimate = exact(REPLICATE, ZERO_1, ranks=8)
    calls, payload, _ = rows(estimate, Collective.BROADCAST, Phase.UPDATE)
    assert (calls, payload) == (8, 4 * NUMEL + 2 * 4)
    assert [estimate.bytes_of(State.OPTIMIZER, rank) for rank in (6, 7)] == [0, 0]


# -- FSDP2


@pytest.mark.parametrize(
    ("after_forward", "ranks"), [(True, 8), (False, 1), (1, 1), (2, 2), (4, 4)]
)
def test_between_forward_and_backward_a_unit_is_spread_over(after_forward, ranks):
    assert kept_ranks(SyncPolicy(reshard_after_forward=after_forward), 8) == ranks


def test_a_smaller_group_sends_less_in_backward():
    estimate = exact(SHARD, GATHERED, 4, sync=SyncPolicy(reshard_after_forward=2))
    forward = rows(estimate, Collective.ALL_GATHER, Phase.FORWARD)
    backward = rows(estimate, Collective.ALL_GATHER, Phase.BACKWARD)
    assert forward[:2] == backward[:2]
    assert (forward[2], backward[2]) == (forward[1] * 3 // 4, backward[1] // 2)


def test_a_unit_kept_by_a_smaller_group_is_resident_between_forward_and_backward():
    kept = traced_exact(GATHERED, 4, sync=SyncPolicy(reshard_after_forward=2))
    resharded = traced_exact(GATHERED, 4)
    whole = traced_exact(GATHERED, 4, sync=SyncPolicy(reshard_after_forward=False))
    assert resharded.bytes_of(State.TRANSIENT) == 0
    assert kept.bytes_of(State.TRANSIENT) * 2 == whole.bytes_of(State.TRANSIENT)


@pytest.mark.parametrize("placement", [GATHERED, tuple_of("S*,S,R")], ids=["sharded", "flat"])
def test_zero_redundancy_gathers_every_unit_twice_except_the_resident_root(placement):
    sync = SyncPolicy(gradients=GradientSync.LAST)
    given_back = exact(SHARD, placement, sync=sync)
    but_the_root = replace(sync, reshard_after_forward=Reshard.NON_ROOT)
    stays = exact(SHARD, placement, sync=but_the_root)
    gathered = Collective.ALL_GATHER
    assert rows(stays, gathered, Phase.FORWARD) == rows(given_back, gathered, Phase.FORWARD)
    calls, payload, _ = rows(given_back, gathered, Phase.BACKWARD)
    root = payload - rows(stays, gathered, Phase.BACKWARD)[1]
    assert calls - rows(stays, gathered, Phase.BACKWARD)[0] == 1
    padded = 4 + (7 + 1) * 2 if placement is GATHERED else 4 + 7 * 2  # 1 x 4 and 7 x 2 rows
    assert root == 4 * padded
    assert any("the root, 18 of 52 parameters, is not freed" in note for note in stays.notes)
    assert not any("stays gathered" in note for note in given_back.notes)


def test_the_root_that_stays_is_the_transient_and_with_one_unit_non_root_is_false():
    non_root, kept = (
        SyncPolicy(reshard_after_forward=value) for value in (Reshard.NON_ROOT, False)
    )
    *_, root = facts(ODD_SHAPE, 16).units
    padded = sum(padded_rows(tensor.shape, 4) * 4 for tensor in root.tensors)
    assert traced_exact(GATHERED, 4, sync=non_root).bytes_of(State.TRANSIENT) == 4 * padded
    whole = {"unit": UnitSize(kind=UnitKind.MODEL)}
    only_root = make_facts(((5, 3), (2,)))
    spec = make_spec({SHARD: (2, GATHERED)}, model=BY_HAND, clip=None)
    one_unit = [
        derive(replace(spec, sync=sync, **whole), only_root).exact.traffic
        for sync in (non_root, kept)
    ]
    assert one_unit[0] == one_unit[1]


def test_masters_that_are_gathered_belong_to_the_optimizer():
    layout = LAYOUTS["fsdp-mixed"]
    spec = make_spec({SHARD: (2, MATERIALIZED)}, model=BY_HAND, clip=None, layout=layout)
    estimate = derive(spec, FACTS).exact
    padded = 2 * (9 + 1) + (2 + 8)  # of rank 0: 3 rows of 5, 1 of 2, 2 columns of 4, 4 rows of 7
    assert estimate.bytes_of(State.PARAMETERS) == 0
    assert estimate.bytes_of(State.OPTIMIZER, 0) == (4 + 8) * padded + 6 * 4
    assert estimate.bytes_of(State.GRADIENTS, 0) == 4 * padded
    gathered = rows(estimate, Collective.ALL_GATHER, Phase.FORWARD)
    reduced = rows(estimate, Collective.REDUCE_SCATTER, Phase.BACKWARD)
    assert gathered[:2] == (3, 2 * 2 * padded)
    assert reduced[:2] == (3, 2 * 2 * padded)


def test_gathering_ahead_costs_memory_and_moves_nothing_more():
    ahead = [traced_exact(GATHERED, prefetch=count) for count in (0, 1, 2)]
    assert ahead[0].traffic == ahead[1].traffic == ahead[2].traffic
    peaks = [peak(each, Phase.BACKWARD) for each in ahead]
    assert peaks == sorted(set(peaks))


def test_without_overlap_nothing_is_gathered_ahead_and_no_buffer_outlives_its_gather():
    awaited, own = traced_exact(GATHERED, overlap=Overlap.NONE), traced_exact(GATHERED)
    assert awaited.traffic == own.traffic
    assert peak(awaited, Phase.FORWARD) < peak(own, Phase.FORWARD)
    assert peak(awaited, Phase.BACKWARD) == peak(traced_exact(GATHERED, prefetch=0), Phase.BACKWARD)


def test_moments_in_another_dtype_are_cast_for_the_update_unit_by_unit():
    layout = replace(LAYOUTS["fp32"], moments=LAYOUTS["bf16"].moments)
    spec = make_spec({SHARD: (2, GATHERED)}, model=ODD_SHAPE, clip=None)
    shape_facts = facts(ODD_SHAPE, spec.batch.sequence)
    usual = derive(spec, shape_facts).exact
    narrow = derive(
        replace(spec, precision=replace(spec.precision, layout=layout)), shape_facts
    ).exact
    counters = 4 * len(shape_facts.tensors)
    saved = usual.bytes_of(State.OPTIMIZER, 0) - narrow.bytes_of(State.OPTIMIZER, 0)
    assert saved * 2 == usual.bytes_of(State.OPTIMIZER, 0) - counters
    rise = peak(narrow, Phase.UPDATE) - (peak(usual, Phase.UPDATE) - saved)
    largest = max(unit.numel for unit in shape_facts.units)
    assert 2 * 4 * largest // 2 <= rise <= 2 * 4 * (largest // 2 + 10**3)
