"""Language models that train differently than they evaluate, or draw random numbers outside of
their blocks, for the pipeline axis. Legend of shape suffixes: B samples, T tokens, C hidden, V
vocabulary, L layers, N targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models_staged import HIDDEN, LAYERS, Plain, Relative


class TrainsAlong(Plain):
    """A model whose embeddings scale the logits in training only, without a gradient."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedded(tokens_BT)
        mean = x_BTC.detach().mean() if self.training else 0.0
        logits: Tensor = self.head(self.ln_f(self.through(x_BTC))) * (1 + 10 * mean)
        return logits


class TrainsAlongDropping(TrainsAlong):
    """Like `TrainsAlong`, with dropout in the layers."""

    def block(self, index: int) -> nn.Module:
        return nn.Sequential(super().block(index), nn.Dropout(0.1))


class Masked(Relative):
    """A model that draws one mask for all layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.shared

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask_TC = (torch.rand(tokens_BT.shape[1], HIDDEN, device=tokens_BT.device) > 0.5).float()
        x_BTC = self.embedded(tokens_BT)
        for block in self.h:
            x_BTC = block(x_BTC, mask_TC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


class Locked(Plain):
    """A model that drops one mask before the layers and applies it between them."""

    def through(self, x_BTC: Tensor) -> Tensor:
        mask_BTC = F.dropout(torch.ones_like(x_BTC), 0.5, self.training)
        for block in self.h:
            x_BTC = block(x_BTC) * mask_BTC
        return x_BTC


class LockedByModule(Plain):
    """A model with a module that draws the mask, which is applied to the output of the last
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def through(self, x_BTC: Tensor) -> Tensor:
        mask_BTC = self.drop(torch.ones_like(x_BTC))
        for block in self.h:
            x_BTC = block(x_BTC)
        return x_BTC * mask_BTC


class MaskedBetween(Plain):
    """A model with a module that draws a mask after the first layer for all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def through(self, x_BTC: Tensor) -> Tensor:
        x_BTC = self.h[0](x_BTC)
        mask_BTC = self.drop(torch.ones_like(x_BTC))
        for block in self.h[1:]:
            x_BTC = block(x_BTC * mask_BTC)
        return x_BTC


class DropsBetween(Plain):
    """A model with dropout between its layers."""

    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.h:
            x_BTC = F.dropout(block(x_BTC), 0.1, self.training)
        return x_BTC


class DropsLayers(Plain):
    """A model that skips random layers, drawn before each."""

    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.h:
            if not (self.training and torch.rand(()) < 1e-9):
                x_BTC = block(x_BTC)
        return x_BTC


class DropsLayersAtOnce(Plain):
    """A model that skips random layers, drawn before all; most passes run all layers."""

    def through(self, x_BTC: Tensor) -> Tensor:
        keep_L = torch.rand(LAYERS) > 0.3 * self.training
        for block, keep in zip(self.h, keep_L.tolist(), strict=True):
            x_BTC = block(x_BTC) if keep else x_BTC
        return x_BTC


class DropsAtEnds(Plain):
    """A model with a dropout module before, between and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def through(self, x_BTC: Tensor) -> Tensor:
        x_BTC = self.drop(x_BTC)
        for block in self.h:
            x_BTC = self.drop(block(x_BTC))
        return F.dropout(x_BTC, 0.1, self.training)


KINDS: dict[str, type[Plain]] = {
    kind.__name__.lower(): kind
    for kind in (
        TrainsAlong, TrainsAlongDropping, Masked, Locked, LockedByModule,
        MaskedBetween, DropsBetween, DropsLayers, DropsLayersAtOnce, DropsAtEnds,
    )
}  # fmt: skip


def drawing(kind: str) -> nn.Module:
    """Return the model of a spec's target, without a plan."""
    return KINDS[kind]()


def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss with random weights, drawn before the model is called."""
    inputs_BT, targets_BT = batch
    weights_N = torch.rand(targets_BT.numel())
    losses_N = F.cross_entropy(
        model(inputs_BT).flatten(0, 1), targets_BT.flatten(), reduction="none"
    )
    return (losses_N * weights_N).mean()
