"""`benchmarks/results/paper.md` says what the sources say: all of it but the measurements is worked
out again here, and what was measured is what is predicted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paper() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    import paper

    yield paper
    sys.path.remove(str(FOLDER))


def test_the_page_is_not_stale(paper):
    assert not paper.differences(), "run: python benchmarks/paper.py --save"


def test_every_claim_says_where_it_is_printed_and_why_it_comes_out_so(paper):
    for claim in paper.CLAIMS:
        assert claim.where and claim.printed and claim.why and claim.cases, claim.title


def test_a_page_that_was_edited_by_hand_is_found(paper, monkeypatch, tmp_path):
    page = tmp_path / "paper.md"
    page.write_text(paper.PAGE.read_text().replace("1120 GB |", "1121 GB |", 1), encoding="utf-8")
    monkeypatch.setattr(paper, "PAGE", page)
    assert any("1120 GB" in line for line in paper.differences())


def test_a_measurement_that_is_not_the_prediction_is_found(paper, monkeypatch, tmp_path):
    text = paper.PAGE.read_text(encoding="utf-8")
    measured, _ = paper.read_back(text)
    figures = next(iter(measured.values()))
    page = tmp_path / "paper.md"
    page.write_text(
        text.replace(f"| {figures.parameters} | {figures.optimizer} |", "| 7 | 8 |"),
        encoding="utf-8",
    )
    monkeypatch.setattr(paper, "PAGE", page)
    assert any(line.endswith("measured 7") for line in paper.differences())


def test_the_corollaries_come_out_as_they_should(paper):
    """By hand: (13) alone is 1 unit where 2 are sent; 1.3 is +1 unit; K = 4 is 12 and 9 units."""
    cases = {case.label: case for claim in paper.CLAIMS for case in claim.cases}
    for label, claimed, exact in [
        ("DP → ZeRO-2", 0.5, 1.0),
        ("ZeRO-3, reduced each time", 3.0, 12.0),
        ("ZeRO-3, reduced once", 3.0, 9.0),
        ("ZeRO-3, reduced once, kept throughout", 3.0, 2.0),
    ]:
        case = cases[label]
        column = {
            name: [paper.view(each, name, small=False) for each in case.sources]
            for name in ("paper", "exact")
        }
        by = [paper.view(each, "paper", small=False) for each in case.claimed_by] or column["paper"]
        assert case.figure(*by) == pytest.approx(claimed, rel=1e-6)
        assert case.figure(*column["exact"]) == pytest.approx(exact, rel=1e-6)
