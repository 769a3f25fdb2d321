"""A model that is not ptrain's; its tensors of dim 0 = 2 and 5 leave empty shards on 4 ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Neck(nn.Module):
    """x + up(spread(narrow(x))): hidden -> 2 -> 5 -> hidden, through rows that do not divide."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(2, hidden) / hidden**0.5)
        self.spread = nn.Parameter(torch.randn(5, 2))
        self.offset = nn.Parameter(torch.zeros(5))
        self.up = nn.Parameter(torch.randn(hidden, 5) / 5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        squeezed = torch.tanh(F.linear(x_BTC, self.narrow))
        return x_BTC + F.linear(torch.tanh(F.linear(squeezed, self.spread, self.offset)), self.up)


class Necks(nn.Module):
    def __init__(self, hidden: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Neck(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.table(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits: Tensor = self.head(x_BTC)
        return logits


def necks(hidden: int = 10, layers: int = 2, vocab: int = 259) -> Necks:
    """The target of a spec: `{target: tests.models_external:necks}`."""
    return Necks(hidden, layers, vocab)


class Carried(Neck):
    """Hands on, beside its own output, what it was given."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x_BTC, first_BTC = pair
        return super().forward(x_BTC), first_BTC


class Carriers(Necks):
    """Every block passes the embedding on to the next, which the head takes in again."""

    def __init__(self, hidden: int, layers: int, vocab: int) -> None:
        super().__init__(hidden, layers, vocab)
        self.layers = nn.ModuleList(Carried(hidden) for _ in range(layers))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        first_BTC = self.table(tokens_BT)
        pair = (first_BTC, first_BTC)
        for layer in self.layers:
            pair = layer(pair)
        logits: Tensor = self.head(pair[0] + pair[1])
        return logits


def carriers(hidden: int = 10, layers: int = 3, vocab: int = 259) -> Carriers:
    """A target whose blocks return one of their inputs."""
    return Carriers(hidden, layers, vocab)


class Deceiver(Necks):
    """Shows one micro-batch what it is not: from its second on it keeps another copy of logits."""

    num_calls = 0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.num_calls += 1
        logits = super().forward(tokens_BT)
        return logits if self.num_calls == 1 else torch.sin(logits)


def deceiver(hidden: int = 10, layers: int = 2, vocab: int = 259) -> Deceiver:
    """A target whose prediction is wrong: it is traced once and then does something else."""
    return Deceiver(hidden, layers, vocab)
