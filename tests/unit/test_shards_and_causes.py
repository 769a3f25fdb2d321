"""Evidence for a mismatch: the position of a shard in its tensor, the rank's coordinates, and the
pattern of a dtype or bit error."""

from __future__ import annotations

import math

import pytest
import torch

from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.verification.capture import data_rank_index
from ptrain.verification.jobs.shards import local_part
from ptrain.verification.parts import relative_difference


def _spec() -> Spec:
    axes = ("mesh={dp_replicate: 2, dp_shard: 2, tp: 2}", "placement.dp_replicate=ddp")
    return resolve_auto(load("tp-zero3", axes))


def test_ranks_of_tp_have_the_same_samples() -> None:
    assert [data_rank_index(_spec(), rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("shape", "place", "expected"),
    [
        ((7, 4), 0, (0, 0)),
        ((7, 4), 1, (0, 0)),
        ((4, 4), 0, (0, 0)),  # 7 rows over 2 ranks: 4 and 3, as torch.chunk has it
        ((3, 4), 1, (4, 0)),
        ((4, 4), 1, None),
        ((7, 2), 1, (0, 2)),
        ((7, 1), 0, None),
        ((7,), 0, None),
    ],
)
def test_a_plain_tensor_is_the_shard_given_by_its_shape_and_coordinates(
    shape: tuple[int, ...], place: int, expected: tuple[int, int] | None
) -> None:
    whole = torch.arange(28).view(7, 4)
    part = local_part(whole, torch.zeros(shape), degree=2, place=place)
    if expected is None:
        assert part is None
        return
    (row, column), (rows, columns) = expected, shape
    assert part is not None
    assert part.tolist() == whole[row : row + rows, column : column + columns].tolist()


def test_a_difference_is_relative_to_the_expected_or_usual_value() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_difference(expected + torch.tensor([0.0, 0.5]), expected) == 0.1
    assert relative_difference(torch.tensor([1e-9]), torch.tensor([0.0])) == math.inf
    assert relative_difference(
        torch.tensor([1e-9]), torch.tensor([0.0]), least=1.0
    ) == pytest.approx(1e-9)
    assert relative_difference(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
