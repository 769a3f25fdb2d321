"""What a program may do wrong on all ranks alike, from a step on: no comparison of ranks shows
it."""

from __future__ import annotations

import torch
from torch import Tensor

from ptrain.interpreter.program import Program

SINCE = 3  # steps that are sound


def nothing(program: Program, done: int) -> None:
    """A training that is sound."""


def gradients_twice(program: Program, done: int) -> None:
    """Every step after the first ones updates by twice the gradient."""
    if done != SINCE:
        return
    reduce = program.reduce

    def doubled() -> Tensor | None:
        norm = reduce()
        for target, _ in program.update.leaves():
            if target.gradient is not None:
                target.gradient.mul_(2)
        return norm

    program.reduce = doubled  # type: ignore[method-assign]


@torch.no_grad()
def parameters_drift(program: Program, done: int) -> None:
    """Every update after the first ones leaves other parameters than it computed."""
    if done > SINCE:
        for piece in program.pieces:
            for parameter in piece.module.parameters():
                parameter.mul_(1.01)
