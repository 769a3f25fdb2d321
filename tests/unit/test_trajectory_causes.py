"""Explanations of a trajectory of which no step was explained."""

from __future__ import annotations

import pytest

from ptrain.report.finding import Subject
from ptrain.report.record import Check
from ptrain.verification.trajectory import explain_dtypes, explain_reference


def check(name: str, why: str = "") -> Check:
    return Check(name=name, predicted=None, measured=None, tolerance=0.0, holds=not why, why=why)


@pytest.mark.parametrize(
    ("name", "state", "step"),
    [
        ("from its own state: gradient", Subject.GRADIENTS, 50),
        ("loss of every step", Subject.LOSS, 50),
        ("from its own state: loss", Subject.LOSS, 50),
    ],
)
def test_a_failure_in_the_default_dtypes_only_is_named_with_its_step(
    name: str, state: Subject, step: int
) -> None:
    found = explain_dtypes(
        [check("run: losses are finite"), check(name, "differs")], 50, "zero16", 2
    )
    assert found is not None
    assert (found.state, found.step, found.factor) == (state, step, "in zero16 only")


def test_a_reference_that_does_not_learn_is_reported_with_a_fix() -> None:
    checks = [check("loss of every step"), check("reference: learns", "it rose")]
    found = explain_reference(checks, 2)
    assert found is not None
    assert found.factor == "the reference does not learn" and found.ranks == (0, 1)
    assert "(learns: it rose)" in found.sentence
    assert "optimizer.lr" in found.fix and "--steps" in found.fix


def test_a_trajectory_that_holds_names_no_cause() -> None:
    assert (
        explain_reference(
            [check("reference: losses are finite"), check("run: losses are finite", "nan")], 2
        )
        is None
    )
    assert explain_dtypes([check("reference: losses are finite")], None, "fp32", 2) is None
