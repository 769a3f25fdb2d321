"""Invalid models: their code raises, needs other inputs or returns other values. A test names one
by its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import input_error
from tests.models_external import Necks

Change = Callable[[Tensor], Any]
CHANGES: dict[str, Change] = {
    "tuple": lambda logits: (logits, None),
    "dict": lambda logits: {"logits": logits},
    "flat": lambda logits: logits.flatten(0, 1),
    "last": lambda logits: logits[:, -1],
    "swapped": lambda logits: logits.transpose(0, 1),
    "integers": lambda logits: logits.argmax(-1, keepdim=True),
    "complex": lambda logits: logits.to(torch.complex64),
    "number": lambda logits: 3,
    "detached": lambda logits: logits.detach(),
}


class Changed(Necks):
    """A model that returns changed logits."""

    pp_plan = ("table", "layers", "head")

    def __init__(self, change: Change) -> None:
        super().__init__(10, 2, 259)
        self.change = change

    def forward(self, tokens_BT: Tensor) -> Any:
        return self.change(super().forward(tokens_BT))


def changed(how: str) -> Changed:
    """Return a model whose forward changes its logits: see CHANGES."""
    return Changed(CHANGES[how])


class Raising(Necks):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        raise ZeroDivisionError("never mind")


class Masked(Necks):
    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens_BT) * mask_BT[..., None]


class OfReals(nn.Module):
    def __init__(self, *_: int) -> None:
        super().__init__()
        self.head = nn.Linear(10, 259)

    def forward(self, x_BTC: Tensor) -> Tensor:
        logits: Tensor = self.head(x_BTC)
        return logits


class Short(Necks):
    """A model with fewer positions than a sample has tokens."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = nn.functional.embedding(torch.arange(tokens_BT.shape[1]), self.layers[0].narrow)
        return super().forward(tokens_BT) + x_BTC.sum()


KINDS = {"raising": Raising, "masked": Masked, "of reals": OfReals, "short": Short}


def failing(kind: str) -> nn.Module:
    """Return a model whose forward raises: see KINDS."""
    return KINDS[kind](10, 2, 259)


def raises(error: str) -> None:
    """Raise in the target."""
    raise {"KeyError": KeyError, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[
        error
    ]("no such weights")


def refuses() -> None:
    """Raise ptrain's error with the reason."""
    raise input_error("model.arguments", "too wide")


class Unplanned(Necks):
    """A model whose plans raise."""

    @property
    def pp_plan(self) -> tuple[str, ...]:
        raise RuntimeError("no plan yet")

    tp_plan = pp_plan


def unplanned() -> Unplanned:
    """Return a model whose plans raise."""
    return Unplanned(10, 2, 259)


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(260, 16), nn.LayerNorm(16)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC: Tensor = self.norm(self.table(tokens_BT))
        return x_BTC


class Nested(nn.Module):
    """A model whose embeddings are a module of modules."""

    pp_plan = ("front", "layers", "head")

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.front = Front()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 260, bias=False)
        if tied:
            self.head.weight = self.front.table.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.front(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits: Tensor = self.head(x_BTC)
        return logits


def nested(tied: bool = True) -> Nested:
    """Return a valid model whose embedding is a nested module."""
    return Nested(tied)
