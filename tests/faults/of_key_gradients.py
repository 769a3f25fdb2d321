"""Incomplete gradients of attention over cp: gradients of keys and values that are not returned,
and of queries without remote keys."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ptrain.axes.context.run.apply import GatheredCore, _RingAttention
from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from tests.faults.fault import Fault
from tests.faults.of_attention import CoreFault, Heads, sabotage
from tests.faults.of_slices import GATHERED, HYBRID, RING_OF_4, ZIGZAG
from tests.faults.planting import modules, next_ranks_value


class _MissingLastHop(CoreFault):
    """A core without the last hop of key and value gradients: a rank keeps its neighbour's."""

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> Heads:
        keys, values = (next_ranks_value(tensor, ctx.core.group) for tensor in heads[1:])
        return heads[0], keys, values


class _LocalGroup(CoreFault):
    """A group of one rank, in which only local queries and keys interact."""

    def __init__(self, alone: dist.ProcessGroup) -> None:
        self.alone = alone

    def own(self, ctx: Any, gradient: Tensor) -> Heads:
        with patch.object(ctx.core, "group", self.alone):
            queries, keys, values, *_ = _RingAttention.backward(ctx, gradient)
        return queries, keys, values


class _LocalQueryGradients(_LocalGroup):
    """A core that keeps the key and value gradients of local queries."""

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> Heads:
        return heads[0], *self.own(ctx, gradient)[1:]


class _LocalKeyGradients(_LocalGroup):
    """A core whose query gradients come from the first hop only."""

    def gradients(self, ctx: Any, gradient: Tensor, heads: Heads) -> Heads:
        return self.own(ctx, gradient)[0], *heads[1:]


def not_sent_home(program: Program) -> None:
    sabotage(program, _MissingLastHop(), r"blocks\.1\.attention\.core")


def not_sent_at_all(program: Program) -> None:
    sabotage(program, _LocalQueryGradients(_group_of_one(program)), r"blocks\.1\.attention\.core")


def of_first_hop(program: Program) -> None:
    sabotage(program, _LocalKeyGradients(_group_of_one(program)), r"blocks\.1\.attention\.core")


def _group_of_one(program: Program) -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(program.world.size)][program.world.rank]


def not_reduced(program: Program) -> None:
    """Slice gradients of gathered keys and values without summing them."""
    for core in modules(program, r"blocks\.1\.attention\.core"):
        assert isinstance(core, GatheredCore)

        def cut(keys: Tensor, values: Tensor, of: GatheredCore = core) -> tuple[Tensor, ...]:
            return tuple(
                x.chunk(of.group.size(), 2)[of.group.rank()].contiguous() for x in (keys, values)
            )

        core.sum_kv_gradients = cut


class _GatheredByTorch(nn.Module):
    """Keys and values of all ranks by `torch.distributed.nn.functional.all_gather`, whose backward
    pass sends gradients as they lie in memory and takes what it is sent for contiguous; a mask by
    hand, as torch's fused attention has none for fewer queries than keys. What it gives back to
    `all_gather` has permuted strides, as from projections whose heads are moved to the front."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        more, count = q.shape[1] // k.shape[1], q.shape[2]
        whole = [
            _Permuted.apply(torch.cat(all_gather(x, self.group), 2)).repeat_interleave(more, 1)
            for x in (k, v)
        ]
        first = self.group.rank() * count
        queries = torch.arange(first, first + count)[:, None]
        seen = queries >= torch.arange(whole[0].shape[2])
        return nn.functional.scaled_dot_product_attention(q, *whole, seen)


class _Permuted(torch.autograd.Function):
    """An identity whose gradient has tokens before heads in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)


def gathered_by_torch(program: Program) -> None:
    """Gather with torch.distributed.nn.functional, as hand-written code does."""
    for attention in modules(program, r"blocks\.1\.attention"):
        assert isinstance(attention.core, GatheredCore)
        attention.core.forward = _GatheredByTorch(attention.core.group).forward


FAULTS = (
    Fault(
        name="dK and dV a hop from home",
        setting=RING_OF_4,
        plant=not_sent_home,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="dK and dV of cp rank 1",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of own queries alone: zigzag",
        setting=ZIGZAG,
        plant=not_sent_at_all,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of own queries alone: hybrid",
        setting=HYBRID,
        plant=not_sent_at_all,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV of gathered keys not summed",
        setting=GATHERED,
        plant=not_reduced,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="missing dK and dV",
        place=r"blocks\.1\.attention",
    ),
    Fault(
        name="dK and dV by torch's all_gather, with permuted strides",
        setting=GATHERED,
        plant=gathered_by_torch,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="cp",
        factor="dK and dV in the order of other strides",
        place=r"blocks\.1\.attention",
    ),
    *(
        Fault(
            name=f"dQ of own keys alone: {name}",
            setting=setting,
            plant=of_first_hop,
            subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
            axis="cp",
            factor="missing dQ from the keys of cp rank",
            place=r"blocks\.1\.attention",
        )
        for name, setting in (("zigzag", ZIGZAG), ("ring of 4", RING_OF_4), ("hybrid", HYBRID))
    ),
)
