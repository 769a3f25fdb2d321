"""Muon is torch.optim.Muon, in the dtype that is asked for."""

from __future__ import annotations

import pytest
import torch

from ptrain.optimizers.build import Muon, orthogonalize

SHAPES = ((6, 10), (10, 6), (8, 8), (1, 5))


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


def take_steps(optimizer: torch.optim.Optimizer, leaves: list[torch.Tensor], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for leaf in leaves:
            gradient = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            leaf.grad = gradient.to(leaf.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_are_those_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = matrices(dtype), matrices(dtype)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    take_steps(Muon(ours, **settings), ours, 5)
    torch_s = torch.optim.Muon(theirs, **settings, nesterov=True, adjust_lr_fn="match_rms_adamw")
    take_steps(torch_s, theirs, 5)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize("matrix", matrices(torch.float64), ids=str)
def test_in_fp64_the_iteration_acts_on_singular_values_alone(matrix: torch.Tensor) -> None:
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = sizes / sizes.square().sum().sqrt()
    for _ in range(5):
        sizes = 3.4445 * sizes - 4.775 * sizes**3 + 2.0315 * sizes**5
    expected = left @ torch.diag(sizes) @ right
    torch.testing.assert_close(orthogonalize(matrix), expected, rtol=1e-12, atol=1e-12)


def test_in_fp64_a_step_differs_from_torch_s_by_the_rounding_of_bf16() -> None:
    ours, theirs = matrices(torch.float64), matrices(torch.float64)
    take_steps(Muon(ours, lr=1.0, momentum=0.9, weight_decay=0.1), ours, 1)
    torch_s = torch.optim.Muon(
        theirs, lr=1.0, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    take_steps(torch_s, theirs, 1)
    differences = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    assert 0 < max(differences) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_that_overflowed_changes_nothing_and_a_scale_is_divided_out(
    dtype: torch.dtype,
) -> None:
    plain, scaled = matrices(dtype), matrices(dtype)
    one, other = (Muon(each, lr=0.02, momentum=0.9) for each in (plain, scaled))
    other.grad_scale, other.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    gradients = matrices(dtype)
    for ours, theirs, gradient in zip(plain, scaled, gradients, strict=True):
        ours.grad, theirs.grad = gradient, gradient * 1024
    one.step()
    other.step()
    kept = [each.clone() for each in scaled]
    buffers = [other.state[each]["momentum_buffer"].clone() for each in scaled]
    other.found_inf = torch.tensor(1.0)
    for each in scaled:
        each.grad = torch.full_like(each, float("inf"))
    other.step()
    for ours, theirs, before, buffer in zip(plain, scaled, kept, buffers, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(theirs, before)
        assert torch.equal(other.state[theirs]["momentum_buffer"], buffer)
