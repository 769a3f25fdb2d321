"""The page of torch's versions counts what pytest says, and what says nothing has failed."""

from __future__ import annotations

import json

import pytest

ENDED = """\
..F. [100%]
FAILED tests/unit/test_a.py::test_b[2-True] - assert 1 == 2
ERROR tests/unit/test_a.py::test_c
1 failed, 1290 passed, 6 skipped, 5 warnings, 1 error in 72.80s (0:01:12)
"""


@pytest.fixture
def page(benchmark_module):
    return benchmark_module("torch_versions")


def test_a_suites_counts_are_those_of_its_last_line(page):
    assert page.summary(ENDED) == {
        "counts": {"failed": 1, "passed": 1290, "skipped": 6, "error": 1},
        "failed": ["tests/unit/test_a.py::test_b[2-True]", "tests/unit/test_a.py::test_c"],
    }


def test_a_suite_that_ends_without_a_summary_has_failed(page):
    assert page.summary("Segmentation fault")["failed"] == ["pytest gave no summary"]


def test_cached_results_are_not_rerun_and_new_ones_are_cached(page, tmp_path, monkeypatch):
    kept, runs = tmp_path / "kept.json", []
    packages = {"torch": "2.15.0", "Python": "3.11", "numpy": "2", "transformers": "5"}
    monkeypatch.setattr(page, "versions", lambda _python: packages)

    def tested(_python: str, suite: str) -> dict[str, object]:
        runs.append(suite)
        return {"counts": {"passed": 3}, "failed": []}

    monkeypatch.setattr(page, "tested", tested)
    page.measured(["python"], ["pure"], kept)
    results = page.measured(["python"], ["pure", "unit"], kept)
    assert runs == ["pure", "unit"] and results == json.loads(kept.read_text())
    rows = [line for line in page.table(results) if line.startswith("| 2.15.0 |")]
    assert [row.split(" | ")[1:4] for row in rows[1:]] == [["pure", "3", "0"], ["unit", "3", "0"]]
