"""A decoder's feed-forward part, which takes all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.spec.block import Activation, Bias
from ptrain.spec.model import ModelShape


class FeedForward(nn.Module):
    """`width`: features between its projections."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        has_bias = shape.bias is Bias.ALL
        self.activate = activation_of(shape)
        is_gated = shape.activation.is_gated
        self.gate = nn.Linear(shape.hidden, width, bias=has_bias) if is_gated else None
        self.up = nn.Linear(shape.hidden, width, bias=has_bias)
        self.down = nn.Linear(width, shape.hidden, bias=has_bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor
        if self.gate is None:
            y = self.down(self.activate(self.up(x_BTC)))
        else:
            y = self.down(self.activate(self.gate(x_BTC)) * self.up(x_BTC))
        return y


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_GELU_BY_TANH = partial(F.gelu, approximate="tanh")
_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _GELU_BY_TANH,
    Activation.RELU2: _squared_relu,
    Activation.SWIGLU: F.silu,
    Activation.GEGLU: _GELU_BY_TANH,
}


def activation_of(shape: ModelShape) -> Callable[[Tensor], Tensor]:
    """Return what stands between the projections of a feed-forward part."""
    return _FUNCTIONS[shape.activation]
