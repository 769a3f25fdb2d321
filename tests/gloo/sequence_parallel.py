"""Tensor and sequence parallelism by hand, without DTensor: own_loops.Net with the MLPs cut over a
group and the norms between them on pieces of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Between = Callable[[Tensor, dist.ProcessGroup], Tensor]
SEQUENCE = 1  # dimension of x [rows, sequence, width]


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, SEQUENCE)


def _mine(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), SEQUENCE)[group.rank()].contiguous()


def _my_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return _mine(x, group)


class _Exchange(torch.autograd.Function):
    """`there` with the hidden states, `back` with their gradients, between the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Between, back: Between
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole sequence -> this rank's piece of it."""
    return _Exchange.apply(x, group, _mine, _gathered)


def join(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pieces -> the whole sequence, for what every rank computes alike."""
    return _Exchange.apply(x, group, _gathered, _mine)


def into_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pieces -> the whole sequence, for a linear of which every rank has other columns."""
    return _Exchange.apply(x, group, _gathered, _my_sum)


def out_of_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums -> this rank's piece of their sum."""
    return _Exchange.apply(x, group, _my_sum, _gathered)


def _cut(weight: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(group.size(), dim)[group.rank()].clone())


class Columns(nn.Module):
    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = _cut(whole.weight, 0, group), _cut(whole.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """The bias is added once, to this rank's piece of the sequence."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = _cut(whole.weight, 1, group), nn.Parameter(whole.bias.clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return out_of_rows(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self, whole: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(whole.norm.normalized_shape)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.norm.to(whole.norm.weight.dtype)
        self.up, self.down = Columns(whole.up, group), Rows(whole.down, group)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(into_columns(self.norm(x), self.group))))


class SequenceParallelNet(nn.Module):
    """The same function as the net that it is made of, and the same names."""

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        dtype = whole.head.weight.dtype
        self.embed = nn.Embedding.from_pretrained(whole.embed.weight.clone(), freeze=False)
        self.blocks = nn.ModuleList(Block(block, group) for block in whole.blocks)
        self.norm = nn.LayerNorm(whole.norm.normalized_shape)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.norm.to(dtype)
        self.head = nn.Linear(*reversed(whole.head.weight.shape), bias=False, dtype=dtype)
        self.head.load_state_dict(whole.head.state_dict())
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        x = split(self.embed(tokens), self.group)
        for block in self.blocks:
            x = block(x)
        return self.head(join(self.norm(x), self.group))
