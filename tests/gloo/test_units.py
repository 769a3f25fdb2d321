"""Wrap units of every size: calls, bytes and peaks are predicted, and training equals one
device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from ptrain.cost import Collective, Phase
from tests.gloo.cases import LAYOUTS, Case, strategy_case
from tests.gloo.outcomes import Outcome, Runs
from tests.gloo.test_exact import failed_checks, require_complete
from tests.trajectories import FP64
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

LAYERS = 3  # two blocks and one more
UNITS = ("sub-block", "2 blocks", "model")
NUM_UNITS = {"sub-block": 3 * LAYERS + 1, "2 blocks": 3, "model": 1}
LOSS_BYTES = 8  # a rank of these tests keeps the loss of a measured step, in fp32 or fp64
FLAT = (
    ("parameters", "S*"),
    ("optimizer", "R"),
    ("gradients", "S"),
    ("activations", "R"),
)


def flat_tuple(size: int, **settings: Any) -> Case:
    """Return a tuple that runs as flat units with gathered parameters."""
    return Case(name="flat", placement=(("dp_shard", FLAT),), size=size, **settings)


def wrapper_cases(unit: str) -> tuple[Case, Case]:
    """Yield one case per wrapper. Replicas alone have no units, and a unit size is rejected
    there."""
    settings = {"fp64": True, "unit": unit, "layers": LAYERS}
    return strategy_case("zero3", 2, **settings), flat_tuple(2, **settings)


def other_cases() -> Iterator[Case]:
    """Yield all models, layouts, K and N; by default a model has its default number of layers."""
    names = ("zero1", "zero2", "zero3", "zero3-keep", "hsdp", "flat")
    for unit, name, layout, model in product(UNITS, names, LAYOUTS, ("odd", "tied", "external")):
        settings = {"unit": unit, "layout": layout, "accumulate": 4, "model": model}
        yield flat_tuple(4, **settings) if name == "flat" else strategy_case(name, 4, **settings)


def require_exact(outcome: Outcome) -> None:
    """Require equality to the byte, including the peak."""
    require_complete(outcome)
    assert not failed_checks(outcome.checks)
    for check in outcome.checks:
        if check.name.startswith("peak"):
            assert abs(check.predicted - check.measured) <= LOSS_BYTES, check


@pytest.mark.parametrize("case", [case for unit in UNITS for case in wrapper_cases(unit)], ids=str)
def test_units_of_every_size_are_predicted_and_equal_one_device(runs: Runs, case: Case) -> None:
    outcome = runs.of(case)
    require_exact(outcome)
    assert not failed_checks(compare_runs(runs.reference(case), outcome.trajectory, FP64))


@pytest.mark.parametrize(("strategy", "bucket"), [("zero1", "whole"), ("zero2", "400 KiB")])
def test_units_that_fill_a_bucket_are_predicted_and_equal_one_device(
    runs: Runs, strategy: str, bucket: str
) -> None:
    case = strategy_case(strategy, 2, fp64=True, layers=LAYERS, accumulate=2, bucket=bucket)
    outcome = runs.of(case)
    require_exact(outcome)
    assert not failed_checks(compare_runs(runs.reference(case), outcome.trajectory, FP64))
    measured = outcome.reports[0].measured
    assert measured is not None
    gathers = (row for row in measured.traffic if row.key.collective is Collective.ALL_GATHER)
    assert sum(row.calls for row in gathers) == (1 if bucket == "whole" else 2)


@pytest.mark.parametrize("unit", UNITS)
def test_a_step_gathers_each_unit_twice_and_reduces_it_once(runs: Runs, unit: str) -> None:
    for case in wrapper_cases(unit):
        measured = runs.of(case).reports[0].measured
        assert measured is not None
        calls = {Collective.ALL_GATHER: 0, Collective.REDUCE_SCATTER: 0}
        for row in measured.traffic:
            if row.key.collective in calls and row.key.phase in (Phase.FORWARD, Phase.BACKWARD):
                calls[row.key.collective] += row.calls
        assert calls[Collective.ALL_GATHER] == 2 * NUM_UNITS[unit]
        assert calls[Collective.REDUCE_SCATTER] == NUM_UNITS[unit]


@pytest.mark.nightly
@pytest.mark.parametrize("case", list(other_cases()), ids=str)
def test_units_of_every_size_are_predicted_on_every_model_and_layout(
    runs: Runs, case: Case
) -> None:
    require_exact(runs.of(case))
