"""A block of candidates: all that have one cut of their blocks, one micro-batch and one way to keep
activations, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ptrain.axes.candidates import AxisChoice
from ptrain.selection.arrays import Columns, numpy
from ptrain.selection.flows import PipelineFlow
from ptrain.selection.peaks import OpenPairs, RankPeaks, stacked
from ptrain.selection.rows import OF_ISSUE, OF_MEMORY, OF_TIME, Ways
from ptrain.selection.space import Candidate
from ptrain.selection.task import Scored
from ptrain.spec.activations import Kept


class DataTable:
    """The choices of the data axes for some ranks, as arrays: of several kinds of ways, each with
    its degrees."""

    def __init__(self, parts: Sequence[tuple[Ways, tuple[int, ...], Any, Columns]]) -> None:
        np = numpy()
        self.parts = [part[:3] for part in parts]
        self.ends = np.cumsum([len(indices) for _, _, indices, _ in parts])
        names = parts[0][3] if parts else ()
        self.columns: Columns = {
            name: np.concatenate([columns[name][indices] for _, _, indices, columns in parts])
            for name in names
        }
        self._stacked: dict[bool, Any] = {}

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def choice(self, row: int) -> AxisChoice:
        """Return the choice that a row is of."""
        at = int(numpy().searchsorted(self.ends, row, side="right"))
        ways, degrees, indices = self.parts[at]
        start = int(self.ends[at]) - len(indices)
        return ways.choice(int(indices[row - start]), degrees)

    @cached_property
    def memory(self) -> tuple[Columns, Any]:
        """The columns of bytes of rows that differ in these, and which of them each row is like."""
        np = numpy()
        table = np.stack([self.columns[name] for name in OF_MEMORY], axis=1, dtype=np.float32)
        rows = table.view(f"V{table.strides[0]}").reshape(-1).tolist()  # bytes, which compare fast
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        where = np.array([places[row] for row in rows], dtype=int)
        unlike = np.frombuffer(b"".join(places), dtype=np.float32).reshape(-1, len(OF_MEMORY))
        return dict(zip(OF_MEMORY, np.ascontiguousarray(unlike.T), strict=True)), where

    def stacked_memory(self, *, is_many: bool) -> Any:
        """The same columns one below the other, of many micro-batches or of one alone."""
        if is_many not in self._stacked:
            self._stacked[is_many] = stacked(self.memory[0], is_many=is_many)
        return self._stacked[is_many]

    @cached_property
    def times(self) -> Any:
        """The columns of `OF_TIME`, one below the other."""
        return numpy().stack([self.columns[name] for name in OF_TIME])

    @cached_property
    def issues(self) -> Any:
        """These and the columns of `OF_ISSUE`, where hosts are known to take time."""
        return numpy().stack([self.columns[name] for name in (*OF_TIME, *OF_ISSUE)])


class BoundedPeaks:
    """Peaks of a table's rows by flow, where these are at most `most`, or, where none is so small,
    the least of all if that is below `least`; elsewhere they may be endless. Rows of the same bytes
    are asked about once, and no row of a flow with which it has at least more."""

    def __init__(self, table: DataTable, ranks: RankPeaks, most: float, least: float) -> None:
        self.table, self.ranks, self.least = table, ranks, least
        self.bounds = ranks.at_least(table.memory[0])
        self._bound = max(most, min(least, float(self.bounds.min())))
        self._known: Any = None
        self._open = numpy().nonzero(self.bounds <= self._bound)

    @property
    def is_open(self) -> bool:
        """Return whether there are pairs of a row and a flow whose peaks are to be known."""
        return len(self._open[0]) > 0

    @property
    def moments(self) -> int:
        """Return how many moments these have."""
        return int(self.ranks.moments.lengths[self._open[1]].sum())

    def pairs(self) -> OpenPairs:
        """Return these pairs."""
        rows = self.table.stacked_memory(is_many=self.ranks.is_many)
        return OpenPairs(self.ranks, rows, *self._open)

    def learn(self, peaks: Any) -> None:
        """Take in their peaks, and open what may have less than the least of them."""
        np, before = numpy(), self._bound
        if self._known is None:
            self._known = np.full(self.bounds.shape, np.inf, dtype=np.float32)
        self._known[self._open] = peaks
        self._bound = max(before, min(self.least, float(peaks.min())))
        is_open = (self.bounds <= self._bound) & (self.bounds > before)
        self._open = np.nonzero(is_open)

    @property
    def peaks(self) -> Any:
        """Return what is known by row of the table and by flow; None where nothing is."""
        return None if self._known is None else self._known[self.table.memory[1]]

    @property
    def number(self) -> int:
        """Return how many peaks there are, known or not."""
        return len(self.table) * int(self.bounds.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBlock:
    """Candidates that differ in their flow and in their choices of the data axes alone: `rows` and
    `columns` are whose figures these are."""

    within: tuple[AxisChoice, ...]
    flows: Sequence[PipelineFlow]
    table: DataTable
    micro: int
    kept: Kept
    number: int
    untimed: int
    rows: Any
    columns: Any
    peaks: Any
    seconds: Any
    least: tuple[float, int, int] | None

    def scored(self, place: int) -> Scored:
        """Return one of them."""
        where = int(self.rows[place]), int(self.columns[place])
        return Scored(
            candidate=self.candidate(*where),
            peak=float(self.peaks[place]),
            seconds=float(self.seconds[place]),
        )

    def candidate(self, row: int, column: int) -> Candidate:
        """Return what stands at a place of the block."""
        return Candidate(
            within=self.within,
            pipeline=self.flows[column].choice,
            data=self.table.choice(row),
            micro=self.micro,
            kept=self.kept,
        )
