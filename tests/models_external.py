"""A user model; its tensors of dim 0 = 2 and 5 leave empty shards on 4 ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.initialize import build_model
from ptrain.spec.model import Family, ModelShape


class Neck(nn.Module):
    """x + up(spread(narrow(x))): hidden -> 2 -> 5 -> hidden, with rows that ranks do not divide."""

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
    """Return the model of `{target: tests.models_external:necks}`."""
    return Necks(hidden, layers, vocab)


def normed() -> Necks:
    """Return the same model with torch's norm before the head."""
    model = necks()
    model.head = nn.Sequential(nn.RMSNorm(10), model.head)
    return model


class Carried(Neck):
    """A block that returns its input with its output."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x_BTC, first_BTC = pair
        return super().forward(x_BTC), first_BTC


class Carriers(Necks):
    """A model whose blocks pass the embedding on to the head."""

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
    """Return a model whose blocks return one of their inputs."""
    return Carriers(hidden, layers, vocab)


class Deceiver(Necks):
    """A model that keeps another copy of the logits from its second micro-batch on."""

    num_calls = 0

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.num_calls += 1
        logits = super().forward(tokens_BT)
        return logits if self.num_calls == 1 else torch.sin(logits)


def deceiver(hidden: int = 10, layers: int = 2, vocab: int = 259) -> Deceiver:
    """Return a model with a wrong prediction: it changes its behavior after the trace."""
    return Deceiver(hidden, layers, vocab)


class Mixing(nn.Module):
    """Attention whose head count follows from its tensors; keys are scaled by head."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.scale = nn.LayerNorm(head_dim)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        projections = (self.query, *self.key_value)
        query, key, value = (
            layer(x_BTC).view(*x_BTC.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in projections
        )
        mixed = F.scaled_dot_product_attention(query, self.scale(key), value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Pair(nn.Module):
    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.mixing = Mixing(hidden, head_dim)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.mixing(F.layer_norm(x_BTC, x_BTC.shape[-1:]))
        added: Tensor = x_BTC + self.down(F.gelu(self.up(F.layer_norm(x_BTC, x_BTC.shape[-1:]))))
        return added


class Pairs(nn.Module):
    """A model with blocks of column and row operators."""

    def __init__(self, hidden: int, layers: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Pair(hidden, 4) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.table(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits: Tensor = self.head(x_BTC)
        return logits


PAIRS_PLAN = {
    "layers.*.mixing": "whole input",
    "layers.*.mixing.query": "column",
    "layers.*.mixing.key_value.*": "column",
    "layers.*.mixing.scale": "shared",
    "layers.*.mixing.output": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "head",
}


def pairs(
    hidden: int = 16, layers: int = 2, vocab: int = 260, tied: bool = False, planned: bool = True
) -> Pairs:
    """Return a model with plans for tp and pp, or without if the spec has them."""
    model = Pairs(hidden, layers, vocab, tied)
    if planned:
        model.tp_plan = PAIRS_PLAN  # type: ignore[assignment]
        model.pp_plan = ("table", "layers", "head")  # type: ignore[assignment]
    return model


class Stubborn(Mixing):
    """Attention that derives the head count from its width, so it cannot be sharded."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        heads = x_BTC.shape[-1] // self.head_dim
        query = self.query(x_BTC).view(*x_BTC.shape[:2], heads, self.head_dim)
        output: Tensor = self.output(query.flatten(2))
        return output


def stubborn() -> Pairs:
    """Return a model that runs on one device, prints, and fails when its plan has sharded it."""
    print("building")
    model = pairs()
    for layer in model.layers:
        layer.mixing = Stubborn(16, 4)
    return model


def ours(family: str = "llama") -> nn.Module:
    """Return a built-in model."""
    shape = ModelShape(
        family=Family(family), layers=2, hidden=32, heads=4, kv_heads=4, ffn=40, vocab=260
    )
    return build_model(shape, sequence=16)
