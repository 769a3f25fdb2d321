"""A processor stands in for a GPU's attention where it has a kernel too; where it goes operator by
operator, nobody knows what the GPU does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ptrain.models.kernels import kernels_of


def keeping(*_: object, **__: object) -> Callable[[int], int]:
    return lambda size: size


@pytest.mark.parametrize(
    ("query", "value", "noted"),
    [
        ((2, 3, 4, 8), (2, 3, 4, 8), []),
        ((2, 3, 4, 8), (2, 3, 4, 6), ["head_dim 8 in fp32, operator by operator on a processor"]),
        ((3, 4, 8), (3, 4, 8), ["head_dim 8 in fp32, operator by operator on a processor"]),
    ],
)
def test_attention_that_is_no_kernel_here_is_noted(query, value, noted):
    query, key, value = (torch.zeros(size, requires_grad=True) for size in (query, query, value))
    with kernels_of(is_for_cuda=True, keeping=keeping) as unknown:
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert [*unknown.attention] == noted
