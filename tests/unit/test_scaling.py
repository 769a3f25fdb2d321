"""The loss scale changes like torch.amp.GradScaler's, and gradients are unscaled."""

from __future__ import annotations

import random

import pytest
import torch

from ptrain.interpreter.loss import LossScale, global_norm, scale_down
from ptrain.models.ledger import set_tier, tier_of
from ptrain.models.numerics import is_native
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.steps.step import Clip, CreateMesh


def mesh() -> Mesh:
    return Mesh(CreateMesh(axes=(), degrees=()), World())


def test_the_scale_takes_the_way_of_torch_s_scaler() -> None:
    ours, theirs = LossScale(mesh(), ()), torch.amp.GradScaler("cpu")
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs.scale(torch.ones(()))  # makes its tensors
    draw = random.Random(0)
    for step in range(4500):
        overflows = draw.random() < 0.0008 or step in (3, 4)
        gradient = torch.full((3,), float("inf") if overflows else 1.0)
        parameter.grad = gradient.clone()
        theirs.step(optimizer)
        theirs.update()
        ours.update_overflow_flag([gradient])
        assert float(ours.found_inf) == overflows
        ours.update()
        assert float(ours.scale) == theirs.get_scale()
    assert float(ours.scale) != 2.0**16


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_check_finds_non_finite_values_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bad: float
) -> None:
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def as_on_cuda(gradients: list[torch.Tensor], *others: torch.Tensor) -> None:
        assert torch.bfloat16 not in {gradient.dtype for gradient in gradients}
        check(gradients, *others)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", as_on_cuda)
    scale = LossScale(mesh(), ())
    gradients = [torch.randn(5).to(dtype), torch.randn(2, 3).to(dtype)]
    kept = [gradient.clone() for gradient in gradients]
    scale.update_overflow_flag(gradients)
    assert float(scale.found_inf) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))
    gradients[1][1, 2] = bad
    scale.update_overflow_flag(gradients)
    assert float(scale.found_inf) == 1.0


def test_gradients_on_the_host_are_checked_there_and_found_on_the_device() -> None:
    scale = LossScale(mesh(), ())
    gradient = torch.full((4,), float("nan"))
    set_tier(gradient, Tier.HOST)
    scale.update_overflow_flag([gradient])
    assert float(scale.found_inf) == 1.0
    assert tier_of(scale.found_inf.untyped_storage()) is Tier.DEVICE
    for scalar, other in zip(
        scale.scalars_for(gradient), (scale.scale, scale.found_inf), strict=True
    ):
        assert tier_of(scalar.untyped_storage()) is Tier.HOST
        assert torch.equal(scalar, other) and scalar is not other
    assert scale.scalars_for(torch.zeros(1)) == (scale.scale, scale.found_inf)


def test_the_norm_of_a_scaled_loss_is_that_of_the_loss_and_clipping_leaves_the_scale() -> None:
    gradients = [torch.randn(7, 3), torch.randn(11)]
    scaled = [gradient * 2.0**16 for gradient in gradients]
    step = Clip(max_norm=0.5, axes=())
    norm = global_norm(gradients, step, mesh())
    assert torch.equal(global_norm(scaled, step, mesh(), LossScale(mesh(), ())), norm)
    scale_down(gradients, norm, step)
    scale_down(scaled, norm, step)
    for ours, theirs in zip(scaled, gradients, strict=True):
        torch.testing.assert_close(ours / 2.0**16, theirs)


@pytest.mark.parametrize("numel", [3, 2**14, 2**14 + 1, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_long_tensor_is_as_exact_as_that_of_a_short_one(
    numel: int, dtype: torch.dtype
) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = gradient.double().norm()
    found = global_norm([gradient], Clip(max_norm=1e9, axes=()), mesh())
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)


def test_wide_dtypes_are_native_everywhere() -> None:
    assert is_native(DType.FP32) and is_native(DType.FP64)
