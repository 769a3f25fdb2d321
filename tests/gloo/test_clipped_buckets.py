"""DDP's gradients are clipped by bucket, unless a gradient is not a view of its bucket."""

from __future__ import annotations

import pytest
import torch

from ptrain.interpreter.program import Program, interpret
from ptrain.spec.load import load
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


def _tensor_norm(program: Program) -> float:
    """Return the norm of the gradients that the optimizer uses."""
    norms = [parameter.grad.double().norm() for parameter in program.model.parameters()]
    return float(torch.stack(norms).norm())


def _norms() -> list[tuple[int, float, float]]:
    """Return the clipped tensors, their norm before clipping, and the gradients' norm: in the steps
    before and after DDP rebuilds its buckets, which are the same, and with one gradient
    replaced."""
    program = interpret(load("ddp", ("bucket=1 MiB", "optimizer.clip=1.0")).spec)
    seen = []
    for step in range(3):
        program.forward_backward(program.samples(step))
        if step == 2:
            first = next(program.model.parameters())
            first.grad = 3 * first.grad
        norm = program.reduce()
        seen.append((len(program.gradients()), float(norm), _tensor_norm(program)))
        program.apply(1e-3)
    return seen


def test_norms_of_buckets_equal_norms_of_gradients_including_a_replaced_gradient(
    ranks: Ranks,
) -> None:
    for seen in ranks.run(2, _norms):
        (before, *_), (behind, *_), (swapped, *_) = seen
        assert 1 < before == behind < 10 < swapped
        for _, norm, by_tensor in seen:
            assert norm == pytest.approx(by_tensor, rel=1e-6)
