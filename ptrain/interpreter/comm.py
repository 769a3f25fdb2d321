"""Collectives as this project calls them: summed, blocking, tagged with the state they move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ptrain.costs import Collective, State
from ptrain.interpreter.registry import Registry
from ptrain.spec.batch import ReduceScatterVia

# torch 2.13 renamed these two and deprecates the old names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`output` (1-d, size x shard) becomes the ranks' shards in group order."""
    _all_gather(output, shard, group=group)


def reduce_scatter(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    via: ReduceScatterVia,
    registry: Registry,
) -> None:
    """`shard` becomes this rank's part of the ranks' summed `whole` (1-d, size x shard).

    Via all_to_all it needs one more buffer of `whole`'s size, and is a true reduce-scatter on
    gloo, whose own sends twice the bytes.
    """
    if via is ReduceScatterVia.NATIVE:
        _reduce_scatter(shard, whole, group=group)
        return
    registry.tag(whole, State.GRADIENTS, Collective.REDUCE_SCATTER)
    received = torch.empty_like(whole)
    registry.tag(received, State.GRADIENTS, Collective.REDUCE_SCATTER)
    dist.all_to_all_single(received, whole, group=group)
    torch.sum(received.view(group.size(), -1), 0, out=shard)


class TaggedAllGather(AllGather):
    """FSDP2's all-gather, with its buffers tagged as parameters."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, State.PARAMETERS)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.registry.tag(output_tensor, State.PARAMETERS)
        work: dist.Work | None = _all_gather(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work


class TaggedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter, native or by exchange, with its buffers tagged as gradients."""

    def __init__(self, via: ReduceScatterVia, registry: Registry) -> None:
        self.via = via
        self.registry = registry

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, State.GRADIENTS)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, f"framework averaging is off, yet the operator is {op}"
        if async_op:
            work: dist.Work | None = _reduce_scatter(
                output_tensor, input_tensor, group=group, async_op=True
            )
            return work
        reduce_scatter(output_tensor, input_tensor, group, self.via, self.registry)
        return None
