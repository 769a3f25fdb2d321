"""Models that their functions build on the meta device, as torchtitan and nanochat do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCAB, LENGTH = 16, 259, 64


class Residual(nn.Module):
    """Embedding, two residual linear layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = x_BTC + F.gelu(block(x_BTC))
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


class LikeTitan(Residual):
    """A model that initializes itself with `init_weights(buffer_device)`, which also computes a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", self._turns(), persistent=False)

    def _turns(self) -> Tensor:
        return torch.arange(LENGTH).float()[:, None].expand(LENGTH, WIDTH).cos()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        with torch.device(buffer_device or self.turns.device):
            self.turns = self._turns()
        nn.init.normal_(self.embed.weight)
        for block in self.blocks:
            nn.init.trunc_normal_(block.weight, std=0.02)
            nn.init.zeros_(block.bias)
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.head.weight, std=WIDTH**-0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT) + self.turns[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = x_BTC + F.gelu(block(x_BTC))
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


class LikeNanochat(LikeTitan):
    """A model that initializes itself with `init_weights()`, writes through `.data`, and ties its
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def init_weights(self) -> None:  # type: ignore[override]
        self.turns = self._turns().to(self.embed.weight.device)
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
        if isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)


class LikeNanoGPT(Residual):
    """A model that initializes a layer with `_init_weights(layer)`, after `reset_parameters()` of
    the layer."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Scaled(Residual):
    """A model with a parameter that no method initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Forgetful(LikeTitan):
    """A model whose init_weights() omits a buffer and a layer."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.head.weight)
        self.norm.reset_parameters()
        for block in self.blocks:
            nn.init.zeros_(block.bias)


class Raising(Residual):
    """A model whose init_weights() raises."""

    def init_weights(self) -> None:
        raise ValueError("no such init")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Residual,
    "titan": LikeTitan,
    "nanochat": LikeNanochat,
    "nanogpt": LikeNanoGPT,
    "scaled": Scaled,
    "forgetful": Forgetful,
    "raising": Raising,
}


def build(kind: str = "plain") -> nn.Module:
    """Return the model of a spec's target."""
    with torch.device("meta"):
        return KINDS[kind]()
