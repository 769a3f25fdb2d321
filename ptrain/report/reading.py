"""A result record read back: the same types as before it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptrain.codec import decode
from ptrain.costs import Column, Estimate
from ptrain.derivation.wire import WireRow
from ptrain.report.record import COUNTED_KINDS, Check


@dataclass(frozen=True, slots=True)
class Reading:
    """The columns of a record, its checks, what was on the wire, of which a record has means over
    the ranks only, and the seconds of a measured step."""

    estimates: dict[Column, Estimate]
    checks: tuple[Check, ...]
    wire: tuple[WireRow, ...] = ()
    step_seconds: float | None = None

    @property
    def predicted(self) -> Estimate:
        """What the checks hold a run against: the exact column, or with what the run counted."""
        return self.estimates.get(Column.COUNTED) or self.estimates[Column.EXACT]


def read(record: Mapping[str, Any]) -> Reading:
    """Return every column that the record has rows for. Raises ValueError for damaged rows."""
    rows = [row for kind in ("memory", "peak", "traffic") for row in record[kind]]
    columns = dict.fromkeys(Column(row["column"]) for row in rows)
    return Reading(
        estimates={column: _estimate(record, column) for column in columns},
        checks=decode(record["checks"], tuple[Check, ...]),
        wire=decode(record.get("wire", []), tuple[WireRow, ...]),
        step_seconds=next(
            (row["value"] for row in record["step_seconds"] if row["column"] == Column.MEASURED),
            None,
        ),
    )


def _estimate(record: Mapping[str, Any], column: Column) -> Estimate:
    """A measured step's time has no rows, and waiting is measured only. Records of older versions
    have no operations, rows of time or reasons."""
    plain: dict[str, Any] = {
        kind: [row for row in record.get(kind, ()) if row["column"] == column]
        for kind in COUNTED_KINDS
    }
    plain |= {
        kind: record.get(kind, {}).get(column, {})
        for kind in ("undefined", "by_data", "assumed", "counted")
    }
    steps = (row for row in record["step_seconds"] if row["column"] == column and "rows" in row)
    is_measured = column is Column.MEASURED
    plain["blocked_seconds"] = record.get("blocked_seconds", []) if is_measured else []
    plain |= {"column": column, "world_size": record["world_size"], "step": next(steps, None)}
    estimate: Estimate = decode(plain, Estimate)
    return estimate
