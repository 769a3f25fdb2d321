"""A small user model with a tied head and a buffer in its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A model from tokens to logits by repeated means of earlier tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(259, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 259, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            hidden_BTD = hidden_BTD + layer(hidden_BTD.cumsum(1) * self.scale).tanh()
        logits_BTV: Tensor = self.head(hidden_BTD)
        return logits_BTV


def build(width: int) -> nn.Module:
    return Recurrent(width)


class OddState(Recurrent):
    """A model whose state has scalars, integer buffers, and a buffer with two names."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_parameter("gain", param=nn.Parameter(torch.tensor(1.0)))
        self.register_buffer("shift", torch.tensor(0.5))
        self.register_buffer("mask", torch.ones(3, width).tril().bool())
        self.register_buffer("count", torch.tensor(7))
        self.layers[1].register_buffer("scale", self.scale)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = super().forward(tokens_BT)
        return logits_BTV * self.gain + self.shift * self.mask.sum() + self.count


def build_marked(width: int) -> nn.Module:
    return OddState(width)
