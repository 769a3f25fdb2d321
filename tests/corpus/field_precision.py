"""Faults of casts: rotary frequencies, autocast's cache, and a loss scale that was never used."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.fault import planted
from tests.corpus.parts import (
    FEATURES,
    LENGTH,
    WIDTH,
    TokenWriter,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    token_batches,
    token_loss,
)
from tests.corpus.precision import ROUNDING

STRIDE = 300  # between the positions of two tokens, as far apart as in a long text


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10.0 ** (torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * STRIDE * self.inv_freq.float()
        first, second = x.chunk(2, dim=-1)
        turned = first * angles.cos() - second * angles.sin()
        return torch.cat([turned, first * angles.sin() + second * angles.cos()], dim=-1)


class RotaryWriter(TokenWriter):
    """The writer whose queries and keys are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        del self.position

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = self.rotary(4 * q), self.rotary(4 * k)
        seen = torch.ones(LENGTH, LENGTH).tril().bool()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~seen, -torch.inf)
        x = x + self.proj(scores.softmax(dim=-1) @ v)
        return self.head(x + self.mlp(x))


def rotary_writer() -> RotaryWriter:
    torch.manual_seed(0)
    return RotaryWriter()


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2549",
    wrong=("buffers", "activations", "loss"), axis="none", place="rotary*", step=0,
    sentence="the rotary frequencies are rounded to bf16: the buffer was cast with the model",
    right=("rotary|inv_freq|buffer", ROUNDING + "|differ|buffer|output"),
    wrong_if=("not reduced", "learning rate", "counted twice", "qkv.weight"),
)  # fmt: skip
def rotary_frequencies_in_bf16(fault: bool) -> Any:
    def job() -> ptrain.Job:
        model = rotary_writer()
        if fault:
            model.rotary.bfloat16()
        return looped(DistributedDataParallel(model), loss=token_loss)

    return ptrain.verify(
        lambda: looped(rotary_writer(), loss=token_loss), job, token_batches(), share=my_rows
    )


@planted(
    source="https://github.com/X-GenGroup/Flow-Factory/pull/186",
    wrong=("loss", "gradients"), axis="none", place="*", step=1,
    sentence="the penalty is 0: autocast still has the trained weights' casts when the anchor's "
             "are swapped in",
    right=("autocast|anchor|penalty|term|cast|second", "cache|stale|zero|lack|term|old|miss"),
    wrong_if=("not reduced", "learning rate", "counted twice", "are rounded"),
)  # fmt: skip
def anchor_behind_autocast_cache(fault: bool) -> Any:
    def loop(model: nn.Module, inner: nn.Module, shares_cache: bool) -> ptrain.Job:
        anchor = [p.detach().clone() for p in inner.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def swap(weights: list[Tensor]) -> list[Tensor]:
            """Put weights in place; return those that were there."""
            before = [p.detach().clone() for p in inner.parameters()]
            for parameter, weight in zip(inner.parameters(), weights, strict=True):
                parameter.data.copy_(weight)
            return before

        def forward(rows: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(rows[:, :FEATURES]).float()

        def both(rows: Tensor) -> tuple[Tensor, Tensor]:
            output = forward(rows)
            own = swap(anchor)
            with torch.no_grad():
                wanted = forward(rows)
            swap(own)
            return output, wanted

        def step(rows: Tensor) -> Tensor:
            outer = torch.autocast("cpu", torch.bfloat16) if shares_cache else nullcontext()
            with outer:  # whose end empties the cache
                output, wanted = both(rows)
            loss = F.mse_loss(output, rows[:, FEATURES:]) + 1 * F.mse_loss(output, wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    def job() -> ptrain.Job:
        model = DistributedDataParallel(regressor())
        return loop(model, model.module, fault)

    def plain() -> ptrain.Job:
        model = regressor()
        return loop(model, model, False)

    return ptrain.verify(
        plain, job, row_batches(), share=my_rows, terms=ptrain.Terms(dtype=torch.bfloat16)
    )


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/pull/7839",
    wrong=("gradients",), axis="none", place="*", step=0,
    sentence="gradients are divided by a loss scale of 65536 that the loss was never multiplied by",
    right=("65536|65,536|scale|too small|times|factor|divided|1.5", "gradient|update"),
    wrong_if=("not reduced", "counted twice", "learning rate is", "frozen"),
)  # fmt: skip
def unscaled_though_never_scaled(fault: bool) -> Any:
    def loop(model: nn.Module, divides: bool) -> ptrain.Job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def unscale() -> None:
            for parameter in model.parameters() if divides else ():
                assert parameter.grad is not None
                parameter.grad /= 65536.0

        return looped(model, loss=regression_loss, optimizer=optimizer, before_update=unscale)

    return ptrain.verify(
        lambda: loop(regressor(), False),
        lambda: loop(DistributedDataParallel(regressor()), fault),
        row_batches(),
        share=my_rows,
    )
