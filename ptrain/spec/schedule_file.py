"""A schedule of the user's own, as text: torch's CSV format of compute actions.

A row for each rank of pp, in its order a cell for each pass: stage, kind, micro-batch (`1F0`), both
counted from 0; kinds are F, B, I and W. `(0F1;1B0)OVERLAP_F_B` is a forward beside a backward.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.spec.leaf import OwnFile
from ptrain.spec.text import contents
from ptrain.timeline import Kind

MAX_CELLS = 1_000_000
Pass = tuple[Kind, int, int]  # kind, stage, micro-batch

_PASS = re.compile(r"(\d{1,5})(F|B|I|W)(\d{1,6})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_PARAMETERS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_REMEDY = "Use one row of passes per rank: `0F0,0F1,0B0,0B1`."


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """`rows` of cells, rank by rank; each cell is one of `passes_of`."""

    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "the listed order"

    def lines(self) -> list[str]:
        """The rows as a spec and a CSV file have them."""
        return [",".join(row) for row in self.rows]

    @property
    def orders(self) -> tuple[tuple[tuple[Pass, ...], ...], ...]:
        """By rank its steps: one pass, or the two of a pair."""
        return tuple(tuple(map(passes_of, row)) for row in self.rows)

    @property
    def stages(self) -> int:
        return 1 + max(stage for _, stage, _ in self._passes())

    @property
    def microbatches(self) -> int:
        return 1 + max(microbatch for *_, microbatch in self._passes())

    @property
    def is_in_halves(self) -> bool:
        return any(kind in (Kind.INPUT, Kind.WEIGHT) for kind, *_ in self._passes())

    def _passes(self) -> Iterator[Pass]:
        return (action for order in self.orders for step in order for action in step)


def listed(lines: Sequence[str]) -> ListedSchedule:
    """The schedule of lines in which `slip` finds none. Empty cells, torch's idle slots, go: when
    a pass begins follows from what it needs."""
    rows = csv.reader(lines)
    return ListedSchedule(
        tuple(tuple(cell.replace(" ", "") for cell in row if cell.strip()) for row in rows)
    )


def slip(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return what is no pass in these lines, with its row and cell counted from 1, and the remedy;
    None where all are passes."""
    if not lines or sum(line.count(",") + 1 for line in lines) > MAX_CELLS:
        return f"a list of 1 to {MAX_CELLS:,} passes; got {len(lines)} rows", _REMEDY
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:  # a quote that nobody closes, a cell without an end
        return f"it is not a CSV file: {error}", _REMEDY
    for number, row in enumerate(rows, start=1):
        if not any(cell.strip() for cell in row):
            return f"row {number} is empty; every rank needs at least one pass", _REMEDY
        for place, cell in enumerate(row, start=1):
            reason = _reason(cell.replace(" ", ""))
            if reason:
                return f"row {number}, cell {place}: {reason[0]}", reason[1]
    return None


def passes_of(cell: str) -> tuple[Pass, ...]:
    """The passes of a cell: one, or a forward and a backward beside each other."""
    pair = _PAIR.fullmatch(cell)
    return tuple(_pass(part) for part in (pair.groups() if pair else (cell,)))


def read(path: Path) -> list[str] | str:
    """The lines of a CSV file; or why it cannot be read."""
    data = contents(path, 8 * MAX_CELLS)
    if isinstance(data, str):
        return data
    if len(data) > 8 * MAX_CELLS:
        return f"it is larger than {8 * MAX_CELLS:,} bytes"
    try:
        return [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        return "it is not UTF-8"


FILE = OwnFile(
    ".csv", read, slip, "Use a file in torch's CSV format of compute actions, or a schedule name."
)


def _pass(cell: str) -> Pass:
    match = _PASS.fullmatch(cell)
    assert match, "cells are checked when they are read"
    stage, kind, microbatch = match.groups()
    return Kind(kind), int(stage), int(microbatch)


def _reason(cell: str) -> tuple[str, str] | None:
    """Why a cell is no pass, and what to write instead; None where it is one, or idle."""
    if not cell or _PASS.fullmatch(cell):
        return None
    if match := _COMMUNICATION.fullmatch(cell):
        reason = (
            f"{cell} is communication ({match[1]}), which ptrain derives from the order "
            "of the passes"
        )
        return reason, "Remove sends and receives (torch's compute_only format)."
    if match := _PARAMETERS.fullmatch(cell):
        reason = f"{cell} ({match[1]}) moves parameters or gradients, which `sync` controls"
        return reason, "Remove it, and set `sync.reshard_after_forward` or `sync.gradients`."
    if match := _PAIR.fullmatch(cell):
        inner = [_PASS.fullmatch(part) for part in match.groups()]
        kinds = "".join(part[2] if part else "?" for part in inner)
        if kinds == "FB":
            return None
        return f"{cell} does not pair a forward with a full backward", "Use `(0F1;1B0)OVERLAP_F_B`."
    return f"{cell[:40]!r} is not a pass", _REMEDY
