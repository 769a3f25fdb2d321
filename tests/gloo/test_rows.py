"""Every row of the data axis, pairwise over layouts, dials, K and N: bytes are exact, and values
equal one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import pytest

from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import compare_estimates
from ptrain.traces.facts import facts_of
from ptrain.verification.reference import Trajectory
from tests.gloo.band import loss_band
from tests.gloo.outcomes import MEASURED_STEP
from tests.gloo.recording_rows import Result, write_rows_page
from tests.gloo.rows import ROWS, Setting, default_setting, pairwise_settings
from tests.gloo.runs import train_on_rank
from tests.gloo.test_exact import failed_checks
from tests.ranks import RankError, Ranks
from tests.trajectories import FP64, Tolerances, one_device
from tests.trajectories import compare as compare_runs

pytestmark = pytest.mark.gloo

STEPS = 4
RESULTS: list[Result] = []
ONCE_WRONG = (  # no row's defaults showed it
    default_setting("ddp").with_dials(
        fp64=False, layout="fp16", accumulate=3, bucket="whole", clip=None, optimizer="muon"
    ),
    default_setting("ddp-zero-redundancy").with_dials(
        fp64=False, layout="bf16", accumulate=3, clip=None, optimizer="sgd"
    ),
)
_REFERENCES: dict[tuple[object, ...], Trajectory] = {}


def reference(setting: Setting, steps: int) -> Trajectory:
    """Return the single-device trajectory of a setting, cached by what it depends on."""
    key = (*setting.reference, steps)
    if key not in _REFERENCES:
        _REFERENCES[key] = one_device(setting.spec(), steps)
    return _REFERENCES[key]


def run_setting(ranks: Ranks, setting: Setting) -> Result:
    """Run a setting. Raises RankError if it does not run."""
    spec = setting.spec()
    reports = ranks.run(setting.size, train_on_rank, spec, STEPS, MEASURED_STEP)
    measured: Estimate = join_estimates([each.measured for each in reports if each.measured])
    checks = compare_estimates(derive(spec, facts_of(spec)).exact, measured)
    run, truth = reports[0].trajectory, reference(setting, STEPS)
    assert run is not None
    tolerances = FP64 if setting.fp64 else Tolerances(losses=loss_band(spec, truth))
    return Result(setting, checks, compare_runs(truth, run, tolerances))


def differences(ranks: Ranks, setting: Setting) -> list[str]:
    """Return the checks that fail: bytes, calls, peaks, losses, parameters."""
    try:
        result = run_setting(ranks, setting)
    except RankError as error:
        return [f"{setting}: {str(error)[-1500:]}"]
    RESULTS.append(result)
    return failed_lines(result)


def failed_lines(result: Result) -> list[str]:
    """Return the failed checks of a setting as text."""
    wrong = (*failed_checks(result.checks), *failed_checks(result.against))
    return [f"{result.setting}: {line}" for line in wrong]


@pytest.fixture(scope="module", autouse=True)
def record(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the results to a page, with --record."""
    yield
    if request.config.getoption("--record") and RESULTS:
        print(f"\nwritten: {write_rows_page(RESULTS, ['pytest', *sys.argv[1:]], STEPS)}")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_exact_and_equals_one_device(ranks: Ranks, row: str) -> None:
    found = differences(ranks, default_setting(row))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("setting", ONCE_WRONG, ids=str)
def test_a_setting_that_was_wrong_once_stays_right(ranks: Ranks, setting: Setting) -> None:
    found = differences(ranks, setting)
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_with_every_pair_of_layouts_and_dials(
    ranks: Ranks, row: str, request: pytest.FixtureRequest
) -> None:
    settings = islice(pairwise_settings(row), request.config.getoption("--settings"))
    found = [line for setting in settings for line in differences(ranks, setting)]
    assert not found, "\n".join(found)
