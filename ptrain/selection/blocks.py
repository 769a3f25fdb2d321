"""A block of candidates: all that have one cut of their blocks, one micro-batch and one way to keep
activations, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ptrain.axes.candidates import AxisChoice
from ptrain.selection.arrays import numpy
from ptrain.selection.flows import PipelineFlow
from ptrain.selection.rows import OF_MEMORY, Columns, Ways
from ptrain.selection.space import Candidate
from ptrain.selection.task import Scored
from ptrain.spec.activations import Kept

OfRows = Callable[[Columns], Any]

_AT_ONCE = 256  # rows: arrays of so many stay near the processor


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

    def peaks(self, of_rows: OfRows, at_least: OfRows, most: float) -> Any:
        """Return what a function says of rows whose bytes it sees along the first of three
        dimensions, where that is `most` or the least of all; elsewhere it may be endless. Rows of
        the same bytes are asked about once, some at a time, and none of which what is said is
        `at_least` more."""
        np, (columns, where) = numpy(), self._memory
        bounds = at_least(columns).min(axis=1)
        peaks = np.full((len(bounds), 0), np.inf)
        is_over, bound = np.zeros(len(bounds), dtype=bool), max(most, float(bounds.min()))
        while True:
            rows = np.flatnonzero((bounds <= bound) & ~is_over)
            pieces = [
                of_rows(_at(columns, rows[at : at + _AT_ONCE]))
                for at in range(0, len(rows), _AT_ONCE)
            ]
            if not pieces:
                return peaks[where]
            if not peaks.shape[1]:
                peaks = np.full((len(bounds), pieces[0].shape[1]), np.inf, dtype=np.float32)
            peaks[rows], is_over[rows] = np.concatenate(pieces), True
            bound = max(bound, float(peaks.min()))

    @cached_property
    def _memory(self) -> tuple[Columns, Any]:
        """The columns of bytes of rows that differ in these, and which of them each row is like."""
        np = numpy()
        table = np.stack([self.columns[name] for name in OF_MEMORY], axis=1).astype(np.float32)
        unlike, where = np.unique(table, axis=0, return_inverse=True)
        columns = {name: unlike[:, at].reshape(-1, 1, 1) for at, name in enumerate(OF_MEMORY)}
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
