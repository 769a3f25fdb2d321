"""Collectives as this project calls them: summed, blocking or awaited later, tagged with the state
they move."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ptrain.cost import Collective, State
from ptrain.internals.fsdp2 import AllGather, ReduceScatter
from ptrain.internals.process_groups import Work, all_gather_single, reduce_scatter_single
from ptrain.rooms.registry import Registry
from ptrain.rooms.room import Move
from ptrain.spec.dials import ReduceScatterVia

_all_gather, _reduce_scatter = all_gather_single, reduce_scatter_single


IN_PLACE_BYTES = 2**20  # below, the clone is in the caches, and one call is as fast as several


def all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    registry: Registry,
    *,
    is_awaited: bool = True,
) -> dist.Work | None:
    """`output` (1-d, size x shard) becomes the ranks' shards in group order.

    Of a large one gloo (torch 2.11 to 2.15) would gather a clone and copy that, into memory whose
    pages are new where it is above 32 MiB. So a broadcast for each rank's part writes to its place:
    as many bytes, in a third of the time for 43 MiB and in two thirds for 8.
    """
    if not (_is_gloo(output, group) and _is_large(output)):
        work: dist.Work | None = _all_gather(output, shard, group=group, async_op=not is_awaited)
        return work
    parts = output.view(-1).chunk(group.size())
    if (own := parts[group.rank()]).data_ptr() != shard.data_ptr():
        own.copy_(shard.view(-1))
    with registry.executing(Collective.ALL_GATHER):
        works = [
            dist.broadcast(part, group=group, group_src=place, async_op=True)
            for place, part in enumerate(parts)
        ]
    work = _Together(works)
    if is_awaited:
        work.wait()
        return None
    return work


class _Together(Work):
    """Calls that are awaited as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


def _is_gloo(whole: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether gloo's threads work on it, on a processor."""
    return whole.is_cpu and dist.get_backend(group) == "gloo"


def _is_large(whole: torch.Tensor) -> bool:
    """Return whether a clone of it costs more than several calls."""
    return whole.numel() * whole.element_size() >= IN_PLACE_BYTES


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, is_awaited: bool = True
) -> Move[torch.Tensor]:
    """`tensor` becomes the sum of the ranks'."""
    return Move(tensor, tensor, dist.all_reduce(tensor, group=group, async_op=not is_awaited))


def reduce_scatter(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    via: ReduceScatterVia,
    registry: Registry,
    *,
    is_awaited: bool = True,
) -> Move[torch.Tensor]:
    """`shard` becomes this rank's part of the ranks' summed `whole` (1-d, size x shard), which is
    used up.

    Gloo's own is an all-reduce of a clone. To the bit the same sums are, between two ranks, those
    of halves that are exchanged, with half the bytes; between more, of a large tensor, those of an
    all-reduce of `whole` itself. Via all_to_all it needs one more buffer of `whole`'s size, and is
    a true reduce-scatter between any number of ranks.
    """
    if via is ReduceScatterVia.NATIVE:
        if _is_gloo(whole, group) and group.size() == 2:
            return _exchange_halves(shard, whole, group, registry, is_awaited=is_awaited)
        if _is_gloo(whole, group) and _is_large(whole):
            with registry.executing(Collective.REDUCE_SCATTER):
                work = dist.all_reduce(whole, group=group, async_op=not is_awaited)
            own = whole.chunk(group.size())[group.rank()]
            return Move(shard, whole, work, partial(shard.copy_, own))
        work = _reduce_scatter(shard, whole, group=group, async_op=not is_awaited)
        return Move(shard, whole, work)
    tag = registry.of(whole)
    received = torch.empty_like(whole)  # its tag is read before that of `whole`, which stays
    registry.tag(received, tag.state if tag else State.OTHER, Collective.REDUCE_SCATTER)
    work = dist.all_to_all_single(received, whole, group=group, async_op=not is_awaited)

    def add() -> None:
        torch.sum(received.view(group.size(), -1), 0, out=shard)
        # gloo's thread may hold its tensors a moment longer than `wait` does, on a loaded machine
        received.untyped_storage().resize_(0)

    return Move(shard, whole, work, add)


def _exchange_halves(
    shard: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    registry: Registry,
    *,
    is_awaited: bool,
) -> Move[torch.Tensor]:
    """The other rank's half of this rank's part arrives in `shard`, where this rank's is added."""
    place = group.rank()
    halves, sizes = whole.chunk(2), [0, 0]
    sizes[1 - place] = shard.numel()
    with registry.executing(Collective.REDUCE_SCATTER):
        work = dist.all_to_all_single(
            shard, halves[1 - place], sizes, sizes, group=group, async_op=not is_awaited
        )
    return Move(shard, whole, work, partial(shard.add_, halves[place]))


class TaggedAllGather(AllGather):
    """FSDP2's all-gather of a unit, with its buffers tagged as its parameters."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry = registry
        self.name = name

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, State.PARAMETERS, name=self.name)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.registry.tag(output_tensor, State.PARAMETERS, name=self.name)
        return all_gather(
            output_tensor, input_tensor, group, self.registry, is_awaited=not async_op
        )


class TaggedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of a unit, native or by exchange, with its buffers tagged as its
    gradients. On an accelerator FSDP2 has a stream for it; `is_awaited`: nothing else is issued
    until it is over."""

    def __init__(
        self, via: ReduceScatterVia, registry: Registry, name: str, *, is_awaited: bool = False
    ) -> None:
        self.via = via
        self.registry = registry
        self.name = name
        self.is_awaited = is_awaited

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.registry.tag(buffer, State.GRADIENTS, name=self.name)

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
        reduce_scatter(output_tensor, input_tensor, group, self.via, self.registry).wait()
        if self.is_awaited and output_tensor.is_cuda:
            torch.cuda.current_stream(output_tensor.device).synchronize()
        return None
