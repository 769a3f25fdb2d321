"""Norms over the last dimension, in at least fp32.

Legend of shape suffixes: B samples, T tokens, C features.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.numerics import widen
from ptrain.spec.block import Norm
from ptrain.spec.model import ModelShape


class RMSNorm(nn.Module):
    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide_BTC = widen(x_BTC)
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTC * scale_BT1).to(x_BTC.dtype) * self.weight


class PlusOneRMSNorm(nn.Module):
    """Gemma's: a weight of 0 leaves what is normed, and all is multiplied before it is cast."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x_BTC: Tensor) -> Tensor:
        wide_BTC = widen(x_BTC)
        scale_BT1 = torch.rsqrt(wide_BTC.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTC * scale_BT1 * (1.0 + widen(self.weight))).to(x_BTC.dtype)


class LayerNorm(nn.Module):
    def __init__(self, features: int, eps: float, *, has_bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if has_bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        # The weight is widened last, so that its gradient comes first whether or not it is a copy.
        bias_C = None if self.bias is None else widen(self.bias)
        weight_C = widen(self.weight)
        y_BTC = F.layer_norm(widen(x_BTC), weight_C.shape, weight_C, bias_C, self.eps)
        return y_BTC.to(x_BTC.dtype)


def norm_of(shape: ModelShape, features: int) -> nn.Module:
    """Return a norm of the model's kind."""
    match shape.norm:
        case Norm.RMS:
            return RMSNorm(features, shape.norm_eps)
        case Norm.RMS_PLUS_ONE:
            return PlusOneRMSNorm(features, shape.norm_eps)
        case Norm.LAYER:
            return LayerNorm(features, shape.norm_eps)
        case Norm.LAYER_WITHOUT_BIAS:
            return LayerNorm(features, shape.norm_eps, has_bias=False)
        case kind:
            assert_never(kind)
