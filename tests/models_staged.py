"""Language models whose embeddings, head and layers are written in many ways, for the pipeline
axis. Each has the same few blocks. Legend of shape suffixes: B samples, T tokens, C hidden, V
vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models_external import Pair

VOCAB, POSITIONS, HIDDEN, LAYERS = 260, 32, 16, 4


class Plain(nn.Module):
    """Two embeddings before the blocks, norm and head after them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.wpe = nn.Embedding(POSITIONS, HIDDEN)
        self.h = nn.ModuleList(self.block(index) for index in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def block(self, index: int) -> nn.Module:
        return Pair(HIDDEN, 4)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.through(self.embedded(tokens_BT))
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits

    def positions(self, tokens_BT: Tensor) -> Tensor:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens_BT) + self.wpe(self.positions(tokens_BT))
        return x

    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.h:
            x_BTC = block(x_BTC)
        return x_BTC


class Contained(nn.Module):
    """A model with both embeddings in a container that is never called."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleDict(
            {"tok": nn.Embedding(VOCAB, HIDDEN), "pos": nn.Embedding(POSITIONS, HIDDEN)}
        )
        self.h = nn.ModuleList(Pair(HIDDEN, 4) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb["tok"].weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.emb["tok"](tokens_BT) + self.emb["pos"](positions_T)
        for block in self.h:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


class Bare(Plain):
    """A model with positions and a logit scale as direct parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Parameter(torch.randn(POSITIONS, HIDDEN))
        self.scale = nn.Parameter(torch.ones(1))

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens_BT) + self.wpe[: tokens_BT.shape[1]]
        return x

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT) * self.scale


class Written(Plain):
    """A model that adds positions in place."""

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        x_BTC: Tensor = self.wte(tokens_BT)
        x_BTC += self.wpe(self.positions(tokens_BT))
        return x_BTC


class Scaled(Plain):
    """A model with scaled embeddings and soft-capped logits outside of modules."""

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        return super().embedded(tokens_BT) * HIDDEN**0.5

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 30 * torch.tanh(super().forward(tokens_BT) / 30)


class PairOfTwo(Pair):
    """A layer that returns its hidden states and the mean of each."""

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        y_BTC = super().forward(x_BTC)
        return y_BTC, y_BTC.mean()


class Tuples(Plain):
    """A model whose layers return a tuple with the hidden states."""

    def block(self, index: int) -> nn.Module:
        return PairOfTwo(HIDDEN, 4)

    def through(self, x_BTC: Tensor) -> Tensor:
        for block in self.h:
            x_BTC = block(x_BTC)[0]
        return x_BTC


class Balanced(Tuples):
    """A model whose layers return a loss with the hidden states, as a router does."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC, losses = self.embedded(tokens_BT), []
        for block in self.h:
            x_BTC, loss = block(x_BTC)
            losses.append(loss)
        logits: Tensor = self.head(self.ln_f(x_BTC)) + torch.stack(losses).sum()
        return logits


class Unlike(Plain):
    """A model with layers of two kinds, chosen by index."""

    def block(self, index: int) -> nn.Module:
        return Pair(HIDDEN, 4) if index % 2 else nn.Linear(HIDDEN, HIDDEN)

    def through(self, x_BTC: Tensor) -> Tensor:
        for index, block in enumerate(self.h):
            x_BTC = block(x_BTC if index % 2 else F.layer_norm(x_BTC, (HIDDEN,)))
        return x_BTC


class ByPlace(Plain):
    """A model whose layers receive a number by index, without a gradient."""

    def block(self, index: int) -> nn.Module:
        return Turned(HIDDEN, 4)

    def through(self, x_BTC: Tensor) -> Tensor:
        for index, block in enumerate(self.h):
            x_BTC = block(x_BTC, index + 1)
        return x_BTC


class Turned(Pair):
    def forward(self, x_BTC: Tensor, place: int) -> Tensor:
        return super().forward(x_BTC) / place


class Skips(Plain):
    """A model that adds the embeddings after every layer."""

    def through(self, x_BTC: Tensor) -> Tensor:
        first_BTC = x_BTC
        for block in self.h:
            x_BTC = block(x_BTC) + first_BTC
        return x_BTC


class Ended(Plain):
    """A model that adds the embeddings after the last layer."""

    def through(self, x_BTC: Tensor) -> Tensor:
        return super().through(x_BTC) + x_BTC


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair(HIDDEN, 4)

    def forward(self, x_BTC: Tensor, bias_TC: Tensor) -> Tensor:
        x: Tensor = self.inner(x_BTC) + bias_TC
        return x


class Relative(Plain):
    """A model whose layers share a learned position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(POSITIONS, HIDDEN)

    def block(self, index: int) -> nn.Module:
        return Biased()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        bias_TC = self.shared(self.positions(tokens_BT))
        x_BTC = self.embedded(tokens_BT)
        for block in self.h:
            x_BTC = block(x_BTC, bias_TC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


class Remembers(Relative):
    """A model whose layers receive the embeddings without a gradient."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedded(tokens_BT) + self.shared(self.positions(tokens_BT))
        first_BTC = x_BTC.detach()
        for block in self.h:
            x_BTC = block(x_BTC, first_BTC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


class Averages(Plain):
    """A model that keeps the mean of the embeddings in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = super().embedded(tokens_BT)
        self.mean.lerp_(x_BTC.detach().mean().to(self.mean.dtype), 0.5)
        return x_BTC


class Functional(Plain):
    """A model that uses the embedding as the head by a function."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.through(self.embedded(tokens_BT))
        return F.linear(self.ln_f(x_BTC), self.wte.weight)


class HeadFirst(Plain):
    """A model that defines the head before the embedding with the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, head = nn.Embedding(VOCAB, HIDDEN), self.head
        self._modules = {"head": head, **{n: m for n, m in self._modules.items() if n != "head"}}
        self.wte.weight = head.weight


class Centered(Pair):
    """A layer with a running mean that forward updates, and a non-contiguous output."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(HIDDEN, 4)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x_BTC: Tensor) -> Tensor:
        self.mean.lerp_(x_BTC.detach().mean((0, 1)), 0.1)
        x_BCT = super().forward(x_BTC - self.mean.clone()).transpose(1, 2).contiguous()
        return x_BCT.transpose(1, 2)


class Statistics(Plain):
    def block(self, index: int) -> nn.Module:
        return Centered()


class Dropping(Plain):
    """A model with functional dropout after the embeddings."""

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        return F.dropout(super().embedded(tokens_BT), 0.1, self.training)


KINDS: dict[str, type[Plain]] = {
    kind.__name__.lower(): kind
    for kind in (
        Plain, Bare, Written, Scaled, Tuples, Balanced, Unlike, ByPlace, Skips, Ended, Relative,
        Remembers, Averages, Functional, HeadFirst, Statistics, Dropping,
    )
}  # fmt: skip


SOUND = (
    "plain", "bare", "written", "scaled", "tuples", "unlike", "byplace", "statistics", "dropping",
)  # fmt: skip


def staged(kind: str) -> nn.Module:
    """Return the model of a spec's target, without a plan."""
    return KINDS[kind]()


def called_twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of two forward passes."""
    inputs_BT, targets_BT = batch
    logits_BTV = model(inputs_BT) + model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def contained(tied: bool = False) -> nn.Module:
    """Return a model whose plan names the container of its embeddings."""
    model = Contained(tied)
    model.pp_plan = ["emb", "h", "ln_f", "head"]  # type: ignore[assignment]
    return model
