"""Cross entropy of the next tokens, with one buffer of the logits' size.

For bf16 logits, `F.cross_entropy` allocates up to 14 bytes per logit at once: the logits, their
log-probabilities in fp32, two gradients in fp32 and one in bf16. Here one buffer in at least fp32
holds in turn the logits minus their maximum, their exponentials, which backward needs, and their
gradient: 8 bytes per logit with the logits and the gradient in bf16.

Logits may be a DTensor that is sharded over the vocabulary. Forward then all-reduces the maximum,
the sum and the target's logit of each token; backward communicates nothing.

Shapes: N tokens, V words of this rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ptrain.internals.functional_collectives import all_reduce_max, all_reduce_sum
from ptrain.models.numerics import widen
from ptrain.units import ceil_div

IGNORED = -100  # excludes a token from the loss: the `ignore_index` of `F.cross_entropy`


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor, padding: int = 0) -> Tensor:
    """Return the summed cross entropy of all tokens in nats.

    Args:
        logits_BTV: Logits [B, T, V], or a DTensor that is sharded over the vocabulary.
        targets_BT: Target tokens [B, T]; `IGNORED` excludes a token.
        padding: Number of last logits that belong to no token.

    Returns:
        A plain 0-d tensor in at least fp32, equal on all ranks of the DTensor.

    Raises:
        ValueError: Logits and targets have different numbers of tokens.
    """
    group, first = None, 0
    tokens = logits_BTV.shape[-1] - padding
    if isinstance(logits_BTV, DTensor):
        mesh, vocabulary = logits_BTV.device_mesh, logits_BTV.shape[-1]
        (placement,) = logits_BTV.placements
        assert placement.is_shard(logits_BTV.dim() - 1), "the logits are cut over the vocabulary"
        group, first = mesh.get_group(), ceil_div(vocabulary, mesh.size()) * mesh.get_local_rank()
        logits_BTV = logits_BTV.to_local()
    count, expected = logits_BTV.shape[:-1].numel(), targets_BT.numel()
    if count != expected:  # the message of `F.cross_entropy`
        raise ValueError(
            f"Expected input batch_size ({count}) to match target batch_size ({expected})."
        )
    loss: Tensor = _CrossEntropySum.apply(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), group, first, max(0, tokens - first)
    )
    return loss


def fusible_loss_sum(logits_BTV: Tensor, targets_BT: Tensor, padding: int = 0) -> Tensor:
    """Return the loss of `token_loss_sum` by operators that a compiler fuses.

    Run one by one, they need two buffers of the logits' size more. A compiler would not overwrite
    the buffer of `_CrossEntropySum` if logits are narrower than fp32.

    Args:
        logits_BTV: Logits [B, T, V], unsharded.
        targets_BT: Target tokens [B, T]; `IGNORED` excludes a token.
        padding: Number of last logits that belong to no token.

    Returns:
        The summed cross entropy in nats, 0-d in at least fp32.
    """
    logits_NV = widen(logits_BTV).flatten(0, 1)
    own_NW = logits_NV[:, : logits_NV.shape[1] - padding] if padding else logits_NV
    return F.cross_entropy(own_NW, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")


class _Targets(NamedTuple):
    """The targets of all tokens on this rank, each field [N, 1].

    Attributes:
        is_ignored: The target is `IGNORED`.
        is_elsewhere: The target is `IGNORED` or in another rank's shard of the vocabulary.
        columns: The target's column in this rank's logits, 0 if it is elsewhere.
    """

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
    """The summed cross entropy of logits [N, V], a shard of the vocabulary from `first` on.

    The first `words` columns, at least one, are of tokens; the others are padding.
    """

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
        # No gradient trains the logits of padding. If a large one set the maximum, the exponentials
        # of real words would underflow.
        own_NW = logits_NV[:, :words] if is_padded else logits_NV
        largest_N1 = widen(own_NW.amax(-1, keepdim=True))
        if group is not None:
            # All ranks need one maximum, because they add their exponentials. It cancels in the
            # result, so it needs no gradient.
            largest_N1 = all_reduce_max(largest_N1, group)
        if logits_NV.dtype is largest_N1.dtype:
            buffer_NV = logits_NV - largest_N1
        else:  # one mixed-dtype subtraction would copy the logits twice on CPUs
            buffer_NV = widen(logits_NV).sub_(largest_N1)
        if is_padded:
            buffer_NV[
                :, words:
            ] = -math.inf  # exp(-inf) = 0: padding adds neither loss nor gradient
        ignored, elsewhere, places = _locate_targets(targets_N, logits_NV.shape[1], group, first)
        # Before the exponential, which overwrites the buffer. A rank without the target adds 0.
        of_targets_N1 = buffer_NV.gather(1, places).masked_fill_(elsewhere, 0)
        sums_N1 = buffer_NV.exp_().sum(-1, keepdim=True)
        if group is not None:
            sums_N1 = all_reduce_sum(sums_N1, group)
            of_targets_N1 = all_reduce_sum(of_targets_N1, group)
        # The places are computed again in backward: they are [N, 1] int64 and booleans, more bytes
        # than the targets.
        ctx.save_for_backward(buffer_NV, sums_N1, targets_N)
        ctx.dtype, ctx.group, ctx.first = logits_NV.dtype, group, first
        return (sums_N1.log() - of_targets_N1).masked_fill_(ignored, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Turn the saved exponentials into the gradient, in place.

        A second backward raises: `save_for_backward` detects the in-place change.
        """
        buffer_NV, sums_N1, targets_N = ctx.saved_tensors
        targets = _locate_targets(targets_N, buffer_NV.shape[1], ctx.group, ctx.first)
        # d loss / d logit = softmax - 1 at the target. The softmax is the saved exponential over
        # the sum of all ranks, so backward communicates nothing.
        buffer_NV.mul_((gradient / sums_N1).masked_fill_(targets.is_ignored, 0))
        # Where the target is elsewhere, `columns` is 0 and -gradient would be added to that word.
        less_N1 = (-gradient).expand_as(sums_N1).masked_fill(targets.is_elsewhere, 0)
        buffer_NV.scatter_add_(1, targets.columns, less_N1)
        return buffer_NV.to(ctx.dtype), None, None, None, None
