"""The comparison of two trajectories: what it lets pass, and what it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ptrain.verification.compare import FP64, compare
from ptrain.verification.reference import Trajectory

LOSSES = tuple(5.0 - 0.1 * step for step in range(20))


def trajectory() -> Trajectory:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(40, dtype=torch.float64, generator=generator)
    return Trajectory(
        losses=LOSSES,
        gradient_norms=(1.0,) * 20,
        parameters={"large": draw, "small": 1e-4 * draw[:5], "key.bias": 1e-13 * draw[:5]},
        travelled=0.5,
    )


def failing(found: Trajectory) -> list[str]:
    return [check.name for check in compare(trajectory(), found, FP64) if not check.holds]


def with_parameter(name: str, factor: float) -> Trajectory:
    found = trajectory()
    return replace(found, parameters={**found.parameters, name: factor * found.parameters[name]})


def test_a_run_equals_itself():
    assert failing(trajectory()) == []


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_fault_of_one_in_a_hundred_million_shows_in_tensors_of_any_size(name):
    assert failing(with_parameter(name, 1 + 1e-8)) == [
        "parameters by norm",
        "parameters by element",
    ]


def test_a_tensor_that_is_rounding_alone_may_be_other_rounding():
    assert failing(with_parameter("key.bias", -1.0)) == []


def test_a_tensor_that_should_not_have_moved_may_not_move():
    assert failing(with_parameter("key.bias", 1e6)) == [
        "parameters by norm",
        "parameters by element",
    ]


def test_a_dead_run_holds_nothing():
    flat = replace(trajectory(), losses=(5.0,) * 20, travelled=0.0)
    assert {"run: loss falls", "run: parameters move"} <= set(failing(flat))
