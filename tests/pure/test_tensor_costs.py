"""Ranks of tp with unequal shards, compared with hand-written arithmetic."""

from __future__ import annotations

from ptrain.cost import Phase, State
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
