"""Faults of activation checkpointing: the second forward is not the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    Regressor,
    adamw,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
)


class Recomputed(torch.autograd.Function):
    """Forward of `up` without its graph; backward runs it again on what `owner` remembers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Forgetful, *parameters: Tensor) -> Tensor:
        ctx.owner = owner
        owner.inputs.append(x.detach())
        ctx.number = len(owner.inputs) - 1
        return F.gelu(owner.up(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        owner = ctx.owner
        x = owner.inputs[-1 if owner.forgets else ctx.number].clone().requires_grad_(True)
        with torch.enable_grad():
            output = F.gelu(owner.up(x))
        own = torch.autograd.grad(output, [x, *owner.up.parameters()], gradient)
        return own[0], None, *own[1:]


class Forgetful(Regressor):
    """The regressor whose `up` is run again in backward."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Recomputed.apply(self.norm(x), self, *self.up.parameters()))


@planted(
    source="https://arxiv.org/abs/2506.09280",
    wrong=("gradients",), axis="none", place="up.*", step=0,
    sentence="gradients of up are wrong: the recomputation takes the last micro-batch's input",
    right=("up", "gradient|recomput|micro|checkpoint|backward"),
    wrong_if=("not reduced", "down.weight", "learning rate"),
)  # fmt: skip
def recomputed_from_another_input(fault: bool) -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        inner = Forgetful(fault)
        model = DistributedDataParallel(inner)
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            inner.inputs.clear()
            losses = [regression_loss(model, micro) for micro in rows.chunk(2)]
            loss = torch.stack(losses).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(lambda: looped(regressor()), job, row_batches(), share=my_rows)


class MaskedLayer(nn.Module):
    """A layer, features masked at random, and a head; the layer may be checkpointed."""

    def __init__(self, checkpoints: bool, draws_again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.generator = torch.Generator().manual_seed(7)
        self.checkpoints, self.draws_again = checkpoints, draws_again

    def draw(self) -> Tensor:
        return (torch.rand(16, generator=self.generator) < 0.7).float()

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.down(F.gelu(self.up(x)) * self.draw())
        mask = None if self.draws_again else self.draw()

        def run(rows: Tensor) -> Tensor:
            return F.gelu(self.up(rows)) * (self.draw() if mask is None else mask)

        return self.down(checkpoint(run, x, use_reentrant=False))


@planted(
    source="https://github.com/allenai/OLMo-core/pull/828",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients belong to another mask: the recomputation draws a new one",
    right=("mask|random|recomput|gradient|checkpoint", "up|down|mask|random|recomput|checkpoint"),
    wrong_if=("not reduced", "counted twice", "learning rate"),
)  # fmt: skip
def recomputed_with_another_mask(fault: bool) -> Any:
    return ptrain.verify(
        lambda: looped(MaskedLayer(False, False)),
        lambda: looped(DistributedDataParallel(MaskedLayer(True, fault))),
        row_batches(),
        share=my_rows,
    )
