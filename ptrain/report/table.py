"""Tables as plain text: predicted | measured | difference, always with units.

rich lays them out; the text has no colour, so a file, a log and a terminal show the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ptrain.costs import Estimate, Footprint, Phase, State, Traffic, TrafficKey
from ptrain.report.record import Check, checks_line, verdict_line
from ptrain.units import format_bytes

MISSING = "–"
WIDTH = 200  # a wider table is cut; none is


def render(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)
) -> str:
    """A table without frames, two blanks between its columns; all but those in `left` to the
    right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


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


def end_table(exact: Estimate, measured: Estimate) -> str:
    """The table that ends a training: a row per state, per kind of call and per phase's peak; of
    the ranks, the largest."""
    rows = [*_memory_rows(exact, measured), *_peak_rows(exact, measured)]
    rows += _traffic_rows(exact, measured)
    return render(("per rank and step", "predicted", "measured", "difference"), rows)


def summary(exact: Estimate, measured: Estimate, checks: Sequence[Check], *, torch: str) -> str:
    """The table, the checks that fail, what was checked, the verdict."""
    failing = [
        f"fails: {check.name}: {check.why} (tolerance {check.tolerance:.0%})"
        for check in checks
        if not check.holds
    ]
    ranks = len({row.rank for row in measured.memory})
    return "\n".join(
        [
            end_table(exact, measured),
            *failing,
            checks_line(checks, ranks=ranks),
            verdict_line(checks, torch=torch),
        ]
    )


def largest(rows: Iterable[Footprint], state: State) -> int | None:
    """Bytes of `state` on the rank that holds most of it, all tiers; None without a row."""
    sizes = [
        row.device_bytes + row.host_bytes + row.file_bytes for row in rows if row.state is state
    ]
    return max(sizes, default=None)


def _memory_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    for state in State:
        left, right = largest(exact.memory, state), largest(measured.memory, state)
        if left or right:
            yield str(state), size(left), size(right), difference(left, right)


def _peak_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    phases = dict.fromkeys(row.phase for row in (*exact.peak, *measured.peak))
    for phase in phases:
        left, right = (
            max((row.device_bytes for row in each.peak if row.phase is phase), default=None)
            for each in (exact, measured)
        )
        yield f"peak {phase}", size(left), size(right), difference(left, right)


def _traffic_rows(exact: Estimate, measured: Estimate) -> Iterable[tuple[str, str, str, str]]:
    left, right = _by_key(exact.traffic), _by_key(measured.traffic)
    for key in sorted({*left, *right}, key=traffic_order):
        yield (
            traffic_label(key),
            _calls(left.get(key)),
            _calls(right.get(key)),
            difference(
                left[key].sent_bytes if key in left else None,
                right[key].sent_bytes if key in right else None,
            ),
        )


def _by_key(rows: Iterable[Traffic]) -> dict[TrafficKey, Traffic]:
    """Of several ranks' rows with one key, the one that sends most."""
    return {row.key: row for row in sorted(rows, key=lambda row: row.sent_bytes)}


def _calls(row: Traffic | None) -> str:
    return MISSING if row is None else f"{row.calls} × · {format_bytes(row.sent_bytes)}"


def traffic_label(key: TrafficKey) -> str:
    """`all_gather dp_shard, forward (parameters)`."""
    via = f" via {key.via}" if key.via else ""
    return f"{key.collective} {'+'.join(key.axes) or 'world'}{via}, {key.phase} ({key.state})"


def traffic_order(key: TrafficKey) -> tuple[int, str]:
    """By phase, then by name."""
    return list(Phase).index(key.phase), traffic_label(key)
