"""Collectives with the backward that goes with each, as users of tensor, context and expert
parallelism write them by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor)
    return tensor


def gathered(tensor: Tensor, dim: int) -> Tensor:
    """Return all ranks' tensors, one after the other along `dim`."""
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=dim)


def own_part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].contiguous()


class CopyToRanks(torch.autograd.Function):
    """Identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MeanOverRanks(torch.autograd.Function):
    """The mean over the ranks, of which each has a loss of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x) / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient) / dist.get_world_size()


class GatherParts(torch.autograd.Function):
    """All ranks' parts; the gradient is summed over the ranks, and each keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_part(summed(gradient), ctx.dim), None


class GatherCopies(torch.autograd.Function):
    """All ranks' parts, of which all ranks compute the same: each keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_part(gradient, ctx.dim), None


class ScatterSum(torch.autograd.Function):
    """This rank's part of the sum over the ranks; gradients of the parts are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return own_part(summed(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.dim), None
