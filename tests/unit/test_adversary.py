"""The `exact` and `simulated` columns are equal, to the byte and the operation, for random specs of
the full grammar and for specs that once failed."""

from __future__ import annotations

import pytest

from ptrain.report.record import Check
from tests.adversary import disagreements, search
from tests.adversary.disagreements import compare_columns
from tests.adversary.random_specs import random_spec
from tests.torch_release import is_since
from tests.unit.fixed_failures import SEEN

# Small draws, a second each.
SEEDS = (42, 55, 75, 136)
AT_ONCE, NIGHTLY = 10, 300


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_spec_simulates_as_predicted(seed):
    """One of its three ranks, chosen by the seed."""
    draw = random_spec(seed)
    rank = draw.ranks[seed % len(draw.ranks)]
    comparison = compare_columns(draw.written, (rank,))
    assert comparison.figures and not comparison.refused
    assert not comparison.differing, "\n".join(map(str, comparison.differing))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, NIGHTLY, AT_ONCE))
def test_hundreds_of_drawn_specs_do(first):
    failing, num_compared = [], 0
    for seed in range(first, first + AT_ONCE):
        draw = random_spec(seed)
        comparison = compare_columns(draw.written, draw.ranks)
        num_compared += comparison.figures > 0
        failing += [f"seed {seed}: {row}" for row in comparison.differing]
    assert not failing, "\n".join(failing)
    assert num_compared > AT_ONCE // 2, "most are refused, and nothing is compared"


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen.wrong[:40])
def test_a_spec_that_once_failed_does(seen):
    if not is_since("2.13"):
        if "fp64" in str(seen.written):
            pytest.skip("its fake tensors have attention's statistics of fp64 in fp32")
        if "fused" in str(seen.written):
            pytest.skip("it has no loss that is fused")
    comparison = compare_columns(seen.written, (seen.rank,))
    assert comparison.figures and not comparison.refused
    assert not comparison.differing, "\n".join(map(str, comparison.differing))


def test_a_spec_rejected_by_simulate_is_distinguished_from_one_that_raises(monkeypatch):
    refused = compare_columns(SEEN[0].written | {"attention": "flex"}, (0,))
    assert "flex_attention" in refused.refused and not refused.differing

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr(disagreements, "simulate", broken)
    (row,) = compare_columns(SEEN[0].written, (0,)).differing
    assert str(row) == "rank 0: crash ZeroDivisionError: by 0"


def test_a_failing_seed_ends_with_the_smallest_spec_and_its_command(monkeypatch):
    def always(written: object, ranks: tuple[int, ...]) -> object:
        check = Check(name="operations again", predicted=4, measured=1, tolerance=0.0, holds=False)
        row = disagreements.Disagreement(
            rank=ranks[-1], name=check.name, exact=check.predicted, simulated=check.measured
        )
        return disagreements.Comparison(figures=3, differing=(row,))

    monkeypatch.setattr(search, "compare_columns", always)
    account = search.SearchReport()
    search.examine(57, account)
    search.examine(58, account)
    failure, again = account.failures
    assert again.smallest is None, "its kind of figure was seen"
    page = "\n".join(account.page())
    assert failure.smallest["mesh"] == {}
    assert "Seed 57 (1 figures: operations again); the smallest:" in page
    assert "| ptrain simulate /dev/stdin --rank 0" in page
    assert "rank 0: operations again: exact 4, simulated 1 (-3)" in page


def test_seeds_are_a_span_with_both_ends():
    assert list(search.seeds("3-5")) == [3, 4, 5]
    assert list(search.seeds("7")) == [7]
