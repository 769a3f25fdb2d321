"""Requests that accelerate silently ignores are reported by meters on its model."""

from __future__ import annotations

import pytest

from tests.gloo import traps
from tests.gloo.traps import TrapReport
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")


def trap_reports(ranks: Ranks, which: str) -> TrapReport:
    of_ranks: list[TrapReport] = ranks.run(2, traps.train_with_accelerate, which)
    assert len({trapped.ran for trapped in of_ranks}) == 1
    return of_ranks[0]


def check_names(trapped: TrapReport) -> str:
    return "\n".join(check.name for check in trapped.failing)


def test_the_verdict_reports_a_sharding_plugin_dropped_on_a_cpu(ranks: Ranks) -> None:
    trapped = trap_reports(ranks, "cpu")
    assert trapped.ran.startswith("DistributedDataParallel")
    for state in ("parameters", "optimizer", "gradients"):
        assert f"memory {state} rank 0" in check_names(trapped)
    assert "all_gather forward parameters" in check_names(trapped)  # predicted, and none came
    assert "all_reduce backward gradients" in check_names(trapped)  # came, and none was predicted


def test_the_verdict_reports_one_unit_if_a_wrap_policy_loses_its_argument(
    ranks: Ranks,
) -> None:
    trapped = trap_reports(ranks, "policy")
    assert trapped.ran == "fully_shard in 1 unit"
    failing = {check.name: check for check in trapped.failing}
    calls = failing["traffic dp_shard all_gather forward parameters calls"]
    assert (calls.predicted, calls.measured) == (5, 1)


def test_the_same_model_with_its_actual_setting_holds(ranks: Ranks) -> None:
    trapped = trap_reports(ranks, "control")
    assert trapped.ran == "fully_shard in 5 units"
    # three states, and three counts of the gathers and of the reductions
    assert len(trapped.checks) == 9 and not trapped.failing
