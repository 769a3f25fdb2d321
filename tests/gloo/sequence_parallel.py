"""Hand-written tensor and sequence parallelism without DTensor: own_loops.Net with MLPs sharded
over a group, and norms between them on sequence shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Between = Callable[[Tensor, dist.ProcessGroup], Tensor]
SEQUENCE = 1  # dimension of x [rows, sequence, width]


def _all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, SEQUENCE)


def _local_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), SEQUENCE)[group.rank()].contiguous()


def _reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return _local_rows(x, group)


class _Exchange(torch.autograd.Function):
    """A function that applies `there` to hidden states and `back` to their gradients, over the
    ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Between, back: Between
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of the full sequence."""
    return _Exchange.apply(x, group, _local_rows, _all_gather_rows)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather sequence shards for replicated computation."""
    return _Exchange.apply(x, group, _all_gather_rows, _local_rows)


def gather_for_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather sequence shards for a column-parallel linear."""
    return _Exchange.apply(x, group, _all_gather_rows, _reduce_scatter_rows)


def scatter_row_sums(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter partial sums to this rank's sequence shard."""
    return _Exchange.apply(x, group, _reduce_scatter_rows, _all_gather_rows)


def _shard_linear(weight: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(group.size(), dim)[group.rank()].clone())


class Columns(nn.Module):
    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = (
            _shard_linear(whole.weight, 0, group),
            _shard_linear(whole.bias, 0, group),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """A row-parallel linear that adds its bias once, to this rank's sequence shard."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = (
            _shard_linear(whole.weight, 1, group),
            nn.Parameter(whole.bias.clone()),
        )
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return scatter_row_sums(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self, whole: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(whole.norm.normalized_shape)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.norm.to(whole.norm.weight.dtype)
        self.up, self.down = Columns(whole.up, group), Rows(whole.down, group)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(gather_for_columns(self.norm(x), self.group))))


class SequenceParallelNet(nn.Module):
    """A sequence-parallel net that computes the same function as the net it is made of, with the
    same parameter names."""

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
        x = split_sequence(self.embed(tokens), self.group)
        for block in self.blocks:
            x = block(x)
        return self.head(gather_sequence(self.norm(x), self.group))
