"""Tables as plain text, and what their rows are called.

The text has no colour, so a file, a log and a terminal show the same. Laid out here: rich, which
draws a training's bar, takes as long to be imported as a small spec to be derived.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from ptrain.by_rank import distinct
from ptrain.costs import TIERS, Footprint, Phase, Traffic, TrafficKey, lower_bytes
from ptrain.units import format_bytes

MISSING = "–"
Largest = Mapping[tuple[str, str], int]  # bytes by state and tier
_SIZES = attrgetter("state", *TIERS)
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


def span(lower: int | None, upper: int | None) -> str:
    """`1.2 MB … 3.4 MB` of a figure that lies between two, else as `size`."""
    if lower is None or lower == upper:
        return size(upper)
    return f"{size(lower)} … {size(upper)}"


def least(rows: Sequence[Footprint]) -> Largest:
    """As `largest`, if as little is allocated as can be."""
    return largest([replace(row, device_bytes=lower_bytes(row)) for row in distinct(rows)])


def largest(rows: Sequence[Footprint]) -> Largest:
    """Bytes by state and tier, of the rank that holds most; a state without a row has none."""
    most: dict[tuple[str, str], int] = {}
    for state, *sizes in set(map(_SIZES, distinct(rows))):  # few: most ranks are like others
        for tier, number in zip(TIERS, sizes, strict=True):
            most[state, tier] = max(number, most.get((state, tier), 0))
    return most


def on_tiers(state: str) -> Iterable[tuple[str, str]]:
    """Yield each tier with what a state's rows are called there: `optimizer on the host` …"""
    return ((tier, f"{state}{_SUFFIXES[tier]}") for tier in TIERS)


_SUFFIXES = dict(zip(TIERS, ("", " on the host", " in files"), strict=True))


def moved_bytes(row: Traffic) -> int:
    """Return the bytes that are sent to other ranks, or copied between the rank's own tiers."""
    return row.payload_bytes if row.key.collective.is_copy else row.sent_bytes


def traffic_label(key: TrafficKey) -> str:
    """`all_gather dp_shard, forward (parameters)`; a copy between tiers has no axes."""
    via = f" via {key.via}" if key.via else ""
    where = "" if key.collective.is_copy else f" {'+'.join(key.axes) or 'world'}"
    return f"{key.collective}{where}{via}, {key.phase} ({key.state})"


def traffic_order(key: TrafficKey) -> tuple[int, str]:
    """Return what sorts by phase, then by name."""
    return list(Phase).index(key.phase), traffic_label(key)
