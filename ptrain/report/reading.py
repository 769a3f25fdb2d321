"""A result record read back: the same types as before it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptrain.costs import (
    Blocked,
    Collective,
    Column,
    Estimate,
    Footprint,
    Operations,
    Peak,
    Phase,
    Spent,
    State,
    StepTime,
    TimeKey,
    TimeRow,
    Traffic,
    TrafficKey,
)
from ptrain.derivation.wire import WireRow
from ptrain.report.record import Check


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
    """Every column that the record has rows for."""
    rows = [row for kind in ("memory", "peak", "traffic") for row in record[kind]]
    columns = dict.fromkeys(Column(row["column"]) for row in rows)
    return Reading(
        estimates={column: _estimate(record, column) for column in columns},
        checks=tuple(Check(**check) for check in record["checks"]),
        wire=tuple(_wire(row) for row in record.get("wire", ())),
        step_seconds=next(
            (row["value"] for row in record["step_seconds"] if row["column"] == Column.MEASURED),
            None,
        ),
    )


def _estimate(record: Mapping[str, Any], column: Column) -> Estimate:
    def rows(kind: str) -> list[dict[str, Any]]:
        return [row for row in record[kind] if row["column"] == column]

    return Estimate(
        column=column,
        world_size=record["world_size"],
        memory=tuple(_footprint(row) for row in rows("memory")),
        peak=tuple(_peak(row) for row in rows("peak")),
        traffic=tuple(_traffic(row) for row in rows("traffic")),
        blocked=_blocked(record) if column is Column.MEASURED else (),
        operations=_operations(record, column),
        undefined=record.get("undefined", {}).get(column, {}),
        by_data=record.get("by_data", {}).get(column, {}),
        assumed=record.get("assumed", {}).get(column, {}),
        counted=record.get("counted", {}).get(column, {}),
        step=_step(record, column),
    )


def _step(record: Mapping[str, Any], column: Column) -> StepTime | None:
    """A measured step's time has no rows, and records of older versions have none."""
    for row in record["step_seconds"]:
        if row["column"] == column and "rows" in row:
            return StepTime(rows=tuple(map(_time, row["rows"])), assumed=tuple(row["assumed"]))
    return None


def _time(row: Mapping[str, Any]) -> TimeRow:
    collective = row["collective"]
    key = TimeKey(
        Spent(row["spent"]),
        Phase(row["phase"]),
        tuple(row["axes"]),
        None if collective is None else Collective(collective),
    )
    return TimeRow(key=key, seconds=row["seconds"], moving=row["moving"])


def _footprint(row: Mapping[str, Any]) -> Footprint:
    return Footprint(
        state=State(row["state"]),
        rank=row["rank"],
        device_bytes=row["device_bytes"],
        host_bytes=row["host_bytes"],
        file_bytes=row["file_bytes"],
        lower_bytes=row.get("lower_bytes"),
    )


def _peak(row: Mapping[str, Any]) -> Peak:
    return Peak(
        phase=Phase(row["phase"]),
        rank=row["rank"],
        device_bytes=row["device_bytes"],
        allocator_bytes=row.get("allocator_bytes", 0),
        lower_bytes=row.get("lower_bytes"),
    )


def _traffic(row: Mapping[str, Any]) -> Traffic:
    key = TrafficKey(
        axes=tuple(row["axes"]),
        collective=Collective(row["collective"]),
        state=State(row["state"]),
        phase=Phase(row["phase"]),
        via=row.get("via"),
    )
    return Traffic(
        key=key,
        calls=row["calls"],
        payload_bytes=row["payload_bytes"],
        sent_bytes=row["sent_bytes"],
    )


def _wire(row: Mapping[str, Any]) -> WireRow:
    return WireRow(
        axes=tuple(row["axes"]),
        predicted_bytes=row["predicted_bytes"],
        measured_bytes=row["measured_bytes"],
        factor=row["factor"],
    )


def _operations(record: Mapping[str, Any], column: Column) -> tuple[Operations, ...]:
    """Records of older versions have none."""
    return tuple(
        Operations(
            rank=row["rank"], forward=row["forward"], backward=row["backward"], again=row["again"]
        )
        for row in record.get("operations", ())
        if row["column"] == column
    )


def _blocked(record: Mapping[str, Any]) -> tuple[Blocked, ...]:
    """Waiting is measured only."""
    return tuple(
        Blocked(axes=tuple(row["axes"]), rank=row["rank"], seconds=row["seconds"])
        for row in record.get("blocked_seconds", ())
    )
