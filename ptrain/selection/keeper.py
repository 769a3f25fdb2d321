"""What is remembered of the blocks of a search: the best, and a front of memory and time."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from ptrain.selection.arrays import numpy
from ptrain.selection.blocks import CandidateBlock
from ptrain.selection.task import (
    SLACK,
    TIME_SLACK,
    SearchCount,
    SearchGoal,
    SearchResult,
    SearchTask,
)
from ptrain.selection.where import Constraint

_KEPT = 1024  # candidates that are remembered between blocks
_BANDS = 24  # of memory, the fastest of each of which is remembered for a front


def may_hold(rule: Constraint, figures: Any, slack: float) -> Any:
    """Return of which closed forms what is exact may obey a bound from above; of any other bound
    they cannot tell."""
    match rule.compare:
        case "<" | "<=":
            return rule.holds_of(figures / slack)
        case _:
            return numpy().ones_like(figures, dtype=bool)


class Keeper:
    """Remembers the best of each block, and forgets what others are better than."""

    def __init__(self, task: SearchTask) -> None:
        self.task, self.counts = task, SearchCount()
        self.best: list[tuple[float, float, CandidateBlock, int]] = []
        self.bound = float("inf")
        self.front: dict[int, tuple[float, CandidateBlock, int]] = {}

    def take(self, block: CandidateBlock) -> None:
        np, task = numpy(), self.task
        self.counts.scored += block.number
        self.counts.untimed += block.untimed
        if block.least is not None:
            peak, *where = block.least
            if self.counts.least is None or peak < self.counts.least[0]:
                self.counts.least = (peak, block.candidate(*where))
        if not len(block.rows):
            return
        fits = block.peaks <= task.room * SLACK
        for name, figures, slack in (
            ("memory", block.peaks, SLACK),
            ("time", block.seconds, TIME_SLACK),
        ):
            for rule in task.where.bounds(name):
                fits &= may_hold(rule, figures, slack)
        places = np.flatnonzero(fits)
        if not len(places):
            return
        self.counts.fitting += int((block.peaks[places] <= task.room).sum())
        keys, ties = block.seconds, block.peaks
        if task.objective is SearchGoal.MEMORY:
            keys, ties = ties, keys
        self._bands(block, places)
        good = places[keys[places] <= self.bound]
        if len(good) > _KEPT:
            good = good[np.argpartition(keys[good], _KEPT)[:_KEPT]]
        figures = (keys[good].tolist(), ties[good].tolist(), good.tolist())
        self.best += [(key, tie, block, place) for key, tie, place in zip(*figures, strict=True)]
        if len(self.best) > 4 * _KEPT:
            self._forget()

    def _bands(self, block: CandidateBlock, places: Any) -> None:
        """The fastest of each band of memory."""
        np = numpy()
        most = self.task.room if self.task.room < float("inf") else float(block.peaks.max())
        bands = (block.peaks[places] / (most * SLACK) * _BANDS).astype(int)
        order = np.argsort(block.seconds[places], kind="stable")[::-1]
        fastest = np.full(_BANDS + 1, -1)
        fastest[bands[order]] = order  # of one band the last that is written stays
        used = np.flatnonzero(fastest >= 0)
        at = places[fastest[used]]
        for band, place, seconds in zip(
            used.tolist(), at.tolist(), block.seconds[at].tolist(), strict=True
        ):
            if seconds == float("inf"):
                continue
            if band not in self.front or seconds < self.front[band][0]:
                self.front[band] = (seconds, block, place)

    def _forget(self) -> None:
        self.best.sort(key=itemgetter(0, 1))
        del self.best[_KEPT:]
        self.bound = self.best[-1][0]

    def result(self) -> SearchResult:
        if self.best:
            self._forget()
        return SearchResult(
            best=tuple(block.scored(place) for _, _, block, place in self.best),
            front=tuple(block.scored(place) for _, (_, block, place) in sorted(self.front.items())),
            counts=self.counts,
        )
