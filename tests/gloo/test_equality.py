"""Every placement computes the result of one device (Theorem 5), and faults are detected."""

from __future__ import annotations

import pytest

from ptrain.report.record import Check
from tests.covering import covering
from tests.gloo.band import loss_band
from tests.gloo.cases import Case, parameters, strategy_case
from tests.gloo.faults import Fault
from tests.gloo.outcomes import STEPS, Runs
from tests.gloo.runs import train_on_rank
from tests.ranks import Ranks
from tests.trajectories import FP64, Tolerances, compare, one_device

pytestmark = pytest.mark.gloo


def failed_checks(checks: tuple[Check, ...]) -> list[str]:
    return [f"{check.name}: {check.why}" for check in checks if not check.holds]


@pytest.mark.parametrize("case", parameters(fp64=True))
def test_losses_norms_and_parameters_equal_one_device_in_fp64(runs: Runs, case: Case) -> None:
    checks = compare(runs.reference(case), runs.of(case).trajectory, FP64)
    assert {"losses", "gradient norms", "parameters by norm"} <= {each.name for each in checks}
    assert not failed_checks(checks)


@pytest.mark.parametrize("layout", ["fp32", "zero16"])
def test_one_rank_needs_no_group_and_equals_one_device(ranks: Ranks, layout: str) -> None:
    case = strategy_case("zero3", 1, layout=layout, accumulate=4, fp64=True)
    spec = case.spec()
    assert not spec.factors
    run = ranks.run(1, train_on_rank, spec, STEPS)[0].trajectory
    assert not failed_checks(compare(one_device(spec, STEPS), run, FP64))


@pytest.mark.parametrize("case", parameters())
def test_in_true_dtypes_losses_stay_within_the_band_of_their_rounding(
    runs: Runs, case: Case
) -> None:
    reference = runs.reference(case)
    outcome = runs.of(case)
    tolerances = Tolerances(losses=loss_band(outcome.spec, reference))
    assert not failed_checks(compare(reference, outcome.trajectory, tolerances))


def test_the_band_of_zero16_is_narrower_than_the_loss_decrease(runs: Runs) -> None:
    case = strategy_case("zero3", 2, layout="zero16", accumulate=4)
    reference = runs.reference(case)
    fall = 1 - min(reference.losses) / reference.losses[0]
    assert max(loss_band(case.spec(), reference)) < fall / 10


FAULTS = [fault for fault in Fault if fault is not Fault.ZERO_GRADIENTS]


@covering("strategy,fault", ["ddp", "zero1", "zero3"], FAULTS)
def test_a_fault_is_detected(ranks: Ranks, runs: Runs, strategy: str, fault: Fault) -> None:
    case = strategy_case(strategy, 2, accumulate=1, fp64=True)
    run = ranks.run(2, train_on_rank, case.spec(), STEPS, None, fault)[0].trajectory
    failed = failed_checks(compare(runs.reference(case), run, FP64))
    assert any(line.startswith("losses: differs") for line in failed), failed


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_identical_runs_without_learning_do_not_hold(ranks: Ranks, strategy: str) -> None:
    case = strategy_case(strategy, 2, accumulate=1, fp64=True)
    dead = ranks.run(2, train_on_rank, case.spec(), STEPS, None, Fault.ZERO_GRADIENTS)[0].trajectory
    failed = failed_checks(compare(dead, dead, FP64))
    assert any("gradient is zero" in line for line in failed), failed
