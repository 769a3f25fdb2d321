"""Shared parts of the corpus scripts: tiny models, global batches, and a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ptrain

FEATURES, VOCAB, WIDTH, LENGTH = 8, 16, 8, 8
Nothing = Callable[[], Any]
LossOf = Callable[[nn.Module, Any], Tensor]


class Regressor(nn.Module):
    """[rows, 8] -> [rows, 1]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, width)
        self.down = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class TokenWriter(nn.Module):
    """A language model of one block: tokens [batch, length] -> logits [batch, length, vocab].

    `gather` brings keys and values of the whole sample where a rank has a slice of its tokens.
    """

    def __init__(self, *, causal: bool = True, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.causal = causal
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        start: int = 0,
        gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        mask_start: int | None = None,
    ) -> Tensor:
        places = torch.arange(start, start + tokens.shape[1])
        x = self.embed(tokens) + self.position(places)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        k, v = gather(k), gather(v)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        if self.causal:
            first = start if mask_start is None else mask_start
            seen = torch.arange(first, first + tokens.shape[1])[:, None] >= torch.arange(k.shape[1])
            scores = scores.masked_fill(~seen, -torch.inf)
        x = x + self.proj(scores.softmax(dim=-1) @ v)
        return self.head(x + self.mlp(x))


def regressor(**options: Any) -> Regressor:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return Regressor(**options)


def writer(**options: Any) -> TokenWriter:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return TokenWriter(**options)


def row_batches(num_steps: int = 6, size: int = 8) -> Tensor:
    """Return global batches [steps, size, 8 + 1] of features and a target that can be learnt."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_steps, size, FEATURES, generator=generator)
    target = features[..., :2].sum(-1, keepdim=True) + 0.5
    return torch.cat([features, target], dim=-1)


def token_batches(num_steps: int = 6, size: int = 4) -> Tensor:
    """Return global batches [steps, size, 8 + 1] of tokens that mostly follow a rule."""
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(0, VOCAB, (num_steps, size), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(0, 2, (num_steps, size), generator=generator)
        tokens.append((tokens[-1] * 3 + 1 + noise) % VOCAB)
    return torch.stack(tokens, dim=-1)


def regression_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.mse_loss(model(rows[:, :FEATURES]), rows[:, FEATURES:])


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | options))


def looped(
    model: nn.Module,
    *,
    loss: LossOf = regression_loss,
    optimizer: Any = None,
    before_update: Nothing = lambda: None,
    after_update: Nothing = lambda: None,
) -> ptrain.Job:
    """Return a plain loop: forward, backward, update."""
    chosen = optimizer or adamw(model)

    def step(batch: Any) -> Tensor:
        value = loss(model, batch)
        value.backward()
        before_update()
        chosen.step()
        chosen.zero_grad()
        after_update()
        return value.detach()

    return ptrain.Job(model=model, step=step)


def accumulated(
    model: nn.Module, rows: Tensor, *, scale: float = 0.5, loss: LossOf = regression_loss
) -> Tensor:
    """Run forward and backward of two micro-batches; return their mean loss."""
    losses = []
    for micro in rows.chunk(2):
        losses.append(loss(model, micro))
        (losses[-1] * scale).backward()
    return torch.stack(losses).mean().detach()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def my_rows(batch: Tensor) -> Tensor:
    """Return this rank's share of a global batch, by rows."""
    return batch.chunk(size())[rank()]


def average(parameters: Iterable[Tensor]) -> None:
    """All-reduce the mean of gradients over the ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()


def total(parameters: Iterable[Tensor]) -> None:
    """All-reduce the sum of gradients over the ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def scale_to(parameters: Iterable[Tensor], norm: float, most: float) -> None:
    """Scale gradients whose norm is known down to the most that is allowed."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= min(1.0, most / (norm + 1e-6))


def square_sum(parameters: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of the gradients, [1]."""
    return sum(
        (parameter.grad.square().sum() for parameter in parameters if parameter.grad is not None),
        start=torch.zeros(1),
    )


def axis(name: str) -> DeviceMesh:
    """Return a mesh of one axis over all ranks."""
    return init_device_mesh("cpu", (size(),), mesh_dim_names=(name,))
