"""Every named strategy with a pipeline runs as predicted in its default dtypes: memory and traffic
to the byte, peaks within 2 %."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import compare_estimates
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.matrix import Result
from tests.gloo.pipeline_runs import MATRIX
from tests.gloo.runs import train_on_rank
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS, MEASURED = 4, 3
# The strategy's model, mesh, placement, schedule and layout; fewer and shorter samples.
SHORT = ("batch={global: 8, micro: 1, sequence: 32}",)
BY_DEFAULT = ("pp-zero2",)  # two axes in one file; the others at night


def strategies() -> list[Any]:
    """Return the strategies with pp."""
    found = []
    for name in list_files("strategies"):
        spec = load(name).spec
        if spec.degree(Axis.PP) > 1:
            marks = () if name in BY_DEFAULT else (pytest.mark.nightly,)
            found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", strategies())
def test_a_strategy_with_a_pipeline_is_validated(ranks: Ranks, name: str) -> None:
    spec = require_runnable(load(name, SHORT))
    assert not differences(ranks, spec)


def differences(ranks: Ranks, spec: Spec) -> list[str]:
    """Return bytes, calls and peaks that differ from the prediction; --record writes them to a
    page."""
    reports = ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED)
    measured = join_estimates([each.measured for each in reports if each.measured])
    checks = compare_estimates(derive(spec, facts_of(spec)).exact, measured)
    MATRIX.results.append(Result(spec, checks, against=()))
    return failed_checks(checks)
