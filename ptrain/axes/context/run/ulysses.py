"""Ulysses (Jacobs et al. 2023): ranks exchange their tokens of all heads for all tokens of their
heads, attend, and exchange back. Where they do not divide the heads of keys and values these are
repeated first, as often as each rank then has as many: to the degree, where it is a multiple.

Legend of shape suffixes: B samples, H heads of all ranks, T tokens of a rank, D elements per head,
N ranks, h heads of a rank, S tokens of all of them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.attention import repeats
from ptrain.internals.functional_collectives import all_to_all_single_autograd, awaited
from ptrain.models.attention import repeated


class UlyssesCore(nn.Module):
    """`inner` attends, to all tokens that the group has."""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module) -> None:
        super().__init__()
        self.group, self.inner = group, inner

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_SS: Tensor | None = None
    ) -> Tensor:
        times = repeats(self.group.size(), k_BGTD.shape[1])
        k_BGTD, v_BGTD = repeated(k_BGTD, times), repeated(v_BGTD, times)
        heads = [self._tokens_for_heads(x_BHTD) for x_BHTD in (q_BHTD, k_BGTD, v_BGTD)]
        del k_BGTD, v_BGTD
        y_BhSD = self.inner(*heads, mask_SS)
        del heads
        return self._heads_for_tokens(y_BhSD)

    def _tokens_for_heads(self, x_BHTD: Tensor) -> Tensor:
        x_NBhTD = x_BHTD.unflatten(1, (self.group.size(), -1)).movedim(1, 0).contiguous()
        return self._exchanged(x_NBhTD).movedim(0, 2).flatten(2, 3)

    def _heads_for_tokens(self, x_BhSD: Tensor) -> Tensor:
        x_NBhTD = x_BhSD.unflatten(2, (self.group.size(), -1)).movedim(2, 0).contiguous()
        return self._exchanged(x_NBhTD).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, x_NBhTD: Tensor) -> Tensor:
        ones = [1] * self.group.size()
        return awaited(all_to_all_single_autograd(x_NBhTD, ones, ones, self.group))
