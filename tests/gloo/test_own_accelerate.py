"""Unmodified accelerate scripts: a correct one holds, and faults that users reported are named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
pytestmark = pytest.mark.gloo


def verify_script(case: str, *arguments: Any) -> dict[str, Any]:
    from tests.corpus import accelerated

    verdict = getattr(accelerated, case)(*arguments)
    return {"holds": verdict.holds, "text": str(verdict)}


def test_a_script_that_accumulates_and_clips_holds(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_script, "accelerated_script")[0]
    assert verdict["holds"], verdict["text"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("loss_divided_by_accelerate_too", "micro-batches (2)"),
        ("optimizer_not_prepared", "2 updates, 1 in the reference"),
    ],
)
def test_a_fault_of_a_script_is_named(ranks: Ranks, case: str, said: str) -> None:
    assert said in ranks.run(2, verify_script, case, True)[0]["text"]
