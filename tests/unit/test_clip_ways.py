"""A wrong norm is explained by the squares that were counted several times, and the axis."""

import math

import pytest
import torch

from ptrain.verification.jobs.job import Ranks
from ptrain.verification.updates.clip import (
    ClipHypothesis,
    ClippedGradient,
    Scaling,
    fit_hypotheses,
)

SQUARES = {"norm.weight": 3.0, "up.weight": 5.0, "head.weight": 11.0}
FACTOR = 0.2
DP_TP = {"dp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3))}


def _fitting(counts: dict[str, int], sharded: dict[str, str]) -> list[ClipHypothesis]:
    """Return the ways that fit a norm with these counts, on dp 2 x tp 2; `sharded`: over what."""
    ranks = Ranks(rank=0, size=4, device=torch.device("cpu"), axes=DP_TP)
    right = math.sqrt(sum(SQUARES.values()))
    wrong = math.sqrt(sum(square * counts.get(name, 1) for name, square in SQUARES.items()))
    rows = []
    for rank in range(4):
        places = {"": 0, "dp": rank // 2, "tp": rank % 2, "both": rank}
        rows += [
            Scaling(rank, name, 0, right / wrong, 1.0 + rank, str(places[sharded.get(name, "")]))
            for name in SQUARES
        ]
    gradient = ClippedGradient(SQUARES, FACTOR)
    return [way for error, way in fit_hypotheses(gradient, rows, ranks, range(4)) if error <= 1e-6]


SHARDED = {"up.weight": "tp", "head.weight": "tp"}


def test_the_tensors_that_were_counted_twice_are_named_with_their_axis() -> None:
    (way,) = _fitting({"norm.weight": 2}, SHARDED)
    assert (way.axis, way.names) == ("tp", ("norm.weight",))
    assert "counted 2 times" in way.sentence


def test_shards_that_were_left_out_are_named() -> None:
    (way,) = _fitting({"up.weight": 0}, {"up.weight": "both", "head.weight": "dp"})
    assert (way.axis, way.names) == ("tp", ("up.weight",))
    assert "left out" in way.sentence


def test_axes_that_copy_the_same_tensors_are_not_distinguished() -> None:
    axes = {way.axis for way in _fitting({"norm.weight": 2}, dict.fromkeys(SHARDED, "both"))}
    assert axes == {"dp", "tp"}


@pytest.mark.parametrize("count", [3, 7])
def test_a_count_that_no_axis_has_fits_nothing(count: int) -> None:
    assert not _fitting({"norm.weight": count}, SHARDED)
