"""The winner of a search compared with every candidate of small jobs, and with its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from ptrain.selection import search as searching
from ptrain.selection.choose import Chooser, neighbours
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import SLACK, TIME_SLACK, Ranked
from tests.pure.searches import without_known

_NEAR = 1e-3  # of a step
CASES = {
    "data axes": (2, ("micro>=4", "pp==1", "cp==1", "recompute=none")),
    "stages": (4, ("micro==2", "pp==2", "tp==1", "cp==1", "dp_replicate=2", "recompute=none")),
}


def chooser(devices: int, where: tuple[str, ...]) -> Chooser:
    words = ("batch.sequence=1024", "batch.global=16")
    return Chooser(searched_job("gpt3-125m", words, cluster="h100-8", devices=devices, where=where))


def everything(chooser: Chooser) -> Iterator[Ranked]:
    """Derive every legal candidate, with every unit and overlap."""
    with mock.patch.object(searching, "representatives", list):
        for block in chooser.search.blocks():
            for row in map(chooser.exactly, map(block.scored, block.rows)):
                if row is not None:
                    yield row


@pytest.mark.parametrize("case", CASES)
def test_no_candidate_of_a_small_job_is_better_than_the_winner_and_estimates_lose_none(case: str):
    best = without_known(chooser(*CASES[case]).choose).best
    assert best is not None and best.seconds is not None
    rows = list(everything(chooser(*CASES[case])))
    assert len(rows) > 50
    timed = [(row.closed, row.peak_bytes, row.seconds) for row in rows if row.seconds is not None]
    assert min(seconds for *_, seconds in timed) >= best.seconds * (1 - _NEAR)
    for closed, peak, seconds in timed:
        assert closed.peak <= SLACK * peak and closed.seconds <= TIME_SLACK * seconds


@pytest.mark.parametrize("case", CASES)
def test_no_neighbour_of_a_winner_is_better(case: str):
    searched = chooser(*CASES[case])
    best = without_known(searched.choose).best
    assert best is not None and best.seconds is not None
    searched.search.run(searched.job.where)  # a look at known choices has asked for more
    around = list(neighbours(searched.search, best.closed.candidate))
    rows = [searched.exactly(searched.search.score(candidate)) for candidate in around]
    others = [row for row in rows if row and row.seconds is not None and row.memory.fits]
    assert len(others) > 3
    assert all(row.seconds >= best.seconds * (1 - _NEAR) for row in others if row.seconds)
