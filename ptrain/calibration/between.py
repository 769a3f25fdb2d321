"""What a rank computes between two things that are measured, as in a step: else caches would hold
what no step finds in them, and threads that send would have a core to themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SIDE, _PRODUCTS = 256, 4  # a millisecond or two of a processor


def compute(device: torch.device) -> None:
    """Compute for a while; on a GPU nothing, whose host waits for none of it."""
    if device.type == "cpu":
        factor = torch.ones(_SIDE, _SIDE)
        for _ in range(_PRODUCTS):
            factor @ factor


class _Computes(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        compute(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        compute(gradient.device)
        return gradient


class Between(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Computes in forward and in backward, and hands on what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handed: torch.Tensor = _Computes.apply(x)
        return handed
