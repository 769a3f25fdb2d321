"""Route every row to its experts without a capacity: sort rows by expert, multiply group by group,
and put the results back in order.

No size depends on the routing but those of rows that travel to other ranks. Groups of rows are
multiplied by torch's grouped product where it exists, else (fp64, or rows that do not fill 16
bytes) one group after the other into one result.

Legend of shape suffixes: N tokens, C hidden, E experts or groups, K experts of a token, M = N·K
rows sorted by expert, S places of an expert, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes of a row that torch's grouped product takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(x_MI: Tensor, weights_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return what each row gives with the matrix of its group: [M, O]. `ends_E` (int32) are the
    rows behind each group's last; a group may have none."""
    y_MO: Tensor
    if _is_torchs(x_MI, weights_EIO):
        y_MO = F.grouped_mm(x_MI, weights_EIO, offs=ends_E)
    else:
        y_MO = _by_group(x_MI, weights_EIO, ends_E)
    return y_MO


def _is_torchs(x_MI: Tensor, weights_EIO: Tensor) -> bool:
    is_even = all(width * x_MI.itemsize % ALIGNED == 0 for width in weights_EIO.shape[1:])
    return is_even and x_MI.dtype in DTYPES


# Arguments and meaning are those of aten::_grouped_mm: the second factor has the groups as its
# first dimension, or the groups are of the inner one, as in a weight's gradient.
@torch.library.custom_op("ptrain::_grouped_mm", mutates_args=())
def _by_group(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    result = _empty(left, right, offs)
    for group, (first, behind) in enumerate(pairwise([0, *offs.tolist()])):
        if right.dim() == 3:
            # into the result's own rows: a product allocates nothing beside it
            torch.mm(left[first:behind], right[group], out=result[first:behind])
        else:
            torch.mm(left[:, first:behind], right[first:behind], out=result[group])
    return result


@_by_group.register_fake
def _empty(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.dim() == 3 else (offs.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_MI, weights_EIO, ends_E = ctx.saved_tensors
    needs_x, needs_weights, _ = ctx.needs_input_grad
    of_x = _by_group(gradient_MO, weights_EIO.mT, ends_E) if needs_x else None
    # the transposed one is computed, so that a weight kept transposed has a contiguous gradient
    of_weights = _by_group(gradient_MO.mT, x_MI, ends_E).mT if needs_weights else None
    return of_x, of_weights, None


_by_group.register_autograd(_backward, setup_context=_keep)


class Journey:
    """The way of one forward pass, where nothing travels."""

    def __init__(self) -> None:
        self._beside: Callable[[], Tensor] | None = None

    def compute_beside(self, compute: Callable[[], Tensor]) -> None:
        """Say what may be computed while rows travel, before they set out."""
        self._beside = compute

    def computed_beside(self) -> Tensor:
        """Return what that gave, when rows are back."""
        assert self._beside is not None, "there is something"
        return self._beside()

    def rows_there(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank's experts get, and where those of each of these end."""
        return x_MC, ends_E

    def rows_back(self, y_MC: Tensor) -> Tensor:
        """Return what the rows that set out have become, in their order."""
        return y_MC

    def places_there(self, x_ESC: Tensor) -> Tensor:
        """Return the places that this rank's experts get."""
        return x_ESC

    def places_back(self, y_ESC: Tensor) -> Tensor:
        """Return what the places that set out have become."""
        return y_ESC


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
