"""Optimizers without a fused kernel: NAdam equals torch's, Lion equals its authors'; both divide by
the loss scale and skip a step that overflowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ptrain.optimizers.build import ROWS, build_optimizer, initial_state, reference_optimizer
from ptrain.runtime.world import fake_tensors
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.precision import DType
from tests.unit.test_muon import matrices, take_steps

NAMES = [name for name, row in OPTIMIZERS.items() if row.temporaries]


def spec_of(name: str) -> OptimizerSpec:
    betas = OPTIMIZERS[name].keys["betas"]
    return OptimizerSpec(name=name, lr=0.02, betas=betas, weight_decay=0.1)


def torch_s_nadam(leaves: list[torch.Tensor]) -> None:
    optimizer = torch.optim.NAdam(
        leaves, lr=0.02, betas=(0.9, 0.999), weight_decay=0.1, decoupled_weight_decay=True
    )
    take_steps(optimizer, leaves, 5)


def lion_s_formula(leaves: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    momenta = [torch.zeros_like(leaf) for leaf in leaves]
    for _ in range(5):
        for theta, m in zip(leaves, momenta, strict=True):
            g = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.dtype)
            theta -= 0.02 * (torch.sign(0.9 * m + (1 - 0.9) * g) + 0.1 * theta)
            m += (1 - 0.99) * (g - m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "expected"), [("nadam", torch_s_nadam), ("lion", lion_s_formula)])
def test_five_steps_are_those_of_torch_or_of_the_paper(
    name: str, expected: Callable[[list[torch.Tensor]], None], dtype: torch.dtype
) -> None:
    ours, theirs, whole = matrices(dtype), matrices(dtype), matrices(dtype)
    take_steps(build_optimizer(name, ours, spec_of(name)), ours, 5)
    expected(theirs)
    compared_with = reference_optimizer(name, whole, spec_of(name), DType.FP64)
    take_steps(compared_with, whole, 5)
    torch.testing.assert_close(ours, theirs, rtol=8 * torch.finfo(dtype).eps, atol=1e-7)
    torch.testing.assert_close(whole, theirs, rtol=8 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_begins_as_torch_begins_it(name: str) -> None:
    leaves = matrices(torch.float32)
    spec = OptimizerSpec(name=name, lr=0.0, momentum=0.9, weight_decay=0.0)
    optimizer = build_optimizer(name, leaves, spec)
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    optimizer.step()
    for leaf in leaves:
        initial, state = initial_state(name, spec, leaf), optimizer.state[leaf]
        assert initial.keys() == state.keys()
        assert all(initial[key].shape == state[key].shape for key in initial)
        assert all(initial[key].dtype is state[key].dtype for key in initial)


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_is_divided_out_and_an_overflow_leaves_every_bit(name: str) -> None:
    plain, scaled = matrices(torch.float32), matrices(torch.float32)
    one, other = (build_optimizer(name, leaves, spec_of(name)) for leaves in (plain, scaled))
    other.grad_scale, other.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for leaf, with_scale, gradient in zip(plain, scaled, matrices(torch.float32), strict=True):
        leaf.grad, with_scale.grad = gradient.clone(), gradient * 1024
    one.step()
    other.step()
    assert all(map(torch.equal, plain, scaled))
    kept = [value.clone() for state in other.state.values() for value in state.values()]
    other.found_inf = torch.tensor(1.0)
    for leaf in scaled:
        leaf.grad = torch.full_like(leaf, float("inf"))
    other.step()
    assert all(map(torch.equal, plain, scaled))
    now = [value for state in other.state.values() for value in state.values()]
    assert all(map(torch.equal, kept, now))


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_take_a_step_that_reads_no_value(name: str) -> None:
    with fake_tensors():
        leaves = [torch.empty(6, 10), torch.empty(7)]
        optimizer = build_optimizer(name, leaves, spec_of(name))
        for leaf in leaves:
            leaf.grad = torch.empty_like(leaf)
            optimizer.state[leaf].update(initial_state(name, spec_of(name), leaf))
        optimizer.grad_scale, optimizer.found_inf = torch.empty(()), torch.empty(())
        optimizer.step()
    assert len(optimizer.state) == 2


def test_every_optimizer_has_its_classes() -> None:
    assert OPTIMIZERS.keys() == ROWS.keys()
