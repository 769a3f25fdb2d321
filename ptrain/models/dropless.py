"""The way of all that tokens send to experts which take everything: rows are sorted by expert, and
what they become is put back where they set out. No size depends on where tokens go, but those of a
journey.

Legend of shape suffixes: N tokens, C hidden, E experts, K experts of a token, M = N·K rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ptrain.models.journey import Journey

OnRows = Callable[[Tensor, Tensor], Tensor]  # (rows [M, C], where each expert's end) -> [M, C]


def dropless(
    x_NC: Tensor, chosen_NK: Tensor, num_experts: int, journey: Journey, experts: OnRows
) -> Tensor:
    """Return what each token's experts give [N, K, C]."""
    num_chosen, chosen_M = chosen_NK.shape[1], chosen_NK.flatten()
    order_M = chosen_M.argsort(stable=True)
    x_MC, ends_E = journey.rows_there(x_NC[order_M // num_chosen], ends_of(chosen_M, num_experts))
    # handed on, so that what rows become is given back where they set out
    y_MC = journey.rows_back(experts(x_MC, ends_E))
    del x_MC, ends_E
    return y_MC[order_M.argsort()].unflatten(0, (-1, num_chosen))


def ends_of(chosen_M: Tensor, num_experts: int) -> Tensor:
    """Return the rows behind the last of each expert, sorted by expert: int32, as torch's grouped
    product takes them."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_M.device)
    counts_E = counts_E.scatter_add(0, chosen_M, torch.ones_like(chosen_M))
    return counts_E.cumsum(0, dtype=torch.int32)
