"""Tables as plain text: predicted | measured | difference, always with units.

The text has no colour, so a file, a log and a terminal show the same. Laid out here: rich, which
draws a training's bar, takes as long to be imported as a small spec to be derived.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from ptrain.costs import (
    Estimate,
    Footprint,
    Phase,
    State,
    Traffic,
    TrafficKey,
    busiest,
    distinct,
)
from ptrain.derivation.wire import WireRow, wire_rows
from ptrain.report.record import TIERS, Check, checks_line, verdict_line
from ptrain.units import format_bytes

MISSING = "–"
_BETWEEN = "  "
_TWO_WIDE = ("W", "F")  # Unicode's East Asian width of what takes two columns of a terminal


def render(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)
) -> str:
    """A table without frames, two blanks between its columns; all but those in `left` to the
    right."""
    lines = [columns, *rows]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths, left) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
    padded = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blanks = " " * (width - _width(cell))
        padded.append(cell + blanks if index in left else blanks + cell)
    return _BETWEEN.join(padded).rstrip()


def _width(text: str) -> int:
    """Columns of a terminal that the text takes."""
    if text.isascii():
        return len(text)
    return sum(_columns(letter) for letter in text)


def _columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in _TWO_WIDE else 1


def size(number: int | None) -> str:
    """Bytes to four digits, or a dash where a column has no such row."""
    return MISSING if number is None else format_bytes(number)


def difference(predicted: int | None, measured: int | None) -> str:
    """`0`, or bytes and percent: `+32 B (+0.1 %)`."""
    if predicted is None or measured is None:
        return "missing"
    delta = measured - predicted
    if delta == 0:
        return "0"
    percent = f" ({delta / predicted:+.2%})" if predicted else ""
    return f"{'+' if delta > 0 else '-'}{format_bytes(abs(delta))}{percent}"


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


def largest(rows: Sequence[Footprint], state: State, tier: str = TIERS[0]) -> int | None:
    """Bytes of `state` on one tier of the rank that holds most of it; None without a row."""
    sizes: list[int] = [getattr(row, tier) for row in distinct(rows) if row.state is state]
    return max(sizes, default=None)


def on_tiers(state: str) -> Iterable[tuple[str, str]]:
    """What a state's rows are called, by tier: `optimizer`, `optimizer on the host` …"""
    return ((tier, f"{state}{_SUFFIXES[tier]}") for tier in TIERS)


_SUFFIXES = dict(zip(TIERS, ("", " on the host", " in files"), strict=True))


def _memory_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    for state in State:
        for tier, label in on_tiers(state):
            left, right = (largest(each.memory, state, tier) for each in (exact, measured))
            if left or right:
                yield label, size(left), size(right), difference(left, right)


def _peak_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    phases = dict.fromkeys(row.phase for row in (*exact.peak, *measured.peak))
    for phase in phases:
        left, right = (
            max((row.device_bytes for row in each.peak if row.phase is phase), default=None)
            for each in (exact, measured)
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


def moved_bytes(row: Traffic) -> int:
    """What is sent to other ranks, or copied between the rank's own tiers."""
    return row.payload_bytes if row.key.collective.is_copy else row.sent_bytes


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
        ("+".join(axes), f"{min(each):.3f} s", f"{max(each):.3f} s")
        for axes, each in seconds.items()
    ]
    return render(("blocked per step", "least", "most of the ranks"), rows) if rows else ""


def _by_key(rows: Iterable[Traffic]) -> dict[TrafficKey, Traffic]:
    return {row.key: row for row in busiest(rows)}


def _calls(row: Traffic | None) -> str:
    if row is None:
        return MISSING
    return f"{row.calls} call{'s' * (row.calls != 1)}, {format_bytes(moved_bytes(row))}"


def traffic_label(key: TrafficKey) -> str:
    """`all_gather dp_shard, forward (parameters)`; a copy between tiers has no axes."""
    via = f" via {key.via}" if key.via else ""
    where = "" if key.collective.is_copy else f" {'+'.join(key.axes) or 'world'}"
    return f"{key.collective}{where}{via}, {key.phase} ({key.state})"


def traffic_order(key: TrafficKey) -> tuple[int, str]:
    """By phase, then by name."""
    return list(Phase).index(key.phase), traffic_label(key)
