"""Samples of several documents: a token attends to those of its own document alone, up to itself.

Legend of shape suffixes: B samples, T tokens.

Positions are those in the sample: they do not begin anew with a document. Rotary ones are the same
either way, since scores depend on their differences.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Documents(nn.Module):
    """The documents of samples, each of which begins with the token `start`."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores of every head [B, 1, T, T]: 0, or -inf of what a token
        does not attend to."""
        documents_BT = (tokens_BT == self.start).cumsum(1)
        return added_mask(documents_BT, documents_BT, dtype)


def added_mask(
    queries_BT: Tensor, keys_BT: Tensor, dtype: torch.dtype, *, first: int = 0
) -> Tensor:
    """Return the mask [B, 1, queries, keys] of tokens by the number of their document; the first
    query is the key at `first`."""
    apart_BTT = queries_BT[:, :, None] != keys_BT[:, None, :]
    ahead_TT = torch.ones_like(apart_BTT[0]).triu(1 + first)
    apart_BTT |= ahead_TT
    mask_BTT = torch.zeros_like(apart_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(apart_BTT, float("-inf")).unsqueeze(1)
