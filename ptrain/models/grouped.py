"""Products of groups of rows with a matrix each, as layers of experts need them: torch's own where
it has one, elsewhere (in fp64, and of rows that do not fill 16 bytes) group by group into one
result. Either way no size depends on how many rows a group has.

Legend of shape suffixes: M rows of all groups, E groups, I inputs, O outputs.
"""

from __future__ import annotations

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
