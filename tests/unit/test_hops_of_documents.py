"""The hops of a ring, each with a mask, together equal attention with one mask over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ptrain.axes.context.run.slices import HopKernel, Kernel, kernel_of
from ptrain.internals.context_parallel import merge_attention
from ptrain.models.attention import added_mask

RANKS, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 3, 8, 4, 2, 16
# In the second sample no document goes over an edge of slices: whole hops attend to nothing.
STARTS = ((0, 5, 13, 14), (0, 8, 16))


class _Group:
    """The place of one rank of a group that sends nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: RANKS


def documents() -> Tensor:
    begun_BS = torch.zeros(len(STARTS), RANKS * TOKENS, dtype=torch.int64)
    for row, places in enumerate(STARTS):
        begun_BS[row, list(places)] = 1
    return begun_BS.cumsum(1)


def hops_of(kernel: Kernel, heads: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """What a rank's queries attend to, and the logarithms of their sums: first its own keys, then
    those of the ranks before it."""
    queries, *others = heads
    hops = HopKernel(kernel, documents(), _Group(rank))
    own = slice_of(queries, rank)
    blocks = (
        hops.forward(
            own, *(slice_of(x, rank - hop) for x in others), is_causal=hop == 0, **kernel.arguments
        )
        for hop in range(rank + 1)
    )
    return merge_attention(((y_BHTD, sums_BHT) for y_BHTD, sums_BHT in blocks), queries.dtype)


def slice_of(x_BHSD: Tensor, rank: int) -> Tensor:
    return x_BHSD[:, :, rank * TOKENS : (rank + 1) * TOKENS]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_hops_attend_together_as_one_mask_does(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    heads = [torch.randn(len(STARTS), n, RANKS * TOKENS, HEAD_DIM).to(dtype) for n in sizes]
    mask = added_mask(documents(), documents(), torch.float64)
    queries, keys, values = (x.double() for x in heads)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = queries @ keys.transpose(-1, -2) * HEAD_DIM**-0.5 + mask
    expected, sums = scores.softmax(-1) @ values, scores.logsumexp(-1)
    kernel = kernel_of(heads[0], None, is_masked=True)
    for rank in range(RANKS):
        y_BHTD, sums_BHT = hops_of(kernel, heads, rank)
        assert (y_BHTD - slice_of(expected, rank)).abs().max() <= bound
        whole = sums[:, :, rank * TOKENS : (rank + 1) * TOKENS]
        assert (sums_BHT - whole).abs().max() <= bound
