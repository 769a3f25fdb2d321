"""SGD in 16 bits moves every element like torch's SGD in 32 bits, up to rounding."""

from __future__ import annotations

import pytest
import torch

from ptrain.optimizers.build import SGD, build_optimizer
from ptrain.spec.job import OptimizerSpec
from tests.torch_release import is_since

SIZES = (1, 7, 8, 33, 64)
SETTINGS = [
    {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
    for momentum in (0.0, 0.9)
    for decay in (0.0, 0.1)
]


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16().to(dtype) for size in SIZES]


def take_steps(optimizer: torch.optim.Optimizer, leaves: list[torch.Tensor], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for leaf in leaves:
            leaf.grad = torch.randn(leaf.shape, generator=generator).bfloat16().to(leaf.dtype)
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_five_steps_are_those_of_torch_up_to_rounding(
    dtype: torch.dtype, settings: dict[str, float]
) -> None:
    ours, theirs = tensors(dtype), tensors(torch.float32)
    take_steps(SGD(ours, **settings), ours, 5)
    take_steps(torch.optim.SGD(theirs, **settings), theirs, 5)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.float(), their, rtol=0, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_scale_is_taken_from_the_gradients(settings: dict[str, float]) -> None:
    plain, scaled = tensors(torch.float16), tensors(torch.float16)
    take_steps(SGD(plain, **settings), plain, 1)
    optimizer = SGD(scaled, **settings)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    generator = torch.Generator().manual_seed(1)
    for leaf in scaled:
        leaf.grad = 4 * torch.randn(leaf.shape, generator=generator).bfloat16().half()
    optimizer.step()
    for with_scale, without in zip(scaled, plain, strict=True):
        assert torch.equal(with_scale, without)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_overflow_leaves_every_bit(settings: dict[str, float]) -> None:
    leaves = tensors(torch.float16)
    optimizer = SGD(leaves, **settings)
    take_steps(optimizer, leaves, 2)
    before = [leaf.clone() for leaf in leaves]
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    buffers_before = [buffer.clone() for buffer in buffers]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    for leaf, value in zip(leaves, (torch.inf, -torch.inf, torch.nan, 1.0, 2.0), strict=True):
        leaf.grad = torch.full_like(leaf, value)
    optimizer.step()
    assert all(map(torch.equal, leaves, before))
    assert all(map(torch.equal, buffers, buffers_before))


def test_groups_of_leaves_are_as_good_as_leaves() -> None:
    spec = OptimizerSpec(name="sgd", lr=0.1)
    leaves = tensors(torch.bfloat16)
    groups = [{"params": leaves}]
    assert type(build_optimizer("sgd", groups, spec)) is type(build_optimizer("sgd", leaves, spec))


def test_torchs_fused_kernel_does_not_update_in_16_bits_up_to_2_13() -> None:
    """Once no supported version has this behavior, the custom kernel can be deleted."""
    leaf = torch.zeros(64, dtype=torch.bfloat16)
    take_steps(torch.optim.SGD([leaf], lr=0.1, fused=True), [leaf], 1)
    assert bool(leaf.any()) is is_since("2.14")
