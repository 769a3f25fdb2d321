"""Loops with dropout are compared with one device at the usual tolerance, with replayed masks;
wrong masks are named."""

from __future__ import annotations

import pytest

from tests.gloo import own_dropout
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_masks_of_data_ranks_and_micro_batches_are_replayed_sample_by_sample(
    ranks: Ranks, way: str
) -> None:
    verdict = ranks.run(2, own_dropout.data_parallel, way)[0]
    assert verdict["holds"], verdict["text"]
    assert "(limit 1e-11)" in verdict["text"]
    assert "the random draws of the model in 5 places" in verdict["text"]


def test_a_fault_in_a_loop_with_dropout_is_named(ranks: Ranks) -> None:
    text = ranks.run(2, own_dropout.data_parallel, "ddp", "not reduced")[0]["text"]
    assert "missing all-reduce" in text
    assert "proven by trying" in text


def test_a_loop_left_in_evaluation_mode_is_named(ranks: Ranks) -> None:
    text = ranks.run(2, own_dropout.data_parallel, "ddp", "evaluates")[0]["text"]
    assert "dropout in the reference only" in text
    assert "proven by trying" in text


def test_data_ranks_that_draw_the_same_masks_hold(ranks: Ranks) -> None:
    verdict = ranks.run(2, own_dropout.data_parallel, "ddp", "same masks")[0]
    assert verdict["holds"], verdict["text"]


@pytest.mark.parametrize("fault", ["", "keeps"])
def test_masks_of_slices_of_features_are_left_out_and_the_others_replayed(
    ranks: Ranks, fault: str
) -> None:
    verdict = ranks.run(2, own_dropout.tensor_parallel, fault)[0]
    assert verdict["holds"], verdict["text"]
    assert "the random draws of the model in 2 places" in verdict["text"]
    assert "compared without the draws of middle" in verdict["text"]


def test_ranks_of_tp_that_draw_other_masks_for_copies_are_named(ranks: Ranks) -> None:
    text = ranks.run(2, own_dropout.tensor_parallel, "seeds")[0]["text"]
    assert "root cause: random state · axis tp · other masks for the same samples · end" in text
    assert "proven by trying" in text


def test_a_recomputation_with_new_masks_is_named(ranks: Ranks) -> None:
    text = ranks.run(2, own_dropout.tensor_parallel, "forgets")[0]["text"]
    assert "different mask in the recomputation" in text
    assert "proven by trying" in text


def test_a_mask_for_all_rows_is_excluded_and_reported(ranks: Ranks) -> None:
    verdict = ranks.run(2, own_dropout.shared_mask)[0]
    assert verdict["holds"], verdict["text"]
    assert "compared without the draws" in verdict["text"]


def test_a_mask_for_all_rows_is_rejected_if_jobs_cannot_be_rebuilt(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="Pass functions that make the jobs"):
        ranks.run(2, own_dropout.shared_mask, True)


@pytest.mark.parametrize("way", ["two_stages", "token_slices"])
def test_masks_of_stages_and_of_slices_of_the_tokens_are_left_out(ranks: Ranks, way: str) -> None:
    verdict = ranks.run(2, getattr(own_dropout, way))[0]
    assert verdict["holds"], verdict["text"]
    assert "compared without the draws" in verdict["text"]
