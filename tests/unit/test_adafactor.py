"""Adafactor is torch.optim.Adafactor, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from ptrain.optimizers.build import build_optimizer
from ptrain.spec.job import OptimizerSpec

SHAPES = ((6, 10), (10, 6), (7,), (1, 5), (3, 4, 5))
SPEC = OptimizerSpec(
    name="adafactor", lr=0.02, beta2_decay=-0.7, eps1=1e-6, eps2=0.01, d=1.5, weight_decay=0.1
)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_five_steps_are_those_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = tensors(dtype), tensors(dtype)
    expected = torch.optim.Adafactor(
        theirs, lr=0.02, beta2_decay=-0.7, eps=(1e-6, 0.01), d=1.5, weight_decay=0.1
    )
    for leaves, optimizer in (
        (ours, build_optimizer("adafactor", ours, SPEC)),
        (theirs, expected),
    ):
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            for leaf in leaves:
                leaf.grad = torch.randn(leaf.shape, generator=generator).to(dtype)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))


def test_a_step_that_overflowed_changes_nothing_and_a_scale_is_divided_out() -> None:
    plain, scaled = tensors(torch.float32), tensors(torch.float32)
    one, other = (build_optimizer("adafactor", leaves, SPEC) for leaves in (plain, scaled))
    for leaf, with_scale, gradient in zip(plain, scaled, tensors(torch.float32), strict=True):
        leaf.grad, with_scale.grad = gradient.clone(), gradient * 1024
    other.grad_scale, other.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    one.step()
    other.step()
    assert all(map(torch.equal, plain, scaled))
    other.found_inf = torch.tensor(1.0)
    for leaf in scaled:
        leaf.grad = torch.full_like(leaf, float("inf"))
    other.step()
    assert all(map(torch.equal, plain, scaled))
