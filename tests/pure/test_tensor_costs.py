"""What tp sends and leaves on each rank, against products that are drawn by hand."""

from __future__ import annotations

import pytest

from ptrain.costs import Collective, Phase, State
from ptrain.derivation.estimate import Estimate, derive
from ptrain.spec.load import load

# 2 samples of 16 tokens in each of 3 micro-batches, fp32
BATCH = "batch={global: 6, micro: 2, sequence: 16}"
TOKENS, ITEMSIZE, MICRO_BATCHES = 2 * 16, 4, 3
LLAMA = "model={layers: 2, hidden: 48, heads: 4, ffn: 96, vocab: 259}"
GPT = "model={family: gpt, layers: 2, hidden: 48, heads: 4, vocab: 260}"


def estimated(name: str, *overrides: str) -> Estimate:
    return derive(load(name, ["mesh={tp: 2}", BATCH, *overrides]).spec).exact


def sent(estimate: Estimate, kind: Collective, phase: Phase) -> tuple[int, int]:
    """Calls and payload of a step's activations."""
    (row,) = (
        row
        for row in estimate.traffic
        if (row.key.collective, row.key.state, row.key.phase) == (kind, State.ACTIVATIONS, phase)
    )
    return row.calls, row.payload_bytes


def test_each_rank_has_its_own_rows_where_slices_of_the_vocabulary_are_unequal():
    """130 of 259 rows of embedding and head on rank 0, 129 on rank 1; fp32, and two moments."""
    estimate = estimated("tp", LLAMA)
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


FEATURES = TOKENS * 48 * ITEMSIZE  # of all tokens
SUMS = (2 * 2 + 1) * MICRO_BATCHES  # two in each of 2 blocks, and the embedding's or the head's


def test_a_block_takes_two_sums_of_all_features_forward_and_two_backward():
    """Theorem 6. A loss on cut logits takes three numbers of each token: the largest, the sum of
    exponentials, and the target's logit."""
    estimate = estimated("tp", LLAMA.replace("259", "260"))
    of_loss = 3 * MICRO_BATCHES
    assert sent(estimate, Collective.ALL_REDUCE, Phase.FORWARD) == (
        SUMS + of_loss,
        SUMS * FEATURES + of_loss * TOKENS * ITEMSIZE,
    )
    assert sent(estimate, Collective.ALL_REDUCE, Phase.BACKWARD) == (SUMS, SUMS * FEATURES)


@pytest.mark.parametrize(("vocab", "rows"), [(259, 260), (260, 260)])
def test_logits_are_gathered_in_equal_slices_where_the_loss_takes_them_whole(vocab, rows):
    model = LLAMA.replace("259", str(vocab))
    estimate = estimated("tp", model, "tensor.loss_parallel=false")
    gathered = MICRO_BATCHES * TOKENS * rows * ITEMSIZE
    assert sent(estimate, Collective.ALL_GATHER, Phase.FORWARD) == (MICRO_BATCHES, gathered)


def test_positions_are_gathered_in_backward_for_all_samples_at_once():
    """Beside what a block gathers of the slices of its inputs' gradients."""
    of_positions = MICRO_BATCHES * 16 * 48 * ITEMSIZE
    assert sent(estimated("tp-sp", GPT), Collective.ALL_GATHER, Phase.BACKWARD) == (
        SUMS + MICRO_BATCHES,
        SUMS * FEATURES + of_positions,
    )
