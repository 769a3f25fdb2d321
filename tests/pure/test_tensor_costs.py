"""Ranks of tp with unequal shards, compared with hand-written arithmetic."""

from __future__ import annotations

from ptrain.cost import Collective, Phase, State
from ptrain.derivation.estimate import Estimate, derive
from ptrain.spec.load import load

BATCH = "batch={global: 6, micro: 2, sequence: 16}"
ITEMSIZE = 4  # fp32
LLAMA = "model={layers: 2, hidden: 48, heads: 4, ffn: 96, vocab: 259}"


def estimate_of(name: str, *overrides: str) -> Estimate:
    return derive(load(name, ["mesh={tp: 2}", BATCH, *overrides]).spec).exact


def test_each_rank_has_its_rows_of_an_unequally_sharded_vocabulary():
    """130 of 259 rows of embedding and head on rank 0, 129 on rank 1; fp32, and two moments."""
    estimate = estimate_of("tp", LLAMA)
    of = {(row.state, row.rank): row.device_bytes for row in estimate.memory}
    assert len(of) == len(estimate.memory) == 2 * 6
    row = 2 * 48 * ITEMSIZE  # of both tables
    for state, tables in ((State.PARAMETERS, 1), (State.GRADIENTS, 1), (State.OPTIMIZER, 2)):
        assert of[state, 0] - of[state, 1] == tables * row
    assert of[State.ACTIVATIONS, 0] >= of[State.ACTIVATIONS, 1] > 0
    peaks = [(peak.phase, peak.rank) for peak in estimate.peak]
    assert sorted(peaks) == sorted(
        (phase, rank) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE) for rank in (0, 1)
    )
    assert len(estimate.accounts) == 2


def test_ranks_that_share_a_head_gather_its_keys_and_values():
    """Two key-value heads of 12 features on four ranks: each rank stores six rows of a key and of a
    value weight, and its group of two ranks gathers 12 features of 2·16 tokens."""
    of_four, of_two = (
        estimate_of("tp-sp", "mesh.tp=4", LLAMA, f"model.kv_heads={number}") for number in (4, 2)
    )
    calls = 2 * 2 * 3  # layers, key and value, micro-batches
    payload = calls * 2 * 16 * 12 * ITEMSIZE
    for key in (
        (Collective.ALL_GATHER, Phase.FORWARD, State.ACTIVATIONS),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD, State.ACTIVATIONS),
    ):
        less, more = (
            next(r for r in each.traffic if (r.key.collective, r.key.phase, r.key.state) == key)
            for each in (of_four, of_two)
        )
        assert more.calls - less.calls == calls
        assert more.payload_bytes - less.payload_bytes == payload
        assert more.sent_bytes - less.sent_bytes == payload // 2
    least, most = (
        next(r.device_bytes for r in each.memory if (r.state, r.rank) == (State.PARAMETERS, 0))
        for each in (of_two, of_four)
    )
    assert most - least == 2 * 2 * (12 - 6) * 48 * ITEMSIZE  # layers, weights, rows, hidden
