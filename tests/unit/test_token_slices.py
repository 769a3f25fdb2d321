"""A rank's tokens are identified by their values, even if samples repeat, and so is its part of any
tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ptrain.verification.jobs.modules import candidate_parts, find_token_slice
from ptrain.verification.jobs.record import ForwardCall


def columns_of(whole: Tensor, own: Tensor) -> list[int] | None:
    calls = (ForwardCall(args=(its,), kwargs={}, autocast=None) for its in (whole, own))
    part = find_token_slice(*([call] for call in calls))
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


def test_a_piece_of_an_uneven_split_is_recognized() -> None:
    tokens = torch.arange(16).expand(2, 16)
    assert columns_of(tokens, tokens[:, 5:12]) == list(range(5, 12))


def test_a_tensor_is_cut_along_tokens_and_features() -> None:
    """[samples, heads, tokens, features], of which a rank has every second head and late tokens."""
    whole = torch.randn(2, 4, 6, 3)
    own = whole[:, 2:, [2, 3]]
    parts = list(candidate_parts(whole, own))
    assert any(torch.equal(part, own) for part in parts)
    assert not list(candidate_parts(whole, torch.zeros(1, 2, 2, 3)))


def test_the_parts_of_fused_matrices_are_cut_one_by_one() -> None:
    whole = torch.arange(12.0)
    own = torch.tensor([2.0, 3.0, 6.0, 7.0, 10.0, 11.0])
    assert any(torch.equal(part, own) for part in candidate_parts(whole, own))
