"""The exact column compared with hand-written arithmetic and torch's sharding."""

from __future__ import annotations

import time

import pytest
import torch

from ptrain.cost import Collective, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.spec.dials import GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.placement import Axis
from ptrain.spec.precision import FP32, ZERO16
from tests.pure.build import (
    BY_HAND,
    GATHERED,
    WHOLE,
    ZERO_1,
    ZERO_2,
    make_facts,
    make_spec,
    tuple_of,
)

# Two blocks and a root; 5 x 3, 2, 1 and 7 x 2 rows do not divide by 2 or 4.
BLOCK = ((5, 3), (2,))
FACTS = make_facts(BLOCK, BLOCK, ((1, 4), (7, 2)), buffers=(("table", 24),))
NUMEL = 2 * 17 + 18
FLAT_2 = 18 + 18 + 18  # 17 -> 18 for 2 ranks

TWO_BY_TWO = (Axis.DP_REPLICATE, Axis.DP_SHARD)


def exact(placement, ranks=2, facts=FACTS, **options):
    return derive(
        make_spec({Axis.DP_SHARD: (ranks, placement)}, **options, model=BY_HAND), facts
    ).exact


def on_both(outer, inner, **options):
    mesh = dict(zip(TWO_BY_TWO, ((2, outer), (2, inner)), strict=True))
    return derive(make_spec(mesh, **options, model=BY_HAND), FACTS).exact


def calls(estimate, *, axes=None):
    """{(collective, state, phase): (calls, payload)} of steady rows, without the norm's scalar."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (row.calls, row.payload_bytes)
        for row in estimate.traffic
        if row.key.phase is not Phase.SETUP
        if row.payload_bytes > 8 and axes in (None, row.key.axes)
    }


AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
THETA, OMEGA, G, OTHER = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.OTHER
FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


@pytest.mark.parametrize("mesh", [{}, {Axis.DP_SHARD: (2, WHOLE)}], ids=["one", "replicated"])
def test_everything_whole_holds_every_element_on_every_rank(mesh):
    held = derive(make_spec(mesh, model=BY_HAND), FACTS).exact
    assert held.bytes_of(THETA) == held.bytes_of(G) == 4 * NUMEL
    assert held.bytes_of(OMEGA) == 8 * NUMEL + 4 * 6  # a step counter per tensor


def test_one_device_sends_nothing():
    assert derive(make_spec({}, model=BY_HAND), FACTS).exact.traffic == ()


def test_the_rest_is_buffers_the_tokens_of_a_step_and_its_loss():
    held = exact(WHOLE, accumulate=3, micro=2, sequence=16)
    assert held.bytes_of(OTHER) == 24 + 3 * 2 * 17 * 8 + 4
    assert exact(WHOLE, compute_fp64=True).bytes_of(OTHER) == 48 + 2 * 17 * 8 + 8


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", [FP32, ZERO16], ids=lambda layout: layout.name)
def test_rows_are_cut_as_torch_chunk_cuts_them(ranks, layout):
    held = exact(GATHERED, ranks, layout=layout)
    itemsize = layout.parameters.itemsize
    for rank in range(ranks):
        padded = real = 0
        for tensor in FACTS.tensors:
            few = tensor.shape[0] < ranks  # then along the first later dimension that divides
            later = [
                dim for dim, size in enumerate(tensor.shape) if few and dim and not size % ranks
            ]
            chunks = torch.chunk(torch.empty(tensor.shape), ranks, dim=[*later, 0][0])
            padded += chunks[0].numel()
            real += chunks[rank].numel() if rank < len(chunks) else 0
        assert held.bytes_of(THETA, rank) == held.bytes_of(G, rank) == padded * itemsize
        per_element = 12 if layout is ZERO16 else 8
        assert held.bytes_of(OMEGA, rank) == per_element * real + 4 * 6


def test_a_rank_with_empty_shards_still_counts_their_steps():
    held = exact(GATHERED, 4, facts=make_facts(((2,), (5,))))
    assert [held.bytes_of(OMEGA, rank) for rank in range(4)] == [8 * 3 + 8, 8 * 3 + 8, 8 + 8, 8]


@pytest.mark.parametrize(
    ("sync", "forward", "backward", "reduced"),
    [
        (SyncPolicy(), 20, 20, 20),
        (SyncPolicy(gradients=GradientSync.LAST), 20, 20, 5),
        (SyncPolicy(gradients=GradientSync.LAST, reshard_after_backward=False), 5, 20, 5),
        (SyncPolicy(gradients=GradientSync.LAST, reshard_after_forward=False), 20, 0, 5),
        (
            SyncPolicy(
                gradients=GradientSync.LAST,
                reshard_after_forward=False,
                reshard_after_backward=False,
            ),
            5,
            0,
            5,
        ),
    ],
    ids=["3K", "2K+1", "K+2", "K+1", "2"],
)
@pytest.mark.parametrize("placement", [GATHERED, tuple_of("S*,R,S")], ids=["sharded", "flat"])
def test_calls_of_5_units_and_4_micro_batches(placement, sync, forward, backward, reduced):
    facts = make_facts(*[((4, 3),)] * 5)
    held = exact(placement, facts=facts, sync=sync, accumulate=4)
    rows = calls(held)
    assert rows[AG, THETA, FORWARD] == (forward, forward * 48)
    assert rows.get((AG, THETA, BACKWARD), (0, 0)) == (backward, backward * 48)
    assert rows[RS, G, BACKWARD] == (reduced, reduced * 48)


def test_gathers_and_reductions_move_the_padding_too():
    rows = calls(exact(GATHERED, layout=ZERO16))
    # rows per rank: 3 x 3 + 1 = 10, twice; half of 1 x 4, and 4 x 2; of 2 bytes, from 2 ranks
    payload = (10 + 10 + 10) * 2 * 2
    assert rows == {
        (AG, THETA, FORWARD): (3, payload),
        (AG, THETA, BACKWARD): (3, payload),
        (RS, G, BACKWARD): (3, payload),
    }


def test_sent_bytes_are_rounded_up_per_call():
    held = exact(GATHERED, 4, facts=make_facts(((1, 3),), ((1, 3),)), layout=ZERO16, clip=None)
    (forward,) = [row for row in held.traffic if row.key.phase is FORWARD]
    assert (forward.calls, forward.payload_bytes, forward.sent_bytes) == (2, 48, 36)
    held = exact(WHOLE, 4, facts=make_facts(((3,),)), layout=ZERO16, clip=None)
    (reduced,) = [row for row in held.traffic if row.key.phase is BACKWARD]
    assert (reduced.payload_bytes, reduced.sent_bytes) == (6, 9)


def test_replicas_reduce_each_shard_and_share_only_that():
    held = on_both(WHOLE, GATHERED)
    shard = (10 + 10 + 10) * 4
    assert calls(held, axes=("dp_replicate",)) == {(AR, G, BACKWARD): (3, shard)}
    assert calls(held, axes=("dp_shard",))[RS, G, BACKWARD] == (3, 2 * shard)
    assert held.bytes_of(THETA) == shard


def test_replicas_reduce_with_every_reduce_scatter():
    every = on_both(WHOLE, GATHERED, accumulate=4)
    last = on_both(WHOLE, GATHERED, accumulate=4, sync=SyncPolicy(gradients=GradientSync.LAST))
    assert calls(every, axes=("dp_replicate",))[AR, G, BACKWARD][0] == 12
    assert calls(last, axes=("dp_replicate",))[AR, G, BACKWARD][0] == 3


def test_replicated_gradients_are_reduced_in_buckets_once_a_step():
    facts = make_facts(((300_000,), (10,)), ((200_000,), (100_000,)))
    held = exact(WHOLE, facts=facts, accumulate=4, bucket_bytes=10**6)
    # backwards: 0.4 + 0.8 MB reach the cap; 40 B + 1.2 MB reach it again
    assert calls(held)[AR, G, BACKWARD] == (2, 4 * 600_010)
    (setup,) = [row for row in held.traffic if row.key.phase is Phase.SETUP]
    assert (setup.calls, setup.payload_bytes) == (2, 4 * (4 + 1) + 4 * 2)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_sharded_optimizer_scatters_gradients_and_gathers_parameters_once(accumulate):
    held = exact(ZERO_1, accumulate=accumulate)
    assert calls(held) == {
        (RS, G, UPDATE): (3, 4 * FLAT_2),
        (AG, THETA, UPDATE): (3, 4 * FLAT_2),
    }
    assert held.bytes_of(THETA) == held.bytes_of(G) == 4 * FLAT_2
    assert held.bytes_of(OMEGA) == 8 * FLAT_2 // 2 + 4 * 3


def test_sharded_gradients_are_reduced_in_the_backward_pass():
    held = exact(ZERO_2, accumulate=4)
    assert calls(held) == {
        (RS, G, BACKWARD): (12, 4 * 4 * FLAT_2),
        (AG, THETA, UPDATE): (3, 4 * FLAT_2),
    }
    assert held.bytes_of(G) == 4 * FLAT_2 // 2


def test_an_update_that_reads_more_than_is_stored_gathers_it_unless_it_has_a_master():
    gathered = tuple_of("S*,R,S")
    assert calls(exact(gathered))[AG, THETA, UPDATE] == (3, 4 * FLAT_2)
    assert calls(exact(gathered))[AG, G, UPDATE] == (3, 4 * FLAT_2)
    assert (AG, THETA, UPDATE) not in calls(exact(gathered, layout=ZERO16))


def test_unsharded_gradients_are_all_reduced_before_the_update():
    assert calls(exact(tuple_of("S*,R,R")))[AR, G, UPDATE] == (3, 4 * FLAT_2)
    inner = on_both(ZERO_1, WHOLE)
    assert calls(inner, axes=("dp_replicate",))[RS, G, UPDATE] == (3, 4 * FLAT_2)
    assert calls(inner, axes=("dp_shard",)) == {(AR, G, UPDATE): (3, 4 * FLAT_2 // 2)}


def test_an_optimizer_sharded_over_both_axes_works_on_quarters():
    held = on_both(ZERO_1, GATHERED)
    flat = 20 + 20 + 20  # 17 and 18 -> 20 for 4 ranks
    assert held.bytes_of(THETA) == 4 * flat // 2
    assert held.bytes_of(OMEGA) == 8 * flat // 4 + 12
    outer = calls(held, axes=("dp_replicate",))
    assert outer == {(RS, G, UPDATE): (3, 4 * flat // 2), (AG, THETA, UPDATE): (3, 4 * flat // 2)}


def test_gradients_and_optimizer_sharded_over_different_axes_cross_over():
    held = on_both(ZERO_1, tuple_of("R,R,S"))
    flat = 60
    assert calls(held, axes=("dp_shard",)) == {
        (RS, G, BACKWARD): (3, 4 * flat),
        (AG, G, UPDATE): (3, 4 * flat // 2),
    }
    assert calls(held, axes=("dp_replicate",)) == {
        (RS, G, UPDATE): (3, 4 * flat // 2),
        (AG, THETA, UPDATE): (3, 4 * flat),
    }


def test_a_collective_over_two_axes_is_one_call_on_both():
    assert set(calls(on_both(ZERO_2, ZERO_2), axes=("dp_replicate", "dp_shard"))) == {
        (RS, G, BACKWARD),
        (AG, THETA, UPDATE),
    }


@pytest.mark.parametrize(("fp64", "scalar"), [(False, 4), (True, 8)])
def test_clipping_reduces_one_scalar_per_axis_that_cuts_the_optimizer(fp64, scalar):
    held = on_both(ZERO_1, GATHERED, layout=ZERO16, compute_fp64=fp64)
    rows = [row for row in held.traffic if row.key.collective is AR]
    assert [(row.key.axes, row.calls, row.payload_bytes) for row in rows] == [
        (("dp_replicate",), 1, scalar),
        (("dp_shard",), 1, scalar),
    ]
    assert all(row.sent_bytes == scalar for row in rows)


@pytest.mark.parametrize("placement", [GATHERED, ZERO_1, ZERO_2])
def test_a_reduce_scatter_by_all_to_all_is_reported_and_costs_the_same(placement):
    native = exact(placement)
    exchanged = exact(placement, reduce_scatter=ReduceScatterVia.ALL_TO_ALL)
    assert {row.key.via for row in native.traffic} == {None}
    reduced = [row for row in exchanged.traffic if row.key.collective is RS]
    assert [row.key.via for row in reduced] == ["all_to_all"]
    assert native.sent_bytes() == exchanged.sent_bytes()


@pytest.mark.parametrize(("momentum", "itemsize"), [(0.0, 0), (0.9, 4)])
def test_sgd_keeps_a_momentum_or_nothing_and_no_step(momentum, itemsize):
    held = exact(WHOLE, optimizer="sgd", momentum=momentum)
    assert held.bytes_of(OMEGA) == itemsize * NUMEL


def test_fp64_keeps_the_layouts_structure():
    assert exact(WHOLE, layout=ZERO16, compute_fp64=True).bytes_of(OMEGA) == 24 * NUMEL + 24
    assert exact(WHOLE, layout=FP32, compute_fp64=True).bytes_of(OMEGA) == 16 * NUMEL + 24


def test_every_rank_has_a_row_per_state():
    held = on_both(WHOLE, GATHERED)
    assert {(row.rank, row.state) for row in held.memory} >= {
        (rank, state) for rank in range(4) for state in (THETA, OMEGA, G, OTHER)
    }


def test_80_layers_on_8_ranks_take_a_few_milliseconds():
    layer = ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (8192,), (8192,))
    facts = make_facts(*[(*layer, (28672, 8192), (28672, 8192), (8192, 28672))] * 80, ((32, 8),))
    start = time.process_time()
    exact(GATHERED, 8, facts=facts)
    assert time.process_time() - start < 0.05


def test_buckets_are_rebuilt_once_from_two_lists_of_numbers():
    """The order of the 6 tensors with their number, and the sizes of the buckets: 4 bytes each."""
    setup = [row for row in exact(WHOLE).traffic if row.key.phase is Phase.SETUP]
    assert {(row.key.collective, row.key.state) for row in setup} == {(Collective.BROADCAST, OTHER)}
    assert sum(row.payload_bytes for row in setup) == 4 * (6 + 1) + 4 * 1


@pytest.mark.parametrize("layout", [FP32, ZERO16])
def test_muon_keeps_one_moment_of_a_blocks_matrices_and_two_with_a_step_of_the_rest(layout):
    """3 blocks of 3528 + 1176 + 12726 elements in matrices; 2 tables of 259 x 42, 7 norms of 42."""
    hidden, rest, others = 3 * (3528 + 1176 + 12726), 2 * 259 * 42 + 7 * 42, 9
    options = {"optimizer": "muon", "momentum": 0.95, "layout": layout}
    found = derive(make_spec({Axis.DP_REPLICATE: (2, WHOLE)}, **options)).exact
    held = [row.device_bytes for row in found.memory if row.state is OMEGA]
    master = 4 * (hidden + rest) if layout.master else 0
    assert held == [4 * (hidden + 2 * rest) + 4 * others + master] * 2
