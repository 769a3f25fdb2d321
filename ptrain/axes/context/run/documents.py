"""Documents of samples of which a rank has a slice of the tokens: their edges are gathered.

Legend of shape suffixes: B samples, T tokens of a rank, N ranks, S tokens of all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ptrain.costs import State
from ptrain.models.documents import Documents, added_mask
from ptrain.rooms.comm import all_gather
from ptrain.rooms.registry import Registry


class SlicedDocuments(Documents):
    """Slices are contiguous, in the order of the ranks. `has_all`: a rank attends with the queries
    of all tokens (Ulysses), else with those of its own to the keys of all."""

    def __init__(
        self, whole: Documents, group: dist.ProcessGroup, registry: Registry, *, has_all: bool
    ) -> None:
        super().__init__(whole.edge, ends=whole.ends)
        self.group, self.registry, self.has_all = group, registry, has_all

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask [B, 1, S, S] of all tokens, or [B, 1, T, S] of a rank's own."""
        documents_BS = self.numbered(self._edges(tokens_BT))
        if self.has_all:
            return added_mask(documents_BS, documents_BS, dtype)
        num_tokens = tokens_BT.shape[1]
        first = self.group.rank() * num_tokens
        own_BT = documents_BS[:, first : first + num_tokens]
        return added_mask(own_BT, documents_BS, dtype, first=first)

    def _edges(self, tokens_BT: Tensor) -> Tensor:
        own_BT = (tokens_BT == self.edge).to(torch.uint8)
        whole = own_BT.new_empty(self.group.size() * own_BT.numel())
        self.registry.tag(whole, State.ACTIVATIONS)
        all_gather(whole, own_BT.view(-1), self.group)
        return whole.view(self.group.size(), *own_BT.shape).transpose(0, 1).flatten(1)
