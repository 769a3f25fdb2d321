"""The cross entropies of the next tokens, with one buffer of the logits' size.

Of logits in bf16, `F.cross_entropy` has up to 14 bytes of each at once: the logits, their
log-probabilities in fp32, two gradients in fp32 and that in bf16. Here a buffer in at least fp32
becomes one after the other the logits less their maximum, their exponentials, which backward needs,
and their gradient: 8 bytes with the logits and the gradient in bf16.

Logits may be cut over the vocabulary, as a DTensor: then the ranks' maxima, sums and logits of the
targets are reduced, three numbers of each token, and nothing is sent in backward.

Shapes: N tokens, V words of this rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ptrain.internals.functional_collectives import all_reduce_max, all_reduce_sum
from ptrain.models.numerics import widen
from ptrain.units import ceil_div

IGNORED = -100  # a target that counts for nothing


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor, padding: int = 0) -> Tensor:
    """Return the sum of the tokens' cross entropies in nats, in at least fp32; a plain tensor, of
    logits that are cut over the vocabulary too. The last `padding` logits are of no token."""
    group, first = None, 0
    tokens = logits_BTV.shape[-1] - padding
    if isinstance(logits_BTV, DTensor):
        mesh, vocabulary = logits_BTV.device_mesh, logits_BTV.shape[-1]
        (placement,) = logits_BTV.placements
        assert placement.is_shard(logits_BTV.dim() - 1), "the logits are cut over the vocabulary"
        group, first = mesh.get_group(), ceil_div(vocabulary, mesh.size()) * mesh.get_local_rank()
        logits_BTV = logits_BTV.to_local()
    count, expected = logits_BTV.shape[:-1].numel(), targets_BT.numel()
    if count != expected:  # in the words of torch's own cross entropy
        raise ValueError(
            f"Expected input batch_size ({count}) to match target batch_size ({expected})."
        )
    loss: Tensor = _CrossEntropySum.apply(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), group, first, max(0, tokens - first)
    )
    return loss


class _Targets(NamedTuple):
    """Of each token, [N, 1]: whether its target counts for nothing, whether it does or is no word
    of this rank, and the word's place there (0 of any other)."""

    is_ignored: Tensor
    is_elsewhere: Tensor
    columns: Tensor


def _locate_targets(
    targets_N: Tensor, words: int, group: dist.ProcessGroup | None, first: int
) -> _Targets:
    targets_N1 = targets_N.unsqueeze(1)
    ignored = elsewhere = targets_N1 == IGNORED
    if group is not None:
        targets_N1 = targets_N1 - first
        elsewhere = ignored | (targets_N1 < 0) | (targets_N1 >= words)
    return _Targets(ignored, elsewhere, targets_N1.masked_fill(elsewhere, 0))


class _CrossEntropySum(torch.autograd.Function):
    """Of logits [N, V] whose first word is the vocabulary's number `first`; the first `words` of
    them are of tokens, at least one, and the others padding."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        words: int,
    ) -> Tensor:
        is_padded = words < logits_NV.shape[1]
        own_NW = logits_NV[:, :words] if is_padded else logits_NV
        largest_N1 = widen(own_NW.amax(-1, keepdim=True))
        if group is not None:
            largest_N1 = all_reduce_max(largest_N1, group)
        if logits_NV.dtype is largest_N1.dtype:
            buffer_NV = logits_NV - largest_N1
        else:  # in one step a processor would copy the logits a second time
            buffer_NV = widen(logits_NV).sub_(largest_N1)
        if is_padded:
            buffer_NV[:, words:] = -math.inf  # whose exponentials and gradients are 0
        ignored, elsewhere, places = _locate_targets(targets_N, logits_NV.shape[1], group, first)
        of_targets_N1 = buffer_NV.gather(1, places).masked_fill_(elsewhere, 0)
        sums_N1 = buffer_NV.exp_().sum(-1, keepdim=True)
        if group is not None:
            sums_N1 = all_reduce_sum(sums_N1, group)
            of_targets_N1 = all_reduce_sum(of_targets_N1, group)
        ctx.save_for_backward(buffer_NV, sums_N1, targets_N)
        ctx.dtype, ctx.group, ctx.first = logits_NV.dtype, group, first
        return (sums_N1.log() - of_targets_N1).masked_fill_(ignored, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Once: the exponentials become the gradient. torch raises where they are read again."""
        buffer_NV, sums_N1, targets_N = ctx.saved_tensors
        targets = _locate_targets(targets_N, buffer_NV.shape[1], ctx.group, ctx.first)
        buffer_NV.mul_((gradient / sums_N1).masked_fill_(targets.is_ignored, 0))
        less_N1 = (-gradient).expand_as(sums_N1).masked_fill(targets.is_elsewhere, 0)
        buffer_NV.scatter_add_(1, targets.columns, less_N1)
        return buffer_NV.to(ctx.dtype), None, None, None, None
