"""Bounds of a search on what is exact, which its closed forms may be away from."""

from __future__ import annotations

import numpy as np

from ptrain.selection.keeper import may_hold
from ptrain.selection.where import parse
from tests.pure.searches import chooser


def test_a_bound_of_memory_is_kept_by_what_is_exact_and_not_by_the_closed_form():
    """Just below the peak of the best the closed form of others is; at it the best stands."""
    words = "pp==2", "tp==2", "micro==1", "recompute==full"
    best = chooser(*words, count=4).choose().ranking[0]
    at_it = chooser(*words, f"memory<={best.peak_bytes}", count=4).choose()
    below = chooser(*words, f"memory<={best.peak_bytes - 1}", count=4).choose()
    assert at_it.ranking[0].figures == best.figures
    assert below.ranking
    assert all(row.peak_bytes < best.peak_bytes for row in below.ranking)


def test_what_the_closed_forms_may_be_away_is_left_to_what_is_exact():
    figures = np.array([98.0, 104.0, 106.0])
    assert list(may_hold(parse("memory<=100"), figures, 1.05)) == [True, True, False]
    assert all(may_hold(parse("memory>=100"), figures, 1.05))
    assert all(may_hold(parse("time!=98"), figures, 1.05))
