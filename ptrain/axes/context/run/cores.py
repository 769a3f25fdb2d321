"""Attention of a rank's queries to the keys of all: what stands in the place of a layer's core.

Legend of shape suffixes: B samples, H heads, G key-value heads, T tokens of a rank, D elements per
head, N ranks, S tokens of all of them.

Keys and values travel with as many heads as they have; a kernel repeats none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.run.slices import HopKernel, Kernel, kernel_of
from ptrain.cost import Collective, State
from ptrain.internals.context_parallel import merged, ring_backward, ring_forward
from ptrain.internals.functional_collectives import all_gathered, exchanged, reduce_scattered
from ptrain.rooms.comm import Registry
from ptrain.spec.dials import ReduceScatterVia


class RingCore(nn.Module):
    """Keys and values go round (Liu et al. 2023), by torch's templates; their gradients travel on
    with them and home in one hop more. `is_balanced`: zigzag."""

    def __init__(self, group: dist.ProcessGroup, scale: float | None, *, is_balanced: bool) -> None:
        super().__init__()
        self.group, self.scale, self.is_balanced = group, scale, is_balanced

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """`documents_BS`: the number of every token's document, rank by rank; None where a sample
        is one. Legality keeps windows out of a ring."""
        y_BHTD: Tensor = _Ring.apply(q_BHTD, k_BGTD, v_BGTD, documents_BS, self)
        return y_BHTD


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        documents_BS: Tensor | None,
        core: RingCore,
    ) -> Tensor:
        kernel = _kernel_of_ring(q_BHTD, documents_BS, core)
        y_BHTD, sums_BHT, *others = ring_forward(
            core.group,
            kernel.forward,
            (q_BHTD, k_BGTD, v_BGTD),
            is_balanced=core.is_balanced,
            **kernel.given,
        )
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, y_BHTD, sums_BHT, documents_BS)
        ctx.core, ctx.others = core, _of_backward(others)
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BGTD, v_BGTD, y_BHTD, sums_BHT, documents_BS = ctx.saved_tensors
        kernel = _kernel_of_ring(q_BHTD, documents_BS, ctx.core)
        gradients = ring_backward(
            ctx.core.group,
            kernel.backward,
            gradient_BHTD,
            (q_BHTD, k_BGTD, v_BGTD),
            (y_BHTD, sums_BHT),
            is_balanced=ctx.core.is_balanced,
            **kernel.given,
            **ctx.others,
        )
        return *gradients, None, None


def _kernel_of_ring(query: Tensor, documents_BS: Tensor | None, core: RingCore) -> Kernel:
    """Return the kernel of one pass, with a mask for each hop where samples are of documents."""
    kernel = kernel_of(query, core.scale, is_masked=documents_BS is not None)
    if documents_BS is None:
        return kernel
    hops = HopKernel(kernel, documents_BS, core.group)
    return replace(kernel, forward=hops.forward, backward=hops.backward)


def _kernel_of_gathered(query: Tensor, mask_B1TS: Tensor | None, core: GatheredCore) -> Kernel:
    """Return the kernel of one pass, whose calls are given the mask where there is one."""
    kernel = kernel_of(query, core.scale, is_masked=mask_B1TS is not None)
    if mask_B1TS is None:
        return kernel
    return replace(kernel, given={**kernel.given, "attn_mask": mask_B1TS})


class GatheredCore(nn.Module):
    """Keys and values of all ranks are gathered, in one call, and kept until backward, whose
    gradients are summed home in one (Llama 3, section 3.3.2). Slices are contiguous: a rank attends
    to all that is before its own, and causally to its own."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        scale: float | None,
        via: ReduceScatterVia,
        registry: Registry,
    ) -> None:
        super().__init__()
        self.group, self.scale, self.via, self.registry = group, scale, via, registry

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        """`mask_TT`: that of documents, of the rank's queries and all keys [B, 1, T, S]."""
        y_BHTD: Tensor = _Gathered.apply(q_BHTD, k_BGTD, v_BGTD, mask_TT, self)
        return y_BHTD

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def gathered(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, G, S, D] of all ranks, views of one tensor."""
        own = torch.stack((k_BGTD, v_BGTD))  # [2, B, G, T, D]
        self.registry.tag(own, State.ACTIVATIONS)
        parts = all_gathered(own[None], self.group)  # [N, 2, B, G, T, D]
        k_BGSD, v_BGSD = parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # a copy, in their order
        return k_BGSD, v_BGSD

    def summed(self, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ranks' sum of these gradients of keys and values, of this rank's tokens."""
        both = torch.stack((k_BGSD, v_BGSD)).unflatten(3, (self.size, -1))
        parts = both.permute(3, 0, 1, 2, 4, 5).contiguous()  # [N, 2, B, G, T, D]
        del both
        k_BGTD, v_BGTD = self._own_sum(parts)
        return k_BGTD, v_BGTD

    def _own_sum(self, parts: Tensor) -> Tensor:
        """Return the ranks' sum of these parts [N, ...], of which each has one."""
        match self.via:
            case ReduceScatterVia.NATIVE:
                self.registry.tag(parts, State.ACTIVATIONS)
                return reduce_scattered(parts, self.group)[0]
            case ReduceScatterVia.ALL_TO_ALL:
                self.registry.tag(parts, State.ACTIVATIONS, Collective.REDUCE_SCATTER)
                return exchanged(parts, self.group).sum(0)
            case _:
                assert_never(self.via)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        mask_B1TS: Tensor | None,
        core: GatheredCore,
    ) -> Tensor:
        kernel = _kernel_of_gathered(q_BHTD, mask_B1TS, core)
        num_before = core.rank * q_BHTD.shape[-2]
        k_BGSD, v_BGSD = core.gathered(k_BGTD, v_BGTD)
        others: list[dict[str, Any]] = []

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for part, is_causal in _blocks(num_before, q_BHTD.shape[-2], mask_B1TS):
                y_BHTD, sums_BHT, *rest = kernel.forward(
                    q_BHTD, k_BGSD[..., part, :], v_BGSD[..., part, :], is_causal=is_causal,
                    **kernel.given,
                )  # fmt: skip
                others.append(_of_backward(rest))
                yield y_BHTD, sums_BHT

        y_BHTD, sums_BHT = merged(blocks(), q_BHTD.dtype)
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSD, y_BHTD, sums_BHT, mask_B1TS)
        ctx.core, ctx.others, ctx.num_before = core, others, num_before
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BGSD, v_BGSD, y_BHTD, sums_BHT, mask_B1TS = ctx.saved_tensors
        core, kernel = ctx.core, _kernel_of_gathered(q_BHTD, mask_B1TS, ctx.core)
        k_sum, v_sum = torch.zeros_like(k_BGSD), torch.zeros_like(v_BGSD)
        q_sum = torch.zeros_like(q_BHTD)
        blocks = _blocks(ctx.num_before, q_BHTD.shape[-2], mask_B1TS)
        for (part, is_causal), others in zip(blocks, ctx.others, strict=True):
            q_part, k_part, v_part, *_ = kernel.backward(
                grad_out=gradient_BHTD, query=q_BHTD, key=k_BGSD[..., part, :],
                value=v_BGSD[..., part, :], out=y_BHTD, logsumexp=sums_BHT, is_causal=is_causal,
                **kernel.given, **others,
            )  # fmt: skip
            q_sum += q_part
            k_sum[..., part, :] = k_part
            v_sum[..., part, :] = v_part
        return q_sum, *core.summed(k_sum, v_sum), None, None


def _blocks(
    num_before: int, num_own: int, mask_B1TS: Tensor | None
) -> Iterator[tuple[slice, bool]]:
    """Yield the keys that a rank's queries attend to, and whether causally: its own, and those
    before; all at once where a mask says which."""
    if mask_B1TS is not None:
        yield slice(None), False
        return
    yield slice(num_before, num_before + num_own), True
    if num_before:
        yield slice(0, num_before), False


_OF_CUDA = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


def _of_backward(others: list[Any]) -> dict[str, Any]:
    """Return by name what a kernel's backward pass is given of what its forward pass returned
    beside outputs and sums: of flash on CUDA, all but its mask of dropout."""
    return dict(zip(_OF_CUDA, others[: len(_OF_CUDA)], strict=True)) if others else {}
