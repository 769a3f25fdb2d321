"""Samples of several documents: a token attends to those of its own document alone, up to itself.

Legend of shape suffixes: B samples, T tokens.

Positions are those in the sample: they do not begin anew with a document. Rotary ones are the same
either way, since scores depend on their differences.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ptrain.spec.model import ModelShape


class Documents(nn.Module):
    """The documents of samples, each of which begins with the token `edge`, or, if that `ends`
    them, ends with it."""

    def __init__(self, edge: int, *, ends: bool) -> None:
        super().__init__()
        self.edge, self.ends = edge, ends

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores of every head [B, 1, T, T]: 0, or -inf of what a token
        does not attend to."""
        documents_BT = self.numbered(tokens_BT == self.edge)
        return added_mask(documents_BT, documents_BT, dtype)

    def numbered(self, edges_BT: Tensor) -> Tensor:
        """Return which document of its sample each token is in, by where edges are."""
        begun_BT = edges_BT.cumsum(1)
        return begun_BT - edges_BT.to(begun_BT.dtype) if self.ends else begun_BT


def documents_of(shape: ModelShape) -> Documents | None:
    """Return the documents of a model's samples; None where each sample is one."""
    if shape.document_start is not None:
        return Documents(shape.document_start, ends=False)
    return None if shape.document_end is None else Documents(shape.document_end, ends=True)


def added_mask(
    queries_BT: Tensor, keys_BT: Tensor, dtype: torch.dtype, *, first: int = 0
) -> Tensor:
    """Return the mask [B, 1, queries, keys] of tokens by the number of their document; the first
    query is the key at `first`."""
    apart_BTT = are_apart(queries_BT, keys_BT)
    apart_BTT |= torch.ones_like(apart_BTT[0]).triu(1 + first)
    return hiding(apart_BTT, dtype)


def are_apart(queries_BT: Tensor, keys_BT: Tensor) -> Tensor:
    """Return of tokens by the number of their document whether queries and keys [B, queries, keys]
    are of two."""
    return queries_BT[:, :, None] != keys_BT[:, None, :]


def hiding(hidden_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores of every head [B, 1, queries, keys]: -inf where hidden."""
    mask_BTT = torch.zeros_like(hidden_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(hidden_BTT, float("-inf")).unsqueeze(1)
