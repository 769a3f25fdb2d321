"""The draws of one device in a pass without samples (`rows` are none)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ptrain.verification.jobs.draws import AllDraws, RandomDraw, RankDraw

MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])


def of_one_device() -> RandomDraw:
    return RandomDraw(
        path="drop", number=0, outer="", call=0, kind="bernoulli_", value=torch.ones(2, 3)
    )


def of_ranks(*draws: tuple[tuple[str, ...], Tensor]) -> AllDraws:
    """Rank by rank, for which samples it drew what."""
    held = [RankDraw(rank, 0, rows, 0, value) for rank, (rows, value) in enumerate(draws)]
    return AllDraws(by_key={("drop", 0): held})


def test_it_draws_what_all_ranks_drew_without_samples() -> None:
    everyones = of_ranks(((), MASK), ((), MASK.clone()))
    value = everyones.value_for(of_one_device(), ())
    assert value is not None and torch.equal(value, MASK)
    assert not everyones.unlike and not everyones.lost


def test_ranks_that_drew_differently_without_samples_are_distinguished() -> None:
    everyones = of_ranks(((), MASK), ((), 1 - MASK))
    value = everyones.value_for(of_one_device(), ())
    assert value is not None and torch.equal(value, MASK)
    assert everyones.unlike == {"drop": (0, 1)}


@pytest.mark.parametrize("rows", [("a",), ("a", "b")])
def test_draws_for_samples_do_not_determine_it(rows: tuple[str, ...]) -> None:
    everyones = of_ranks((rows, MASK), (("c",), 1 - MASK))
    assert everyones.value_for(of_one_device(), ()) is None
    assert everyones.lost == {"drop"}
