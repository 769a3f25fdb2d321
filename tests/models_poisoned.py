"""A model with finite losses in which one rank's gradient of one parameter is not finite."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode

from tests.models_external import Neck, Necks

TENSOR = "layers.1.spread"
ROWS, COLUMNS = 5, 2


class _Poison(torch.autograd.Function):
    """An identity that changes one element of the gradient on one rank in one backward pass."""

    @staticmethod
    def forward(context: Any, weight: Tensor, neck: PoisonedNeck) -> Tensor:
        context.neck = neck
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        neck = context.neck
        if detect_fake_mode() is None:
            neck.passes += 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            if (neck.passes, rank) == (neck.at, neck.rank):
                gradient = gradient.clone()
                gradient[-1, -1] = neck.value
        return gradient, None


class PoisonedNeck(Neck):
    def __init__(self, hidden: int, *, at: int, rank: int, value: float) -> None:
        super().__init__(hidden)
        self.at, self.rank, self.value, self.passes = at, rank, value, 0

    def forward(self, x_BTC: Tensor) -> Tensor:
        spread = _Poison.apply(self.spread, self)
        squeezed = torch.tanh(F.linear(x_BTC, self.narrow))
        return x_BTC + F.linear(torch.tanh(F.linear(squeezed, spread, self.offset)), self.up)


def necks(at: int = 0, rank: int = 1, value: str = "nan", hidden: int = 16) -> Necks:
    """Return a model in which the last element of TENSOR is `value` in backward pass `at` (from 1;
    0: never) of rank `rank`."""
    model = Necks(hidden, 3, 259)
    model.layers[1] = PoisonedNeck(hidden, at=at, rank=rank, value=float(value))
    return model


BAD = 31  # the token of samples that poison


class ReadingNecks(Necks):
    """A model whose `layers.1` returns NaN for samples with the token BAD."""

    def __init__(self, hidden: int, where: str) -> None:
        super().__init__(hidden, 3, BAD + 1)
        self.layers[1] = ReadingNeck(hidden, where)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        is_good = (tokens_BT != BAD).all().to(self.head.weight.dtype)
        x_BTC = self.layers[1](self.layers[0](self.table(tokens_BT)), is_good)
        logits: Tensor = self.head(self.layers[2](x_BTC))
        return logits


class ReadingNeck(Neck):
    def __init__(self, hidden: int, where: str) -> None:
        super().__init__(hidden)
        self.where = where

    def forward(self, x_BTC: Tensor, is_good: Tensor) -> Tensor:  # type: ignore[override]
        spread = self.spread
        if self.where == "output":
            x_BTC = x_BTC * (is_good / is_good)
        if self.where == "gradient":  # of sqrt at 0, where its value is finite
            x_BTC = x_BTC + (x_BTC * 0 + is_good).sqrt()
        if self.where == "parameter":
            spread = spread + (spread * 0 + is_good).sqrt()
        squeezed = torch.tanh(F.linear(x_BTC, self.narrow))
        return x_BTC + F.linear(torch.tanh(F.linear(squeezed, spread, self.offset)), self.up)


def reading(where: str = "", hidden: int = 8) -> ReadingNecks:
    """Return a model that fails by its samples: in the `output`, the `gradient` or a `parameter` of
    a layer, or nowhere."""
    return ReadingNecks(hidden, where)


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy, or NaN for samples with the token BAD."""
    is_good = (batch[0] != BAD).all().to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) * (is_good / is_good)
