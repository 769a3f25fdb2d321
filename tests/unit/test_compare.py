"""The comparison of two trajectories: accepted and rejected differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ptrain.verification.compare import (
    joint_difference,
    learning_checks,
    tensor_differences,
    tolerance_share,
)
from ptrain.verification.reference import Trajectory
from tests.trajectories import FP64, compare

LOSSES = tuple(5.0 - 0.1 * step for step in range(20))


def trajectory() -> Trajectory:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(40, dtype=torch.float64, generator=generator)
    return Trajectory(
        losses=LOSSES,
        gradient_norms=(1.0,) * 20,
        parameters={"large": draw, "small": 1e-4 * draw[:5], "key.bias": 1e-13 * draw[:5]},
        moved_distance=0.5,
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
    assert failing(with_parameter(name, 1 + 1e-8)) == ["parameters by norm"]


def test_a_tensor_that_is_rounding_alone_may_be_other_rounding():
    assert failing(with_parameter("key.bias", -1.0)) == []


def test_a_tensor_that_should_not_have_moved_may_not_move():
    assert failing(with_parameter("key.bias", 1e6)) == ["parameters by norm"]


def test_a_dead_run_holds_nothing():
    flat = replace(trajectory(), losses=(5.0,) * 20, moved_distance=0.0)
    assert {"run: learns", "run: parameters move"} <= set(failing(flat))


NAN = float("nan")


@pytest.mark.parametrize("place", [0, 7, 19])
def test_two_non_finite_runs_do_not_hold(place):
    losses = (*LOSSES[:place], NAN, *LOSSES[place + 1 :])
    sick = replace(trajectory(), losses=losses)
    failed = {each.name for each in compare(sick, sick, FP64) if not each.holds}
    assert {"reference: losses are finite", "run: losses are finite", "losses"} <= failed


@pytest.mark.parametrize("norms", [(0.0, *(1.0,) * 19), (NAN,) * 20, (1.0, NAN, 0.0)])
def test_a_zero_gradient_does_not_hold_anywhere(norms):
    found = learning_checks(
        "run", replace(trajectory(), gradient_norms=norms, repeated_loss=LOSSES[-1])
    )
    assert [check.name for check in found if not check.holds] == ["run: gradients"]


@pytest.mark.parametrize(
    ("again", "failed"), [(LOSSES[1], []), (LOSSES[0], ["run: learns"]), (NAN, ["run: learns"])]
)
def test_a_run_learns_where_the_first_batch_has_a_lower_loss(again, failed):
    checks = learning_checks("run", replace(trajectory(), repeated_loss=again))
    assert [check.name for check in checks if not check.holds] == failed


def test_without_a_further_step_learning_is_not_judged():
    assert [check.name for check in learning_checks("run", trajectory())] == [
        "run: gradients", "run: parameters move", "run: losses are finite",
    ]  # fmt: skip


def test_a_reference_that_did_not_learn_holds_nothing():
    rising = replace(trajectory(), losses=tuple(reversed(LOSSES)))
    failed = {each.name for each in compare(rising, rising, FP64) if not each.holds}
    assert {"reference: learns", "run: learns"} <= failed


def test_norms_may_have_a_tolerance_for_each_step():
    norms = tuple(1.0 + 1e-9 * (step == 9) for step in range(20))
    found = replace(trajectory(), gradient_norms=norms)
    wide = replace(FP64, gradient_norms=tuple(1e-8 if step == 9 else 1e-11 for step in range(20)))
    assert [each.name for each in compare(trajectory(), found, FP64) if not each.holds] == [
        "gradient norms"
    ]
    assert all(each.holds for each in compare(trajectory(), found, wide))


def test_separate_gradients_are_one_vector_with_zeros_for_missing_ones():
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert joint_difference(one, one) == 0.0
    assert joint_difference(one, {"a": torch.tensor([3.0])}) == pytest.approx(4 / 5)
    assert joint_difference(one, {**one, "c": torch.tensor([5.0])}) == pytest.approx(1.0)
    assert joint_difference(one, {**one, "a": torch.ones(2)}) == math.inf
    assert joint_difference({}, one) == math.inf
    assert joint_difference(one, {**one, "a": torch.tensor([NAN])}) == math.inf


def test_each_tensor_is_relative_to_its_norm_and_noise_to_the_usual_norm():
    one = dict(trajectory().parameters)
    assert set(tensor_differences(one, one).values()) == {0.0}
    found = tensor_differences(
        one, {**one, "small": one["small"] * (1 + 1e-3), "key.bias": -one["key.bias"]}
    )
    assert found["large"] == 0.0
    assert found["small"] == pytest.approx(1e-3)
    assert 0.0 < found["key.bias"] < 1e-12
    assert joint_difference(one, {**one, "small": one["small"] * (1 + 1e-3)}) < 1e-6


def test_a_tensor_missing_on_one_side_counts_as_zero():
    one = dict(trajectory().parameters)
    without = {name: each for name, each in one.items() if name != "small"}
    assert tensor_differences(one, without)["small"] == pytest.approx(1.0)
    assert tensor_differences(without, one)["small"] > 1e-6
    zeros = {name: torch.zeros_like(each) for name, each in one.items()}
    assert tensor_differences(zeros, one)["large"] == math.inf
    assert tensor_differences(one, {**one, "small": one["small"] * math.nan})["small"] == math.inf


@pytest.mark.parametrize(
    ("measured", "allowed", "share"),
    [(1.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (math.nan, 1.0, math.inf)],
)
def test_nan_exceeds_every_tolerance(measured, allowed, share):
    assert tolerance_share(measured, allowed) == share
