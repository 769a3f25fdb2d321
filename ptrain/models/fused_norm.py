"""RMSNorm as a GPU's one kernel allocates it: its output, and of each row a number, fp32 at least.
A processor goes operator by operator. It is an operator of its own, so that a policy can keep it.

Values are others: it is for traces and simulations, which read sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("ptrain::fused_rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    return _sizes(x, weight, dims)


@_norm.register_fake
def _sizes(x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - dims], *[1] * dims]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_ones(x.shape), x.new_ones(rows, dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(False)  # nobody uses the rows, and CUDA's makes no gradient of them
    ctx.save_for_backward(x, weight, output[1])


def _backward(
    context: Any, gradient: Tensor, _: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, _ = context.saved_tensors
    needs_x, needs_weight, _ = context.needs_input_grad
    of_x = x.new_ones(x.shape) if needs_x else None
    return of_x, weight.new_ones(weight.shape) if needs_weight else None, None


_norm.register_autograd(_backward, setup_context=_keep)


def is_fused(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether a GPU has one kernel for it: not where input and weight differ in dtype, nor
    where they do not fit."""
    if weight is None:
        return True
    return weight.dtype == x.dtype and weight.shape == x.shape[x.dim() - weight.dim() :]


def rms_norm(x: Tensor, weight: Tensor | None, *, dims: int) -> Tensor:
    """Return a tensor of the norm's shape, over the last `dims` dimensions."""
    y: Tensor = _norm(x, weight, dims)[0]
    return y
