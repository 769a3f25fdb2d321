"""Balance losses of routers, and the counts that they need of all tokens of the layer's samples.

Legend of shape suffixes: B samples, T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptrain.spec.experts import Router
from ptrain.spec.model import ModelShape


class SampleTokens:
    """The tokens of samples that a rank has: all. `slices` are those that a sample's are cut
    into."""

    slices = 1

    def summed(self, counts_BE: Tensor) -> Tensor:
        """Return the counts of all tokens, of those of the rank's own."""
        return counts_BE

    def before(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        """Return how many choices of all tokens fall on a choice's expert before it, of those of
        the rank's own that do: first choices come before second ones, earlier tokens before later
        ones."""
        return before_BKT


class Balance(nn.Module):
    """The losses of one router, summed over the samples of a micro-batch (0-d). Each sample's has
    all of its tokens and no other's, so that it is the same wherever samples are computed, and
    `weight`, one over the samples of the global batch, makes their mean of the sum; where several
    ranks route the same tokens, or slices of a sample's, each adds its share of it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape, self.weight = shape, 1.0
        self.scale: Tensor | None = None  # 0-d: of the loss that backward begins with
        self.tokens = SampleTokens()

    @property
    def is_wanted(self) -> bool:
        """Whether there is such a loss."""
        return bool(self.shape.aux_loss or self.shape.z_loss)

    def forward(self, logits_BTE: Tensor, scores_BTE: Tensor, chosen_BTK: Tensor) -> Tensor:
        """Return the sum of the samples' losses, in at least fp32."""
        losses = []
        if self.shape.aux_loss:
            losses.append(self.shape.aux_loss * self._unevenness(scores_BTE, chosen_BTK))
        if self.shape.z_loss:  # Zoph et al. 2022 (arXiv:2202.08906), equation 5
            squares_BT = logits_BTE.logsumexp(-1).square()
            losses.append(self.shape.z_loss * squares_BT.mean(1).sum())
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    def _unevenness(self, scores_BTE: Tensor, chosen_BTK: Tensor) -> Tensor:
        """The sum over experts of the share of choices that fell on one and its mean score, times
        their number: 1 where both are even (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6;
        sample by sample as DeepSeek-V3, arXiv:2412.19437, equations 17 to 20)."""
        num_experts = scores_BTE.shape[-1]
        if self.shape.router is Router.SIGMOID:  # of each by itself, whose sum may be anything
            scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        chosen_BQ = chosen_BTK.flatten(1)
        ones_BQ = torch.ones_like(chosen_BQ, dtype=scores_BTE.dtype)
        counts_BE = ones_BQ.new_zeros(len(chosen_BQ), num_experts).scatter_add(
            1, chosen_BQ, ones_BQ
        )
        choices = chosen_BQ.shape[1] * self.tokens.slices
        shares_BE = self.tokens.summed(counts_BE) / choices
        return num_experts * (shares_BE * scores_BTE.mean(1)).sum()


def weigh(model: nn.Module, weight: float) -> None:
    """Let the routers' losses of a model be multiplied by this too in a step's loss."""
    for module in model.modules():
        if isinstance(module, Balance):
            module.weight *= weight


def scale_losses(model: nn.Module, scale: Tensor) -> None:
    """Let the routers' losses of a model be multiplied by a scale (0-d) as the step's loss is: by
    what it is when a backward pass comes to them."""
    for module in model.modules():
        if isinstance(module, Balance):
            module.scale = scale


def with_loss(x: Tensor, loss: Tensor, weight: float, scale: Tensor | None = None) -> Tensor:
    """Return `x`, in whose backward pass `loss` (0-d) has the gradient `weight` too, times
    `scale`."""
    y: Tensor = _WithLoss.apply(x, loss, weight, scale)
    return y


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float, scale: Tensor | None) -> Tensor:
        ctx.weight, ctx.scale, ctx.dtype = weight, scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.scale is None:
            of_loss = gradient.new_full((), ctx.weight, dtype=ctx.dtype)
        else:
            of_loss = ctx.scale.to(ctx.dtype) * ctx.weight
        return gradient, of_loss, None, None
