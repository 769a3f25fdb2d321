"""Bars and curves with round numbers on their axes, for pages of any width.

Each bar has a line of text above it, so that a bar is as long on a phone as the page is wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ptrain.charts.sheet import (
    BLACK,
    EDGE,
    GREY,
    LIGHT,
    LINE,
    NUMBER,
    SMALL,
    WIDE,
    Label,
    Line,
    Rectangle,
    Sheet,
    Units,
    place_colour,
    round_ticks,
    text_width,
)

_BAR, _GAP, _TICK, _GRID = 13.0, 8.0, 2.0, 0.6
_AIR = 6.0  # between two texts on a line
_TICKS_APART = 74.0  # points for each number of a horizontal axis, at least
_HEIGHT, _STEPS = 130.0, 4  # the height of curves, and intervals of their vertical axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of coloured parts.

    Attributes:
        label: The name above it, on the left.
        note: The figures above it, on the right.
        parts: The colour and the size of each part.
        mark: The size that a black tick marks. None: no tick.
    """

    label: str
    note: str = ""
    parts: Sequence[tuple[str, float]] = ()
    mark: float | None = None

    @property
    def length(self) -> float:
        """The end of the parts and of the tick."""
        return max(sum(size for _, size in self.parts), self.mark or 0)


def bars_sheet(
    heading: Sequence[str],
    bars: Sequence[Bar],
    units: Units,
    *,
    legend: Mapping[str, str] | None = None,
    limits: Iterable[tuple[str, float]] = (),
    width: float = WIDE,
) -> Sheet:
    """Return a picture of bars.

    Args:
        heading: The title and the lines below it.
        bars: From top to bottom.
        units: The units of the axis.
        legend: The names of the colours of parts.
        limits: Names and sizes of vertical lines, such as usable memory.
        width: The width of the sheet in points.
    """
    sheet = Sheet(title=heading[0], width=width, height=EDGE)
    sheet.add_heading(*heading)
    lines = sorted(limits, key=lambda limit: limit[1])
    most = max([*(bar.length for bar in bars), *(size for _, size in lines)], default=0) or 1
    scale = (width - 2 * EDGE) / most
    for text, size in lines:
        x = EDGE + size * scale
        words = Label(text=text, x=x, y=sheet.height + SMALL / 2, size=SMALL)
        is_left = words.width > x - EDGE
        sheet.texts.append(words if is_left else words.moved("right"))
        sheet.height += SMALL * LINE
    ticks = round_ticks(most, units, max(2, int(width / _TICKS_APART)))
    for bar in bars:
        _add_texts(sheet, bar)
        # Only next to the bar: lines through the texts would be hard to read.
        top, high = sheet.height, _BAR + 2 * _GRID
        sheet.rectangles += [
            Rectangle(x=EDGE + size * scale, y=top, width=_GRID, height=high, colour=LIGHT)
            for size, _ in ticks
        ]
        _add_parts(sheet, bar, scale)
        for _, size in lines:
            points = ((EDGE + size * scale, top - 1), (EDGE + size * scale, top + high + 1))
            sheet.lines.append(Line(points=points, colour=BLACK, dash=2.5))
    for size, text in ticks:
        x, y = EDGE + size * scale, sheet.height + 2
        number = Label(text=text, x=x, y=y, size=SMALL, colour=GREY, align="center")
        sheet.texts.append(number.within(EDGE, width))
    sheet.height += 2.5 * SMALL
    if legend:
        sheet.add_legend(EDGE, legend, SMALL)
    sheet.height += EDGE / 2
    return sheet


def _add_texts(sheet: Sheet, bar: Bar) -> None:
    """Add the texts of a bar at the bottom of a sheet."""
    label = Label(text=bar.label, x=EDGE, y=0, size=SMALL, is_bold=True)
    note = Label(text=bar.note, x=EDGE, y=0, size=SMALL, colour=GREY)
    is_one_line = label.width + note.width + _AIR <= sheet.width - 2 * EDGE
    sheet.write([label] if is_one_line or not bar.note else [label, note])
    if is_one_line:
        sheet.texts.append(note.moved("right", x=sheet.width - EDGE, y=sheet.texts[-1].y))
    sheet.height += 2


def _add_parts(sheet: Sheet, bar: Bar, scale: float) -> None:
    """Add the parts and the tick of a bar at the bottom of a sheet."""
    x, y = EDGE, sheet.height + _GRID
    for colour, size in bar.parts:
        box = Rectangle(x=x, y=y, width=size * scale, height=_BAR, colour=colour, edge_width=_GRID)
        sheet.rectangles.append(box)
        x += box.width
    if bar.mark is not None:
        x = EDGE + bar.mark * scale
        points = ((x, y - 1), (x, y + _BAR + 1))
        sheet.lines.append(Line(points=points, colour=BLACK, width=_TICK))
    sheet.height = y + _BAR + _GAP


Curve = tuple[str, Sequence[tuple[float, float]]]  # a name, and points (step, figure)


def curves_sheet(
    heading: Sequence[str],
    curves: Sequence[Curve],
    units: Units = NUMBER,
    *,
    starts_at_zero: bool = False,
    width: float = WIDE,
) -> Sheet:
    """Return a picture of figures over the steps of trainings.

    Args:
        heading: The title and the lines below it.
        curves: One per training, each with a point at least.
        units: The units of the figures.
        starts_at_zero: Begin the axis of figures at 0, not at the smallest figure.
        width: The width of the sheet in points.
    """
    sheet = Sheet(title=heading[0], width=width, height=EDGE)
    sheet.add_heading(*heading)
    points = [point for _, curve in curves for point in curve]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low = 0.0 if starts_at_zero else min(figure for _, figure in points)
    high = max(max(figure for _, figure in points), low + 1e-9 * abs(low) + 1e-12)
    ticks = round_ticks(high, units, _STEPS, low)
    left = EDGE + max((text_width(text, SMALL) for _, text in ticks), default=0) + 6
    top, wide, is_long = sheet.height, width - EDGE - left, last > first
    bottom = top + _HEIGHT

    def place(step: float, figure: float) -> tuple[float, float]:
        share = (step - first) / (last - first) if is_long else 0.5
        return left + wide * share, bottom - _HEIGHT * (figure - low) / (high - low)

    for figure, text in ticks:
        _, y = place(first, figure)
        sheet.rectangles.append(Rectangle(x=left, y=y, width=wide, height=_GRID, colour=LIGHT))
        number = Label(text=text, x=left - 4, y=y, size=SMALL, colour=GREY, align="right")
        sheet.texts.append(number)
    for number, (_, curve) in enumerate(curves):
        drawn = [place(*point) for point in curve]
        drawn = drawn if len(drawn) > 1 else [(left, drawn[0][1]), (left + wide, drawn[0][1])]
        sheet.lines.append(Line(points=tuple(drawn), colour=place_colour(_CURVES[number % 6])))
    for step in dict.fromkeys((first, last)):
        text = f"step {step:g}"
        x, _ = place(step, low)
        label = Label(text=text, x=x, y=bottom + SMALL + 2, size=SMALL, colour=GREY, align="center")
        sheet.texts.append(label.within(left, width))
    sheet.height = bottom + 3 * SMALL
    if len(curves) > 1:
        names = {place_colour(_CURVES[at % 6]): name for at, (name, _) in enumerate(curves)}
        sheet.add_legend(EDGE, names, SMALL)
    sheet.height += EDGE / 2
    return sheet


_CURVES = (4, 5, 2, 3, 1, 7)  # places of the darker colours, which are visible as thin lines
