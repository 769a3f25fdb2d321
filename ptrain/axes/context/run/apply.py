"""Applies the context axis to a model: attention reaches the tokens of other ranks, and positions
refer to the full sequence.

Keys and values are sent without repeating heads for kernels.

Ulysses (Jacobs et al. 2023): ranks exchange their tokens of all heads for all tokens of their
heads, attend, and exchange back. Key-value heads that the degree does not divide are repeated
first: up to the degree, if it is a multiple of their number.

Legend of shape suffixes: B samples, H heads of all ranks, T tokens of a rank, D elements per head,
N ranks, h heads of a rank, S tokens of all of them; in a core H heads, G key-value heads and T
tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.attention import all_spans, kv_repeats, spans_at
from ptrain.axes.context.run.rehearsal import attend_over_cp, give_positions
from ptrain.axes.context.run.slices import (
    HopKernel,
    Kernel,
    MicroBatchCut,
    SampleSlices,
    SlicedDocuments,
    kernel_of,
    masks_at,
    route_slices,
    slice_batch,
)
from ptrain.cost import Collective, State
from ptrain.facts.model import AttentionFacts
from ptrain.internals.context_parallel import merge_attention, ring_backward, ring_forward
from ptrain.internals.functional_collectives import (
    all_gather_tensor,
    all_to_all_single_autograd,
    exchange_parts,
    reduce_scatter_sum,
    wait_for,
)
from ptrain.models.attention import SdpaCore, repeat_heads
from ptrain.models.modes import dropout_rates
from ptrain.models.objective import StepBatch
from ptrain.models.transformer import Transformer
from ptrain.runtime.comm import Mesh, TagRegistry
from ptrain.spec.dials import ReduceScatterVia
from ptrain.steps.step import ContextParallel


class UlyssesCore(nn.Module):
    """Attention over a Ulysses group. `inner` attends to all tokens of the group."""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module) -> None:
        super().__init__()
        self.group, self.inner = group, inner

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_SS: Tensor | None = None
    ) -> Tensor:
        times = kv_repeats(self.group.size(), k_BGTD.shape[1])
        k_BGTD, v_BGTD = repeat_heads(k_BGTD, times), repeat_heads(v_BGTD, times)
        heads = [self._tokens_for_heads(x_BHTD) for x_BHTD in (q_BHTD, k_BGTD, v_BGTD)]
        # Autograd keeps the repeated heads only if the exchange needs them, which it does not.
        # Without this, they would be live while `inner` runs.
        del k_BGTD, v_BGTD
        y_BhSD = self.inner(*heads, mask_SS)
        del heads
        return self._heads_for_tokens(y_BhSD)

    def _tokens_for_heads(self, x_BHTD: Tensor) -> Tensor:
        # An all-to-all sends contiguous blocks of the first dimension.
        x_NBhTD = x_BHTD.unflatten(1, (self.group.size(), -1)).movedim(1, 0).contiguous()
        return self._all_to_all(x_NBhTD).movedim(0, 2).flatten(2, 3)

    def _heads_for_tokens(self, x_BhSD: Tensor) -> Tensor:
        x_NBhTD = x_BhSD.unflatten(2, (self.group.size(), -1)).movedim(2, 0).contiguous()
        return self._all_to_all(x_NBhTD).movedim(0, 1).flatten(1, 2)

    def _all_to_all(self, x_NBhTD: Tensor) -> Tensor:
        # The first dimension is the rank, so every rank exchanges one row of it with each other
        # rank.
        ones = [1] * self.group.size()
        return wait_for(all_to_all_single_autograd(x_NBhTD, ones, ones, self.group))


def own_tokens(step: ContextParallel, mesh: Mesh) -> Callable[[StepBatch], StepBatch]:
    """Return a function that selects this rank's tokens of a batch."""
    return partial(slice_batch, spans=spans_at(step, mesh.coordinate(step.axis)))


class ContextGroups:
    """The process groups of attention: `ulysses` exchanges tokens for heads, and `ring` circulates
    keys and values. They are created once, in the same order on every rank. A group is None if it
    would have one rank.

    `attending` describes the attention modules of a model that is not built in. `masks` are the
    dropout masks of the rank's tokens.
    """

    def __init__(
        self,
        step: ContextParallel,
        mesh: Mesh,
        cut: MicroBatchCut,
        attending: AttentionFacts | None = None,
    ) -> None:
        self.attending = attending
        self.masks = masks_at(step, mesh.coordinate(step.axis), cut)
        self.ulysses = self.ring = None
        degree, lines = step.ulysses * step.ring, range(step.ulysses * step.ring)
        if step.ulysses == degree:
            self.ulysses = mesh.group((step.axis,))
        elif step.ring == degree:
            self.ring = mesh.group((step.axis,))
        else:
            # Creating a group is a collective over all ranks. So every rank creates the groups of
            # all lines in the same order, and keeps the only one that contains it.
            for first in range(0, degree, step.ulysses):
                line = lines[first : first + step.ulysses]
                self.ulysses = mesh.create_group_at(step.axis, line) or self.ulysses
            for first in range(step.ulysses):
                line = lines[first :: step.ulysses]
                self.ring = mesh.create_group_at(step.axis, line) or self.ring


def parallelize_context(
    model: nn.Module,
    step: ContextParallel,
    mesh: Mesh,
    groups: ContextGroups,
    via: ReduceScatterVia,
) -> None:
    """Let the layers of a model, or of a stage of it, attend over `step.axis`.

    Tensors may be on meta.

    Args:
        model: The model or stage, modified in place.
        step: How tokens are sharded.
        mesh: The mesh.
        groups: The process groups.
        via: The collective that sums gradients of all-gathered keys and values.
    """
    core_over = partial(_core_over_context, step=step, mesh=mesh, groups=groups, via=via)
    spans = groups.masks.spans
    groups.masks.register(_dropout_modules(model, groups.attending))
    if isinstance(model, Transformer):
        model.place_tokens(spans)
        group, registry = mesh.group((step.axis,)), mesh.registry
        tokens = SampleSlices(group, registry, [*all_spans(step)])
        route_slices(model, tokens, tokens.slices)
        if model.documents is not None:
            model.documents = SlicedDocuments(model.documents, step, group, registry)
        for module in list(model.modules()):
            core = getattr(module, "core", None)
            if isinstance(core, SdpaCore):
                module.core = core_over(core, core.scores.scale)
        return
    attending, known = groups.attending, dict(model.named_modules())
    assert attending is not None, "the facts of another model have what attends"
    give_positions(model, attending.positions, spans)
    for own in attending.modules:
        if own.name in known:  # else another stage has it
            attend_over_cp(known[own.name], core_over)


def _dropout_modules(model: nn.Module, attending: AttentionFacts | None) -> Iterator[nn.Module]:
    """Yield the modules whose code applies dropout.

    For models that are not built in, these are the observed ones, of which other stages may have
    some.
    """
    known = dict(model.named_modules())
    if attending is None:
        names = [name.rpartition(".")[0] for name, _ in dropout_rates(model)]
    else:
        names = [name for name in attending.dropping if name in known]
    yield from (known[name] for name in dict.fromkeys(names))


def _core_over_context(
    core: nn.Module,
    scale: float | None,
    *,
    step: ContextParallel,
    mesh: Mesh,
    groups: ContextGroups,
    via: ReduceScatterVia,
) -> nn.Module:
    """Return a core that attends over cp. `core` attends to all tokens it receives."""
    inner = core
    if groups.ring is not None:
        if step.gathers:
            inner = GatheredCore(groups.ring, scale, via, mesh.registry)
        else:
            inner = RingCore(groups.ring, scale, is_balanced=step.is_balanced)
    return inner if groups.ulysses is None else UlyssesCore(groups.ulysses, inner)


class RingCore(nn.Module):
    """Ring attention (Liu et al. 2023) with torch's templates.

    Keys and values circulate. Their gradients circulate with them, and reach their rank with one
    more hop. `is_balanced` is zigzag.
    """

    def __init__(self, group: dist.ProcessGroup, scale: float | None, *, is_balanced: bool) -> None:
        super().__init__()
        self.group, self.scale, self.is_balanced = group, scale, is_balanced

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return the attention output.

        The rules exclude sliding windows.

        Args:
            q_BHTD: The queries of this rank's tokens.
            k_BGTD: The keys of this rank's tokens, with G key-value heads.
            v_BGTD: The values of this rank's tokens.
            documents_BS: The document number of every token of the samples, ordered by rank. None
                if a sample is one document.

        Returns:
            The outputs [B, H, T, D] for this rank's tokens.
        """
        y_BHTD: Tensor = _RingAttention.apply(q_BHTD, k_BGTD, v_BGTD, documents_BS, self)
        return y_BHTD


class _RingAttention(torch.autograd.Function):
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
        # The template rescales: for each block of keys with output y' and log-sum-exp s', it sets y
        # to y - sigmoid(s' - s) * (y - y') and s to s - logsigmoid(s - s'), so no block overflows
        # (`_SDPAMerger._merge_one` in torch's _attention.py, 2.13).
        y_BHTD, sums_BHT, *others = ring_forward(
            core.group,
            kernel.forward,
            (q_BHTD, k_BGTD, v_BGTD),
            is_balanced=core.is_balanced,
            **kernel.arguments,
        )
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, y_BHTD, sums_BHT, documents_BS)
        ctx.core, ctx.others = core, _backward_arguments(others)
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
            **kernel.arguments,
            **ctx.others,
        )
        return *gradients, None, None


def _kernel_of_ring(query: Tensor, documents_BS: Tensor | None, core: RingCore) -> Kernel:
    """Return the kernel of one pass, with a mask for each hop if there are documents."""
    kernel = kernel_of(query, core.scale, is_masked=documents_BS is not None)
    if documents_BS is None:
        return kernel
    hops = HopKernel(kernel, documents_BS, core.group)
    return replace(kernel, forward=hops.forward, backward=hops.backward)


def _kernel_of_gathered(query: Tensor, mask_B1TS: Tensor | None, core: GatheredCore) -> Kernel:
    """Return the kernel of one pass, with the mask if there is one."""
    kernel = kernel_of(query, core.scale, is_masked=mask_B1TS is not None)
    if mask_B1TS is None:
        return kernel
    return replace(kernel, arguments={**kernel.arguments, "attn_mask": mask_B1TS})


class GatheredCore(nn.Module):
    """Attention on all-gathered keys and values (Llama 3, section 3.3.2).

    One call gathers keys and values, which are kept until backward. One call sums their gradients.
    Shards are contiguous: a rank attends to all tokens before its shard, and causally to its shard.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        scale: float | None,
        via: ReduceScatterVia,
        registry: TagRegistry,
    ) -> None:
        super().__init__()
        self.group, self.scale, self.via, self.registry = group, scale, via, registry

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        """Return the attention output.

        Args:
            q_BHTD: The queries of this rank's tokens.
            k_BGTD: The keys of this rank's tokens, with G key-value heads.
            v_BGTD: The values of this rank's tokens.
            mask_TT: The mask of documents for the rank's queries and all keys, [B, 1, T, S]. None
                if a sample is one document.

        Returns:
            The outputs [B, H, T, D] for this rank's tokens.
        """
        y_BHTD: Tensor = _GatheredAttention.apply(q_BHTD, k_BGTD, v_BGTD, mask_TT, self)
        return y_BHTD

    def gather_kv(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values over the ranks of cp.

        Args:
            k_BGTD: The keys of this rank's tokens, with G key-value heads.
            v_BGTD: The values of this rank's tokens, of equal shape.

        Returns:
            The keys and values [B, G, S, D] of all ranks, views of one tensor.
        """
        # One collective for both: a rank pays the latency once.
        own = torch.stack((k_BGTD, v_BGTD))  # [2, B, G, T, D]
        self.registry.tag(own, State.ACTIVATIONS)
        parts = all_gather_tensor(own[None], self.group)  # [N, 2, B, G, T, D]
        k_BGSD, v_BGSD = parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # a copy, in rank order
        return k_BGSD, v_BGSD

    def sum_kv_gradients(self, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the gradients of keys and values over the ranks of cp.

        Args:
            k_BGSD: This rank's gradient of the keys of all ranks.
            v_BGSD: This rank's gradient of the values of all ranks.

        Returns:
            The summed gradients [B, G, T, D] of this rank's keys and values.
        """
        # The reverse of `gather_kv`: one collective sums the gradients of keys and of values.
        both = torch.stack((k_BGSD, v_BGSD)).unflatten(3, (self.group.size(), -1))
        parts = both.permute(3, 0, 1, 2, 4, 5).contiguous()  # [N, 2, B, G, T, D]
        del both
        k_BGTD, v_BGTD = self._reduce_own_part(parts)
        return k_BGTD, v_BGTD

    def _reduce_own_part(self, parts: Tensor) -> Tensor:
        """Return this rank's part of [N, ...], summed over all ranks."""
        match self.via:
            case ReduceScatterVia.NATIVE:
                self.registry.tag(parts, State.ACTIVATIONS)
                return reduce_scatter_sum(parts, self.group)[0]
            case ReduceScatterVia.ALL_TO_ALL:
                self.registry.tag(parts, State.ACTIVATIONS, Collective.REDUCE_SCATTER)
                return exchange_parts(parts, self.group).sum(0)
            case _:
                assert_never(self.via)


class _GatheredAttention(torch.autograd.Function):
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
        num_before = core.group.rank() * q_BHTD.shape[-2]
        k_BGSD, v_BGSD = core.gather_kv(k_BGTD, v_BGTD)
        others: list[dict[str, Any]] = []

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for part, is_causal in _key_blocks(num_before, q_BHTD.shape[-2], mask_B1TS):
                y_BHTD, sums_BHT, *rest = kernel.forward(
                    q_BHTD, k_BGSD[..., part, :], v_BGSD[..., part, :], is_causal=is_causal,
                    **kernel.arguments,
                )  # fmt: skip
                others.append(_backward_arguments(rest))
                yield y_BHTD, sums_BHT

        # Each block's softmax is normalized over its keys alone. The log-sum-exp of each query
        # states how much of the full softmax a block has, so the merged output is exact.
        y_BHTD, sums_BHT = merge_attention(blocks(), q_BHTD.dtype)
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSD, y_BHTD, sums_BHT, mask_B1TS)
        ctx.core, ctx.others, ctx.num_before = core, others, num_before
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BGSD, v_BGSD, y_BHTD, sums_BHT, mask_B1TS = ctx.saved_tensors
        core, kernel = ctx.core, _kernel_of_gathered(q_BHTD, mask_B1TS, ctx.core)
        # The kernel gets the output and the log-sum-exp of all blocks. It computes probabilities
        # from them that are normalized over all keys, so gradients of blocks can be summed. Keys
        # after the rank's shard keep zeros, because no query of this rank attends to them.
        k_sum, v_sum = torch.zeros_like(k_BGSD), torch.zeros_like(v_BGSD)
        q_sum = torch.zeros_like(q_BHTD)
        blocks = _key_blocks(ctx.num_before, q_BHTD.shape[-2], mask_B1TS)
        for (part, is_causal), others in zip(blocks, ctx.others, strict=True):
            q_part, k_part, v_part, *_ = kernel.backward(
                grad_out=gradient_BHTD, query=q_BHTD, key=k_BGSD[..., part, :],
                value=v_BGSD[..., part, :], out=y_BHTD, logsumexp=sums_BHT, is_causal=is_causal,
                **kernel.arguments, **others,
            )  # fmt: skip
            q_sum += q_part
            # Written and not added: every key is in one block only.
            k_sum[..., part, :] = k_part
            v_sum[..., part, :] = v_part
        return q_sum, *core.sum_kv_gradients(k_sum, v_sum), None, None


def _key_blocks(
    num_before: int, num_own: int, mask_B1TS: Tensor | None
) -> Iterator[tuple[slice, bool]]:
    """Yield the keys that a rank's queries attend to, and whether the block is causal.

    These are the rank's keys and all earlier ones. With a mask, all keys are one block.
    """
    if mask_B1TS is not None:
        yield slice(None), False
        return
    yield slice(num_before, num_before + num_own), True
    if num_before:
        yield slice(0, num_before), False


# In the order in which aten::_scaled_dot_product_flash_attention returns them after output and
# log-sum-exp. Its backward takes them by these names (native_functions.yaml, 2.13).
_OF_CUDA = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


def _backward_arguments(others: list[Any]) -> dict[str, Any]:
    """Return the further arguments of a kernel's backward pass, by name.

    They are outputs of its forward pass after output and log-sum-exp. Flash attention on CUDA also
    returns its dropout mask, which backward does not take.
    """
    return dict(zip(_OF_CUDA, others[: len(_OF_CUDA)], strict=True)) if others else {}
