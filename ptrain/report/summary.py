"""What ends a training: predicted | measured | difference, always with units, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ptrain.costs import Estimate, State, Traffic, TrafficKey, busiest
from ptrain.derivation.wire import WireRow, wire_rows
from ptrain.report.record import Check, checks_line, verdict_line
from ptrain.report.table import (
    MISSING,
    largest,
    moved_bytes,
    on_tiers,
    render,
    size,
    traffic_label,
    traffic_order,
)
from ptrain.units import format_bytes


def end_table(
    exact: Estimate, measured: Estimate, names: tuple[str, str] = ("predicted", "measured")
) -> str:
    """The table that ends a training: a row per state, per kind of call and per phase's peak; of
    the ranks, the largest. `names` head the two columns."""
    rows = [*_memory_rows(exact, measured), *_peak_rows(exact, measured)]
    rows += _traffic_rows(exact, measured)
    return render(("per rank and step", *names, "difference"), rows)


def summary(
    exact: Estimate,
    measured: Estimate,
    checks: Sequence[Check],
    *,
    torch: str,
    wire: Sequence[WireRow] | None = None,
) -> str:
    """The tables, the checks that fail, what was checked, the verdict. `wire`: rows that a record
    has; None: made from the two accounts."""
    wire = wire_rows(exact, measured) if wire is None else wire
    failing = [
        f"fails: {check.name}: {check.why} (tolerance {check.tolerance:.0%})"
        for check in checks
        if not check.holds
    ]
    ranks = len({row.rank for row in measured.memory})
    more = [table for table in (wire_table(wire), blocked_table(measured)) if table]
    return "\n".join(
        [
            end_table(exact, measured),
            *(f"\n{table}" for table in more),
            *[""] * bool(more),
            *failing,
            checks_line(checks, ranks=ranks),
            verdict_line(checks, torch=torch, untold=exact.undefined),
        ]
    )


def difference(predicted: int | None, measured: int | None) -> str:
    """`0`, or bytes and percent: `+32 B (+0.1 %)`."""
    if predicted is None or measured is None:
        return "missing"
    delta = measured - predicted
    if delta == 0:
        return "0"
    percent = f" ({delta / predicted:+.2%})" if predicted else ""
    return f"{'+' if delta > 0 else '-'}{format_bytes(abs(delta))}{percent}"


def _memory_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    predicted, counted = largest(exact.memory), largest(measured.memory)
    for state in State:
        for tier, label in on_tiers(state):
            left, right = predicted.get((state, tier)), counted.get((state, tier))
            if left or right:
                yield label, size(left), size(right), difference(left, right)


def _peak_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    phases = dict.fromkeys(row.phase for row in (*exact.peak, *measured.peak))
    for phase in phases:
        left, right = (
            max((row.device_bytes for row in estimate.peak if row.phase is phase), default=None)
            for estimate in (exact, measured)
        )
        yield f"peak {phase}", size(left), size(right), difference(left, right)
        allocated = max(
            (row.allocator_bytes for row in measured.peak if row.phase is phase), default=0
        )
        if allocated:
            yield f"peak {phase}, allocator", MISSING, size(allocated), difference(right, allocated)


def _traffic_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    left, right = _by_key(exact.traffic), _by_key(measured.traffic)
    for key in sorted({*left, *right}, key=traffic_order):
        yield (
            traffic_label(key),
            _calls(left.get(key)),
            _calls(right.get(key)),
            difference(
                moved_bytes(left[key]) if key in left else None,
                moved_bytes(right[key]) if key in right else None,
            ),
        )


def wire_table(wire: Sequence[WireRow]) -> str:
    """Bytes that the ranks' sockets counted, against sent x the backend's factor; empty where no
    socket was read."""
    rows = [
        (
            "+".join(row.axes),
            size(row.predicted_bytes),
            size(row.measured_bytes),
            f"{row.measured_bytes / row.predicted_bytes - 1:+.3%}" if row.predicted_bytes else "",
            row.factor,
        )
        for row in wire
    ]
    columns = ("on the wire", "predicted", "measured", "difference", "sent by the backend")
    return render(columns, rows, left=(0, 4)) if rows else ""


def blocked_table(measured: Estimate) -> str:
    """Seconds of the observed steps in which a rank waited for others; empty where none were
    timed."""
    seconds: dict[tuple[str, ...], list[float]] = {}
    for row in measured.blocked:
        seconds.setdefault(row.axes, []).append(row.seconds)
    rows = [
        ("+".join(axes), f"{min(waits):.3f} s", f"{max(waits):.3f} s")
        for axes, waits in seconds.items()
    ]
    return render(("blocked per step", "least", "most of the ranks"), rows) if rows else ""


def _by_key(rows: Iterable[Traffic]) -> dict[TrafficKey, Traffic]:
    return {row.key: row for row in busiest(rows)}


def _calls(row: Traffic | None) -> str:
    if row is None:
        return MISSING
    return f"{row.calls} call{'s' * (row.calls != 1)}, {format_bytes(moved_bytes(row))}"
