"""Which tokens a rank has is told by the tokens, also of samples in which they repeat, within a
bounded memory; so is what the loss asks of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ptrain.verification.jobs import modules
from ptrain.verification.jobs.metamorphic import AskedTokens
from ptrain.verification.jobs.modules import slice_of
from ptrain.verification.jobs.record import ForwardCall


def columns_of(whole: Tensor, own: Tensor) -> list[int] | None:
    calls = (ForwardCall(args=(its,), kwargs={}, autocast=None) for its in (whole, own))
    part = slice_of(*([call] for call in calls))
    return None if part is None else part.columns.tolist()


CUTS = {
    "in one piece": [8, 9, 10, 11, 12, 13, 14, 15],
    "zigzag": [4, 5, 6, 7, 8, 9, 10, 11],
    "zigzag of the first rank": [0, 1, 2, 3, 12, 13, 14, 15],
    "every other token": [1, 3, 5, 7, 9, 11, 13, 15],
}


@pytest.mark.parametrize("cut", CUTS)
def test_columns_are_known_though_tokens_repeat(cut: str) -> None:
    tokens = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0]])
    columns = CUTS[cut]
    assert columns_of(tokens, tokens[:, columns]) == columns


def test_an_unusual_cut_is_told_by_runs_of_tokens() -> None:
    tokens = torch.randperm(16, generator=torch.Generator().manual_seed(0)).expand(2, 16)
    columns = [3, 4, 5, 12, 13, 0]
    assert columns_of(tokens, tokens[:, columns]) == columns


def test_of_more_tokens_than_are_compared_an_unusual_cut_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modules, "_MOST_PAIRS", 95)
    tokens = torch.arange(16).expand(2, 16)
    assert columns_of(tokens, tokens[:, [3, 4, 5, 12, 13, 0]]) is None
    assert columns_of(tokens, tokens[:, 8:]) is not None


def gradient(labels: Tensor, vocabulary: int, weight: float = 1.0) -> Tensor:
    """Of logits that are all alike, by cross-entropy: of -100 nothing is asked."""
    logits = torch.zeros(*labels.shape, vocabulary, requires_grad=True)
    flat = logits.flatten(0, 1), labels.flatten()
    (torch.nn.functional.cross_entropy(*flat, reduction="sum") * weight).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("most", [4, 1 << 22])
def test_what_is_asked_of_tokens_is_told_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("ptrain.verification.jobs.metamorphic._MOST", most)
    right = torch.tensor([[1, 2, -100, 0], [3, 3, 2, 1]])
    own = torch.tensor([[1, 2, -100, 2], [3, 3, 2, -100]])
    asked = AskedTokens.of(gradient(own, 5, 2.5), gradient(right, 5))
    assert (asked.other, asked.lacking, asked.at_end, asked.count) == (1, 1, True, 7)
    assert asked.factor == pytest.approx(2.5)
