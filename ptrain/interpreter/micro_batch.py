"""The loss of one micro-batch, as every program and the tracer compute it."""

from __future__ import annotations

from torch import Tensor, nn

from ptrain.models.loss import token_loss_sum


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, global_tokens: int) -> Tensor:
    """This micro-batch's share of the global mean: a sum over a global count, so that adding the
    shares of all micro-batches and ranks needs no further scaling."""
    return token_loss_sum(model(inputs), targets) / global_tokens
