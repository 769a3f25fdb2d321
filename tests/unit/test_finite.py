"""The check for finite tensors makes no copy of any of them."""

from __future__ import annotations

import pytest
import torch

from ptrain.train.finite import _count_text, _is_finite

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("numel", [1, 7, 4099])
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(
    dtype: torch.dtype, value: str, numel: int
) -> None:
    for place in {0, numel // 2, numel - 1}:
        tensor = torch.randn(numel).to(dtype)
        tensor[place] = float(value)
        assert not _is_finite([torch.ones(2), tensor, torch.ones((), dtype=dtype)])
        assert _count_text([tensor, torch.ones(3)]) == f"{value} in 1 of {numel + 3} elements"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    extremes = [limits.max, limits.min, limits.tiny, limits.tiny / 4, -0.0]
    assert _is_finite([torch.tensor(extremes, dtype=torch.float64).to(dtype)])


def test_empty_and_integer_tensors_are_finite() -> None:
    assert _is_finite([])
    assert _is_finite([torch.empty(0), torch.tensor(3), torch.zeros(2, 0)])
    assert not _is_finite([torch.empty(0), torch.eye(3)[:, 1] / torch.zeros(3)])
