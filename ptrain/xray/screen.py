"""The result of an X-ray: its JSON record, and its screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from ptrain.codec import encode
from ptrain.cost import PLACED, State
from ptrain.report.table import Importance, TableColumn, make_columns, name_column, render_table
from ptrain.spec.placement import in_any_block
from ptrain.units import format_bytes, format_seconds, sum_by_key
from ptrain.xray.findings import Finding, replication_notes
from ptrain.xray.infer import UNKNOWN, Inference, MeshAxis, units_of
from ptrain.xray.observation import Observation

_MODULES = 8  # rows of the table of modules


@dataclass(slots=True, kw_only=True)
class XRay:
    """The inferred placement of a job with its measured figures.

    Attributes:
        job: The inference.
        findings: Traps, then differences from a spec.
        spec: The spec of the same placement as YAML, "" if there is none.
        no_spec: The reason if there is none.
        predicted_bytes: Predicted bytes of a rank by state and `peak`, from a given spec.
        no_prediction: The reason if there is none.
    """

    job: Inference
    findings: list[Finding] = field(default_factory=list)
    spec: str = ""
    no_spec: str = ""
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    no_prediction: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the result as plain data, for `--json`."""
        job, seen = self.job, self.job.observations
        accumulation, recomputed = job.accumulation, job.recomputed
        return {
            "world_size": seen[0].world_size,
            "observed_ranks": [one.rank for one in seen],
            "steps": list(seen[0].steps),
            "seconds": max((one.seconds for one in seen if one.seconds is not None), default=None),
            "watched_seconds": list(seen[0].watched_seconds),
            "axes": [encode(axis) for axis in job.axes],
            "findings": [finding._asdict() for finding in self.findings],
            "dtypes": {
                "parameters": job.dtype_of(State.PARAMETERS),
                "gathered": job.moved_dtype(State.PARAMETERS),
                "gradients": job.dtype_of(State.GRADIENTS),
                "reduced": job.moved_dtype(State.GRADIENTS),
                "optimizer": job.dtype_of(State.OPTIMIZER),
            },
            "accumulation": UNKNOWN if accumulation is None else accumulation,
            "recomputation": UNKNOWN if recomputed is None else recomputed,
            "units": [
                {"kind": kind, "path": path, "count": number}
                for kind, path, number in units_of(seen)
            ],
            "memory": [encode(row) for one in seen for row in one.memory],
            "peaks": [encode(row) for one in seen for row in one.peaks],
            "modules": [
                {"path": path, "peak_bytes": peak, "kept_bytes": kept}
                for path, peak, kept in module_rows(seen)
            ],
            "traffic": [row._asdict() for row in traffic_rows(job)],
            "blocked": [
                {"rank": one.rank, "axis": axis_label(job, row.ranks), "seconds": row.seconds}
                for one in seen
                for row in one.waits
            ],
            "host_share": UNKNOWN if (share := seen[0].host_share) is None else share,
            "unknown": dict(seen[0].unknown or {}),
            "spec": self.spec or None,
            "predicted": self.predicted_bytes or None,
            "reasons": {"spec": self.no_spec, "predicted": self.no_prediction},
        }  # fmt: skip

    def screen_lines(self) -> Iterator[str]:
        """Yield the screen: the placement first."""
        job, seen = self.job, self.job.observations
        yield _first_line(seen)
        yield from (
            ("", *_axis_table(job.axes)) if job.axes else ("Placement: one rank, or no mesh.",)
        )
        yield ""
        yield from self._job_lines()
        yield from ("", "Findings" if self.findings else "Findings: none")
        for finding in self.findings:
            yield f"- {finding.text}"
            if finding.fix:
                yield f"  fix: {finding.fix}"
        yield from ("", *self._memory_table())
        if rows := list(module_rows(seen)):
            heads = name_column("module"), TableColumn("kept for backward"), TableColumn("peak")
            cells = (
                [p, format_bytes(kept), format_bytes(peak)] for p, peak, kept in rows[:_MODULES]
            )
            yield from ("", render_table(make_columns(cells, *heads)))
        if traffic := traffic_rows(job):
            yield from ("", _traffic_table(traffic))
        if notes := [note for axis in job.axes for note in replication_notes(axis)]:
            yield from ("", "Replicated state that could be sharded")
            yield from (f"- {note}" for note in notes)
        yield ""
        if self.no_spec:
            yield f"Spec: unknown. {self.no_spec}"
        if self.no_prediction:
            yield f"Prediction: none. {self.no_prediction}"

    def _job_lines(self) -> Iterator[str]:
        """Yield the lines on dtypes, micro-batches, recomputation, wrap units and time."""
        record = self.as_record()
        yield "dtypes: " + " · ".join(f"{what} {name}" for what, name in record["dtypes"].items())
        again = record["recomputation"]
        again = again if isinstance(again, str) else ", ".join(again) or "none"
        yield f"micro-batches per step: {record['accumulation']} · recomputed: {again}"
        if record["units"]:
            units = (f"{unit['kind']} {unit['path']} x {unit['count']}" for unit in record["units"])
            yield f"wrap units: {' · '.join(units)}"
        seconds = record["seconds"]
        time = UNKNOWN if seconds is None else format_seconds(seconds)
        waits = [row["seconds"] for row in record["blocked"]]
        waited = sum_by_key((row["rank"], row["seconds"]) for row in record["blocked"]).values()
        blocked = f"{min(waited):.2g} to {max(waited):.2g} s" if waits else UNKNOWN
        host = record["host_share"]
        yield f"step: {time} · waiting for collectives: {blocked} · host-bound: {host}"

    def _memory_table(self) -> Iterator[str]:
        """Yield the table of memory by state: least and most over ranks, and predicted bytes."""
        sizes: dict[str, list[int]] = {}
        for seen in self.job.observations:
            for row in seen.memory:
                sizes.setdefault(str(row.state), []).append(row.device_bytes + row.host_bytes)
            if seen.peaks:
                sizes.setdefault("peak", []).append(max(peak.device_bytes for peak in seen.peaks))
        cells = [
            [
                state, format_bytes(min(held)), format_bytes(max(held)),
                format_bytes(self.predicted_bytes[state]) if state in self.predicted_bytes else "–",
            ]
            for state, held in sizes.items()
        ]  # fmt: skip
        heads = [
            name_column("memory per rank"), TableColumn("min"),
            TableColumn("max", Importance.RESULT), TableColumn("predicted"),
        ]  # fmt: skip
        columns = make_columns(cells, *heads)
        yield render_table(columns if self.predicted_bytes else columns[:-1])


def _first_line(seen: Sequence[Observation]) -> str:
    """Return the line on the ranks and steps."""
    size = seen[0].world_size
    part = "" if len(seen) == size else f" ({len(seen)} observed, so placements may be unknown)"
    first, last = seen[0].steps
    return f"X-ray of {size} ranks{part}, steps {first} to {last}, {seen[0].backend or 'no group'}"


def _axis_table(axes: Sequence[MeshAxis]) -> Iterator[str]:
    """Yield the table of placements."""
    heads = [
        name_column("axis"), TableColumn("size"), TableColumn("kind", left=True),
        *(TableColumn(str(state), Importance.RESULT, left=True) for state in PLACED),
        TableColumn("calls per step"),
    ]  # fmt: skip
    rows = [
        [axis.label, str(axis.size), axis.kind, *axis.modes, str(axis.collectives)] for axis in axes
    ]
    yield render_table(make_columns(rows, *heads))


def axis_label(job: Inference, ranks: tuple[int, ...]) -> str:
    """Return the name of the axis with this group, or `axes A, B`, or the ranks."""
    for axis in job.axes:
        if ranks in axis.ranks:
            return axis.label
    spanned = [axis.label for axis in job.axes if any({*g} <= {*ranks} for g in axis.ranks)]
    return " x ".join(spanned) or "ranks " + ",".join(map(str, ranks))


class TrafficRow(NamedTuple):
    """Equal calls per step, of the rank that sends most."""

    axis: str
    phase: str
    collective: str
    state: str
    dtype: str
    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


def traffic_rows(job: Inference) -> list[TrafficRow]:
    """Return the traffic by axis, phase, collective, state and dtype."""
    most: dict[TrafficRow, TrafficRow] = {}
    for seen in job.observations:
        sums: dict[TrafficRow, TrafficRow] = {}
        for call in seen.calls:
            label, kind = axis_label(job, call.ranks), str(call.collective)
            key = TrafficRow(label, str(call.phase), kind, str(call.state), call.dtype)
            row = sums.get(key, key)
            sums[key] = row._replace(
                calls=row.calls + call.calls,
                payload_bytes=row.payload_bytes + call.payload_bytes,
                sent_bytes=row.sent_bytes + call.sent_bytes,
            )
        for key, row in sums.items():
            most[key] = max(most.get(key, row), row, key=attrgetter("sent_bytes"))
    return [*most.values()]


def _traffic_table(rows: Sequence[TrafficRow]) -> str:
    """Return the table of traffic."""
    heads = [
        name_column("axis"), TableColumn("phase", left=True),
        TableColumn("collective", Importance.RESULT, left=True),
        TableColumn("state", Importance.RESULT, left=True), TableColumn("dtype", left=True),
        TableColumn("calls"), TableColumn("sent per rank", Importance.RESULT),
    ]  # fmt: skip
    cells = [
        [row.axis, row.phase, row.collective, row.state, row.dtype, str(row.calls),
         format_bytes(row.sent_bytes)]
        for row in rows
    ]  # fmt: skip
    return render_table(make_columns(cells, *heads))


def module_rows(seen: Sequence[Observation]) -> Iterator[tuple[str, int, int]]:
    """Yield path pattern, peak and bytes kept for backward, most kept bytes first."""
    peaks: dict[str, int] = {}
    kept: dict[str, int] = {}
    for one in seen:
        for fact in one.modules:
            path = in_any_block(fact.path) or "root"
            peaks[path] = max(peaks.get(path, 0), fact.peak_bytes)
            kept[path] = max(kept.get(path, 0), fact.kept_bytes)
    for path in sorted(kept, key=lambda path: kept[path], reverse=True):
        yield path, peaks[path], kept[path]
