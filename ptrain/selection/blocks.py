"""A block of candidates: all that have one cut of their blocks, one micro-batch and one way to keep
activations, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ptrain.axes.candidates import AxisChoice
from ptrain.selection.arrays import numpy
from ptrain.selection.flows import PipelineFlow
from ptrain.selection.peaks import RankPeaks
from ptrain.selection.rows import OF_MEMORY, Columns, Ways
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

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def choice(self, row: int) -> AxisChoice:
        """Return the choice that a row is of."""
        at = int(numpy().searchsorted(self.ends, row, side="right"))
        ways, degrees, indices = self.parts[at]
        start = int(self.ends[at]) - len(indices)
        return ways.choice(int(indices[row - start]), degrees)

    def peaks(self, ranks: RankPeaks, most: float, least: float) -> Any:
        """Return the peaks of rows by flow where these are at most `most`, or, where none is so
        small, the least of all if that is below `least`; elsewhere it may be endless. Rows of the
        same bytes are asked about once, and no row of a flow with which it has at least more."""
        np, (columns, where) = numpy(), self._memory
        bounds = ranks.at_least(columns)
        peaks, is_known = np.full(bounds.shape, np.inf, dtype=np.float32), bounds > np.inf
        bound = max(most, min(least, float(bounds.min())))
        while True:
            pairs = np.nonzero((bounds <= bound) & ~is_known)
            if not len(pairs[0]):
                return peaks[where]
            peaks[pairs], is_known[pairs] = ranks.of(columns, *pairs), True
            bound = max(bound, min(least, float(peaks.min())))

    @cached_property
    def _memory(self) -> tuple[Columns, Any]:
        """The columns of bytes of rows that differ in these, and which of them each row is like."""
        np = numpy()
        table = np.stack([self.columns[name] for name in OF_MEMORY], axis=1).astype(np.float32)
        unlike, where = np.unique(table, axis=0, return_inverse=True)
        columns = {name: np.ascontiguousarray(unlike[:, at]) for at, name in enumerate(OF_MEMORY)}
        return columns, where.reshape(-1)

    def at(self, rows: Any) -> Columns:
        """Return some rows, one below the other."""
        return {name: column[:, None] for name, column in _at(self.columns, rows).items()}


def _at(columns: Columns, rows: Any) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


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
    least: tuple[float, int, int]

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
