"""Faults of all ranks at once from a step on, which no comparison between ranks detects."""

from __future__ import annotations

import torch
from torch import Tensor

from ptrain.interpreter.program import Program

SINCE = 3  # steps that are sound


def no_fault(program: Program, done: int) -> None:
    """Leave the training unchanged."""


def double_gradients(program: Program, done: int) -> None:
    """Update with twice the gradient in every step after the first ones."""
    if done != SINCE:
        return
    reduce = program.reduce

    def reduce_and_double() -> Tensor | None:
        norm = reduce()
        for target, _, _ in program.update.leaves():
            if target.gradient is not None:
                target.gradient.mul_(2)
        return norm

    program.reduce = reduce_and_double  # type: ignore[method-assign]


@torch.no_grad()
def parameters_drift(program: Program, done: int) -> None:
    """Change the parameters after every update after the first ones."""
    if done > SINCE:
        for piece in program.pieces:
            for parameter in piece.module.parameters():
                parameter.mul_(1.01)
