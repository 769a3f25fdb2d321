"""Two meshes beside each other: what is allowed of one device's losses is allowed of theirs."""

from __future__ import annotations

import math

import pytest
import torch

from ptrain.report.record import Check
from ptrain.verification.protocol import against
from ptrain.verification.reference import Trajectory

GRADIENTS = {"a": torch.ones(3, dtype=torch.float64)}
ALLOWED = (1e-12, 1e-12, 1e-3)  # rounding has grown by the last step


def compared(*losses: float) -> Check:
    ran, other = (
        Trajectory(
            name="hsdp", losses=its, gradient_norms=(), parameters={}, travelled=1.0,
            gradients=GRADIENTS,
        )
        for its in ((4.0, 3.0, 2.0), losses)
    )  # fmt: skip
    gradient, loss = against(ran, other, ALLOWED)
    assert gradient.holds
    return loss


def test_a_late_step_may_be_as_far_off_as_its_trajectory_allows_of_two() -> None:
    found = compared(4.0, 3.0, 2.0013)
    assert found.holds and found.tolerance == pytest.approx(math.sqrt(2) * 1e-3)
    assert not compared(4.0, 3.0, 2.0015).holds


def test_an_early_step_may_not_and_is_named() -> None:
    found = compared(4.0, 3.0001, 2.001)
    assert not found.holds
    assert found.why == "step 1: the loss is 3, and 3.0001 on the other mesh"


def test_a_mesh_that_stopped_early_is_not_the_same() -> None:
    found = compared(4.0, 3.0)
    assert not found.holds
    assert found.why == "2 of 3 steps can be compared. Verify hsdp alone first"


def test_a_loss_that_is_no_number_is_not_the_same() -> None:
    assert not compared(4.0, math.nan, 2.0).holds
    assert not compared(4.0, 3.0, math.inf).holds
