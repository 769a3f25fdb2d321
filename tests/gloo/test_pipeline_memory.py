"""The peaks of forward and backward passes are predicted from the instructions to the byte: under
every schedule, and under an order of no schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.matrix import run_spec
from tests.gloo.pipeline_cases import SCHEDULES, layer_count, pipeline_spec
from tests.gloo.recording import checks_of_kind
from tests.gloo.test_exact import failed_checks
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

BY_DEFAULT = ("interleaved", "zbv")  # the others at night
OWN = [
    "0F0,0F1,0F2,0I0,0F3,0B1,0W0,0B3,0B2",
    "1F0,1B0,1F2,1F1,1B1,1F3,1I3,1B2,1W3",
]


def cases() -> list[Any]:
    found = [
        pytest.param(name, mesh, marks=() if name in BY_DEFAULT else pytest.mark.nightly)
        for name in SCHEDULES
        for mesh in ({"pp": 2}, *([] if name in BY_DEFAULT else [{"pp": 4}]))
    ]
    return [*found, pytest.param(OWN, {"pp": 2})]


@pytest.mark.parametrize(("schedule", "mesh"), cases(), ids=str)
def test_the_peaks_of_passes_follow_from_their_instructions(
    ranks: Ranks, schedule: Any, mesh: dict[str, int]
) -> None:
    is_own = schedule is OWN
    layers = 4 if is_own else layer_count(mesh["pp"], schedule)
    batch = {"accumulate": 4 if is_own else 8}
    spec = pipeline_spec("gqa", schedule, mesh=mesh, batch=batch, shape={"layers": layers})
    result = run_spec(ranks, spec)
    assert not [*failed_checks(result.checks), *failed_checks(result.against)]
    peaks = [check for check in checks_of_kind(result.checks, "peak") if "update" not in check.name]
    assert len(peaks) == 2 * mesh["pp"]
    assert [check.measured for check in peaks] == [check.predicted for check in peaks]
