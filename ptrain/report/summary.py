"""The end of a training's screen: predicted | measured | difference, then the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ptrain.by_rank import KeyT, distinct, of_ranks
from ptrain.cost import (
    OPERATIONS,
    Estimate,
    Footprint,
    Peak,
    State,
    Traffic,
    TrafficKey,
    busiest,
)
from ptrain.derivation.interconnect import WireRow, wire_rows
from ptrain.report.record import Check, checks_line, compared_ranks, exchange_key, verdict_line
from ptrain.report.step_time import time_table
from ptrain.report.table import (
    MISSING,
    Importance,
    TableColumn,
    by_data_lines,
    difference_columns,
    make_columns,
    memory_span,
    memory_text,
    moved_bytes,
    name_column,
    render_table,
    text_or_dash,
    tier_labels,
    traffic_label,
    traffic_order,
    traffic_text,
)
from ptrain.units import format_bytes, format_memory, format_operations, group_by_key

Row = tuple[str, str, str, str]


def end_table(
    exact: Estimate, measured: Estimate, names: tuple[str, str] = ("predicted", "measured")
) -> str:
    """Return the table at the end of a training: predicted and measured figures per rank and step.

    There is a row for each state, kind of call, phase's peak, and each pass whose operations both
    sides count. A row shows the rank whose figures differ most, or if none differ the largest.

    Args:
        exact: The prediction.
        measured: The measurement or simulation.
        names: The titles of the two columns.
    """
    rows = [*_memory_rows(exact, measured), *_peak_rows(exact, measured)]
    rows += [*_traffic_rows(exact, measured), *_operations_rows(exact, measured)]
    return render_table(make_columns(rows, *difference_columns("per rank and step", *names)))


def training_summary(
    exact: Estimate,
    measured: Estimate,
    checks: Sequence[Check],
    *,
    torch: str,
    wire: Sequence[WireRow] | None = None,
    step_seconds: float | None = None,
) -> str:
    """Return the tables, the checks that fail, the kinds of checks, and the verdict.

    Args:
        exact: The prediction.
        measured: The measurement.
        checks: The comparison of the two (`report.record.compare_estimates`).
        torch: The version of torch, for the verdict's claim.
        wire: Rows of bytes on the wire; by default derived from the two estimates.
        step_seconds: The measured time, shown next to the predicted one.
    """
    wire = wire_rows(exact, measured) if wire is None else wire
    failing = [
        f"fails: {check.name}: {_failure_reason(check)} (tolerance {check.tolerance:.0%})"
        for check in checks
        if not check.holds
    ]
    ranks = len({row.rank for row in measured.memory})
    time = time_table(exact, measured, step_seconds)
    more = [table for table in (wire_table(wire), blocked_table(measured), time) if table]
    return "\n".join(
        [
            end_table(exact, measured),
            *(f"\n{table}" for table in more),
            *[""] * bool(more),
            *failing,
            *by_data_lines(exact),
            checks_line(checks, ranks=ranks),
            verdict_line(checks, torch=torch, untold=exact.undefined, assumed=exact.assumed),
        ]
    )


def difference_text(
    predicted: int | None, measured: int | None, text: Callable[[int], str] = format_memory
) -> str:
    """Return the difference as text: `0`, `+32 B (+0.1 %)`, or `missing` if a side is None.

    Args:
        predicted: The predicted figure.
        measured: The measured figure.
        text: Formats the absolute difference, by default as memory.
    """
    if predicted is None or measured is None:
        return "missing"
    delta = measured - predicted
    if delta == 0:
        return "0"
    percent = f" ({delta / predicted:+.2%})" if predicted else ""
    return f"{'+' if delta > 0 else '-'}{text(abs(delta))}{percent}"


def worst_pair(
    left: Mapping[KeyT, int], right: Mapping[KeyT, int]
) -> tuple[int | None, int | None]:
    """Return both figures of the rank in which they differ most.

    A missing figure counts as the largest difference. Among equal differences, the largest figure
    wins.

    Args:
        left: The figures of one side by rank.
        right: The figures of the other side by rank.
    """
    pairs = [(left.get(rank), right.get(rank)) for rank in {**left, **right}]

    def apart(pair: tuple[int | None, int | None]) -> tuple[float, int]:
        before, after = pair
        if before is None or after is None:  # a missing row is the worst difference
            return math.inf, before or after or 0
        return abs(after - before), max(pair, key=lambda size: size or 0) or 0

    return max(pairs, key=apart, default=(None, None))


def _row_label(label: str, kind: str, exact: Estimate) -> str:
    """Return a row's label, marked if its prediction uses counts of the run."""
    return f"{label}, counted" if kind in exact.counted else label


def _memory_rows(exact: Estimate, measured: Estimate) -> Iterable[Row]:
    """Yield a row for each state and tier that holds bytes on either side."""
    ranks = compared_ranks(exact, measured)
    for state in State:
        predicted_rows = [row for row in of_ranks(exact.memory, ranks) if row.state is state]
        for tier, label in tier_labels(state):
            left, right = (
                {row.rank: getattr(row, tier) for row in rows if row.state is state}
                for rows in (predicted_rows, measured.memory)
            )
            if any({**left, **right}.values()):
                lowers = _lower_bounds(predicted_rows) if tier == "device_bytes" else {}
                yield _row_label(label, str(state), exact), *_figure_cells(left, right, lowers)


def _peak_rows(exact: Estimate, measured: Estimate) -> Iterable[Row]:
    """Yield a row for each phase's peak, and one for the allocator's if it was measured."""
    ranks = compared_ranks(exact, measured)
    phases = dict.fromkeys(row.phase for row in (*distinct(exact.peak), *measured.peak))
    for phase in phases:
        predicted_rows = [row for row in of_ranks(exact.peak, ranks) if row.phase is phase]
        left, right = (
            {row.rank: row.device_bytes for row in rows if row.phase is phase}
            for rows in (predicted_rows, measured.peak)
        )
        yield (
            _row_label(f"peak {phase}", "peak", exact),
            *_figure_cells(left, right, _lower_bounds(predicted_rows)),
        )
        allocated = max(
            (row.allocator_bytes for row in measured.peak if row.phase is phase), default=0
        )
        if allocated:
            _, most = worst_pair(left, right)
            yield (
                f"peak {phase}, allocator",
                MISSING,
                memory_text(allocated),
                difference_text(most, allocated),
            )


def _lower_bounds(rows: Iterable[Footprint | Peak]) -> dict[int, int]:
    """Return the lower bounds by rank, of rows that have one."""
    return {row.rank: row.lower_bytes for row in rows if row.lower_bytes is not None}


def _figure_cells(
    left: Mapping[int, int], right: Mapping[int, int], lowers: Mapping[int, int]
) -> tuple[str, str, str]:
    """Return both figures of the rank in which they differ most, and their difference.

    Args:
        left: The predicted figure of each rank, or its upper bound.
        right: The measured figure of each rank.
        lowers: The lower bound of each rank that has one. The difference is then the distance from
            the bounds.
    """
    if not lowers:
        before, after = worst_pair(left, right)
        return memory_text(before), memory_text(after), difference_text(before, after)
    # The point of the bounds that is nearest to the measured figure; within the bounds it is equal.
    nearest = {
        rank: min(max(right.get(rank, upper), lowers.get(rank, upper)), upper)
        for rank, upper in left.items()
    }
    before, after = worst_pair(nearest, right)
    rank = next(
        (rank for rank in left if (nearest[rank], right.get(rank)) == (before, after)), None
    )
    bounds = memory_text(before) if rank is None else memory_span(lowers.get(rank), left[rank])
    return (
        bounds,
        memory_text(after),
        "within" if before == after else difference_text(before, after),
    )


def _operations_rows(exact: Estimate, measured: Estimate) -> Iterable[Row]:
    """Yield a row for each pass, if both sides count operations."""
    if not exact.operations or not measured.operations:
        return
    ranks = compared_ranks(exact, measured)
    for name in OPERATIONS:
        left, right = worst_pair(
            *(
                {row.rank: getattr(row, name) for row in rows}
                for rows in (of_ranks(exact.operations, ranks), measured.operations)
            )
        )
        if left or right:
            yield (
                f"operations {name}",
                text_or_dash(left, format_operations),
                text_or_dash(right, format_operations),
                difference_text(left, right, format_operations),
            )


def _traffic_rows(exact: Estimate, measured: Estimate) -> Iterable[Row]:
    """Yield a row for each kind of call, of the busiest rank or the busiest one that differs."""
    left, right = _by_key(exact.traffic), _by_key(measured.traffic)
    for key in sorted({*left, *right}, key=traffic_order):
        before, after = _busiest_different(left.get(key, set()), right.get(key, set()))
        label = _row_label(traffic_label(key), exchange_key(key), exact)
        yield label, _calls_text(before), _calls_text(after), _sent_difference(before, after)


def _failure_reason(check: Check) -> str:
    """Return the reason why a check fails: both figures if there are two, else its sentence."""
    is_time = isinstance(check.measured, float)
    if is_time or check.lower is not None or None in (check.predicted, check.measured):
        return check.why
    return f"measured {check.measured:,}, predicted {check.predicted:,}"


def _busiest_different(
    left: set[Traffic], right: set[Traffic]
) -> tuple[Traffic | None, Traffic | None]:
    """Return the busiest rows that only one side has; without any, the busiest row twice."""
    if left == right:
        (most,) = busiest(left)
        return most, most
    pairs = [next(iter(busiest(side)), None) for side in (left - right, right - left)]
    known = [next(iter(busiest(side)), None) for side in (left, right)]
    before, after = (pair or row for pair, row in zip(pairs, known, strict=True))
    return before, after


def _sent_difference(before: Traffic | None, after: Traffic | None) -> str:
    """Return the difference in moved bytes; if those are equal, in payload or in calls."""
    if before is None or after is None:
        return "missing"
    bytes_off = difference_text(moved_bytes(before), moved_bytes(after), format_bytes)
    if bytes_off != "0":
        return bytes_off
    if before.payload_bytes != after.payload_bytes:
        return f"payload {difference_text(before.payload_bytes, after.payload_bytes, format_bytes)}"
    calls = after.calls - before.calls
    return f"{calls:+d} call{'s' * (abs(calls) != 1)}" if calls else "0"


def wire_table(wire: Sequence[WireRow]) -> str:
    """Return a table of the bytes on the wire, predicted and counted by the ranks' sockets.

    The predicted bytes are the traffic times a factor of the backend.

    Args:
        wire: A row per group of axes; if there are none, the result is empty.
    """
    rows = [
        (
            "+".join(row.axes),
            traffic_text(row.predicted_bytes),
            traffic_text(row.measured_bytes),
            f"{row.measured_bytes / row.predicted_bytes - 1:+.3%}" if row.predicted_bytes else "",
            row.factor,
        )
        for row in wire
    ]
    factor = TableColumn("backend", Importance.DETAIL, left=True)
    return (
        render_table(make_columns(rows, *difference_columns("on the wire"), factor)) if rows else ""
    )


def blocked_table(measured: Estimate) -> str:
    """Return a table of the seconds per step that ranks waited for others; empty if not timed."""
    seconds = group_by_key((row.axes, row.seconds) for row in measured.blocked)
    rows = [
        ("+".join(axes), f"{min(waits):.3f} s", f"{max(waits):.3f} s")
        for axes, waits in seconds.items()
    ]
    heads = TableColumn("min over ranks", Importance.DETAIL), TableColumn("max over ranks")
    return render_table(make_columns(rows, name_column("wait per step"), *heads)) if rows else ""


def _by_key(rows: Iterable[Traffic]) -> dict[TrafficKey, set[Traffic]]:
    """Return the different rows of each kind of call."""
    return {
        key: {*rows_of_key}
        for key, rows_of_key in group_by_key((row.key, row) for row in rows).items()
    }


def _calls_text(row: Traffic | None) -> str:
    """Return the calls and moved bytes of a row as text."""
    if row is None:
        return MISSING
    return f"{row.calls} call{'s' * (row.calls != 1)}, {format_bytes(moved_bytes(row))}"
