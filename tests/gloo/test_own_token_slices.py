"""Hand-cut slices of the tokens: what is wrong of them is named, and tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ptrain
from tests.corpus import context
from tests.corpus.collectives import GatherParts
from tests.corpus.parts import adamw, average, axis, looped, token_batches, writer
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

IGNORED = -100


def named(case: str) -> dict[str, Any]:
    verdict = getattr(context, case)(True)
    return {"text": str(verdict)}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("positions_begin_at_zero", "positions not offset by rank"),
        ("mask_of_the_first_slice", "sees too few tokens"),
        ("gathered_keys_keep_their_own_gradient", "another gradient comes back"),
        ("labels_shifted_within_a_slice", "labels shifted within a slice"),
    ],
)
def test_a_fault_of_a_slice_is_named_and_tried(ranks: Ranks, case: str, said: str) -> None:
    text = ranks.run(2, named, case)[0]["text"]
    assert f"axis cp · {said}" in text
    assert "proven by trying" in text


def ignoring(fault: str) -> dict[str, Any]:
    """Labels of some tokens do not count, most of them in the first slice; `fault`: `means` divides
    by a slice's own count, `lost` has no label for the last token of a slice."""
    left_out = torch.zeros(4, 8, dtype=torch.bool)
    left_out[:, :3] = True

    def labels_of(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].masked_fill(left_out, IGNORED)

    def whole(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels_of(tokens).flatten())

    def sliced() -> ptrain.Job:
        model = writer()

        def loss(called: Any, tokens: Tensor) -> Tensor:
            inputs, _, first = context.tokens_of_rank(tokens)
            labels = labels_of(tokens).chunk(2, dim=1)[first // 4].clone()
            if fault == "lost":
                labels[:, -1] = IGNORED
            logits = called(inputs, first, lambda kv: GatherParts.apply(kv, 1))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            counted = (labels != IGNORED).sum() if fault == "means" else 20 / 2
            return total / counted

        return looped(
            model, loss=loss, optimizer=adamw(model),
            before_update=lambda: average(model.parameters()),
        )  # fmt: skip

    def plain() -> ptrain.Job:
        return looped(writer(), loss=whole)

    terms = ptrain.Terms(mesh=axis("cp"))
    verdict = ptrain.verify(plain, sliced, token_batches(), terms=terms)
    return {"holds": verdict.holds, "text": str(verdict)}


@pytest.mark.parametrize(
    ("fault", "said"),
    [("means", "averaged slice by slice"), ("lost", "is asked for nothing, not the one")],
)
def test_what_a_slice_is_asked_for_is_compared(ranks: Ranks, fault: str, said: str) -> None:
    text = ranks.run(2, ignoring, fault)[0]["text"]
    assert said in text
    assert "proven by trying" in text


def test_slices_with_labels_that_do_not_count_hold(ranks: Ranks) -> None:
    verdict = ranks.run(2, ignoring, "")[0]
    assert verdict["holds"], verdict["text"]
