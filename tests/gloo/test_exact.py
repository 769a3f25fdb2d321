"""The `exact` prediction and the measurement differ by 0 bytes and 0 calls, and the peak by at most
2 %; the meter does not read the prediction."""

from __future__ import annotations

from itertools import permutations

import pytest

from ptrain.cost import Collective, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.interpreter import look
from ptrain.meters.measure import join_estimates
from ptrain.report.record import Check, compare_estimates, verdict_word
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.cases import DEFAULT, STRATEGIES, SYNC_POLICIES, Case, parameters, strategy_case
from tests.gloo.outcomes import MEASURED_STEP, Outcome, Runs
from tests.gloo.runs import Report, train_on_rank
from tests.ranks import Ranks
from tests.trajectories import FP64
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo


def failed_checks(checks: tuple[Check, ...]) -> list[str]:
    return [
        f"{check.name}: predicted {check.predicted}, measured {check.measured}"
        for check in checks
        if not check.holds
    ]


def require_complete(outcome: Outcome) -> None:
    """Require every state on every rank, and traffic, on both sides: no check holds by absence."""
    size = outcome.spec.world_size
    for estimate in (outcome.exact, outcome.measured):
        rows = {(row.state, row.rank) for row in estimate.memory}
        assert rows == {(state, rank) for state in State for rank in range(size)}
        assert {row.rank for row in estimate.peak} == set(range(size))
        for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS):
            assert all(estimate.bytes_of(state, rank) > 0 for rank in range(size)), state
        assert sum(row.calls for row in estimate.traffic) > 0


@pytest.mark.parametrize("case", parameters())
def test_predicted_and_measured_differ_by_nothing(runs: Runs, case: Case) -> None:
    outcome = runs.of(case)
    require_complete(outcome)
    assert not failed_checks(outcome.checks)


@pytest.mark.parametrize("policy", SYNC_POLICIES, ids=str)
@pytest.mark.parametrize("wrapped", ["zero3", "flat"])
def test_each_sync_policy_moves_its_units_and_equals_one_device(
    runs: Runs, policy: tuple[str, bool, bool], wrapped: str
) -> None:
    case = _with_policy(policy, wrapped)
    outcome = runs.of(case)
    assert not failed_checks(outcome.checks)
    assert _units_moved(outcome) == SYNC_POLICIES[policy](case.accumulate)
    assert not failed_checks(compare_runs(runs.reference(case), outcome.trajectory, FP64))


def _with_policy(policy: tuple[str, bool, bool], wrapped: str) -> Case:
    """Yield cases for FSDP2, and for flat units with gathered parameters and replicated optimizer
    state."""
    tuple_ = "zero3" if wrapped == "zero3" else _tuple("S*", "R", "S")
    return Case(
        name=f"{wrapped}-{'-'.join(map(str, policy))}",
        placement=(("dp_shard", tuple_),),
        size=2,
        accumulate=3,
        fp64=True,
        sync=policy,
    )


def _tuple(parameters: str, optimizer: str, gradients: str) -> tuple[tuple[str, str], ...]:
    return (
        ("parameters", parameters),
        ("optimizer", optimizer),
        ("gradients", gradients),
        ("activations", "R"),
    )


def _units_moved(outcome: Outcome) -> tuple[float, float]:
    """Return all-gathers and reduce-scatters in forward and backward, per unit."""
    num_units = outcome.spec.model.layers + 1  # type: ignore[union-attr]
    counts = [
        sum(
            row.calls
            for row in outcome.reports[0].measured.traffic  # type: ignore[union-attr]
            if row.key.collective is kind and row.key.phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]
    return counts[0] / num_units, counts[1] / num_units


@pytest.mark.parametrize(
    ("claimed", "executed"),
    list(permutations(STRATEGIES, 2)),
    ids=lambda strategy: strategy,
)
def test_the_measurement_of_one_strategy_fails_the_prediction_of_another(
    runs: Runs, claimed: str, executed: str
) -> None:
    settings = _settings(executed)
    predicted = strategy_case(claimed, 4, **settings).spec()
    measured = runs.of(strategy_case(executed, 4, **settings)).measured
    assert (
        verdict_word(compare_estimates(derive(predicted, facts_of(predicted)).exact, measured))
        == "fails"
    )


def _settings(strategy: str) -> dict[str, object]:
    """Return the default subset's run of this strategy on 4 ranks."""
    case = min(
        (each for each in DEFAULT if each.name == strategy and each.size == 4),
        key=lambda each: (each.model != "odd", each.via != "native", each.layout),
    )
    return {"layout": case.layout, "accumulate": case.accumulate, "model": case.model}


def _train_another_plan(spec: Spec, other: Spec, steps: int) -> Report:
    """Train the plan of `other` in a program of `spec`."""
    lower = look.lower
    look.lower = lambda _, *model: lower(other, *model)  # type: ignore[assignment]
    report = train_on_rank(spec, steps, MEASURED_STEP)
    look.lower = lower
    return report


@pytest.mark.parametrize("executed", ["zero1", "zero2", "zero3-keep"])
def test_a_program_that_executes_another_plan_than_predicted_fails(
    ranks: Ranks, executed: str
) -> None:
    spec, other = strategy_case("zero3", 2).spec(), strategy_case(executed, 2).spec()
    reports = ranks.run(2, _train_another_plan, spec, other, MEASURED_STEP + 1)
    measured = join_estimates([report.measured for report in reports if report.measured])
    checks = compare_estimates(derive(spec, facts_of(spec)).exact, measured)
    assert verdict_word(checks) == "fails"
    assert not failed_checks(compare_estimates(derive(other, facts_of(other)).exact, measured))
