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
    Polyline,
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
        sheet.texts.append(words if is_left else words.move_to("right"))
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
            sheet.lines.append(Polyline(points=points, colour=BLACK, dash=2.5))
    for size, text in ticks:
        x, y = EDGE + size * scale, sheet.height + 2
        number = Label(text=text, x=x, y=y, size=SMALL, colour=GREY, align="center")
        sheet.texts.append(number.clamp_between(EDGE, width))
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
        sheet.texts.append(note.move_to("right", x=sheet.width - EDGE, y=sheet.texts[-1].y))
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
        sheet.lines.append(Polyline(points=points, colour=BLACK, width=_TICK))
    sheet.height = y + _BAR + _GAP


class Plane:
    """The area of a picture with two axes.

    Args:
        sheet: The sheet; the area is added at its bottom.
        ends: The first and the last figure of the horizontal axis, and of the vertical one.
        units: The units of the vertical axis.
        height: The height of the area in points.
    """

    def __init__(
        self, sheet: Sheet, ends: tuple[float, float, float, float], units: Units, height: float
    ) -> None:
        self.sheet, self.ends, self.height, self.top = sheet, ends, height, sheet.height
        ticks = round_ticks(ends[3], units, _STEPS, ends[2])
        self.left = EDGE + max((text_width(text, SMALL) for _, text in ticks), default=0) + 6
        self.width = sheet.width - EDGE - self.left
        sheet.height += height
        for figure, text in ticks:
            _, y = self.point_position(ends[0], figure)
            grid = Rectangle(x=self.left, y=y, width=self.width, height=_GRID, colour=LIGHT)
            sheet.rectangles.append(grid)
            number = Label(text=text, x=self.left - 4, y=y, size=SMALL, colour=GREY, align="right")
            sheet.texts.append(number)

    def point_position(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point on the sheet."""
        first, last, low, high = self.ends
        right = self.width * (x - first) / ((last - first) or 1)
        return self.left + right, self.top + self.height * (1 - (y - low) / ((high - low) or 1))

    def add_numbers(self, ticks: Iterable[tuple[float, str]]) -> None:
        """Add the numbers of the horizontal axis at the bottom of the sheet."""
        for figure, text in ticks:
            x, y = self.point_position(figure, self.ends[2])
            grid = Rectangle(x=x, y=self.top, width=_GRID, height=self.height, colour=LIGHT)
            self.sheet.rectangles.append(grid)
            number = Label(text=text, x=x, y=y + SMALL + 2, size=SMALL, colour=GREY, align="center")
            self.sheet.texts.append(number.clamp_between(self.left, self.sheet.width))
        self.sheet.height += 3 * SMALL


CurvePoints = Sequence[tuple[float, float]]  # (step, figure), one at least


def curves_sheet(
    heading: Sequence[str],
    curves: Mapping[str, CurvePoints],
    *,
    starts_at_zero: bool = False,
    width: float = WIDE,
) -> Sheet:
    """Return a picture of figures over the steps of trainings.

    Args:
        heading: The title and the lines below it.
        curves: The points of each training, by name.
        starts_at_zero: Begin the axis of figures at 0, not at the smallest figure.
        width: The width of the sheet in points.
    """
    sheet = Sheet(title=heading[0], width=width, height=EDGE)
    sheet.add_heading(*heading)
    steps, figures = zip(*(point for curve in curves.values() for point in curve), strict=True)
    ends = (min(steps), max(steps), 0.0 if starts_at_zero else min(figures), max(figures))
    plane = Plane(sheet, ends, NUMBER, _HEIGHT)
    plane.add_numbers({step: f"step {step:g}" for step in ends[:2]}.items())
    names = {}
    for turn, (name, curve) in enumerate(curves.items()):
        colour = place_colour(_CURVES[turn % len(_CURVES)])
        x, y = plane.point_position(*curve[-1])
        drawn = (
            *(plane.point_position(*point) for point in curve),
            (x + 1, y),
        )  # one point is a short line
        sheet.lines.append(Polyline(points=drawn, colour=colour))
        names[colour] = name
    if len(curves) > 1:
        sheet.add_legend(EDGE, names, SMALL)
    sheet.height += EDGE / 2
    return sheet


_CURVES = (4, 5, 2, 3, 1, 7)  # places of the darker colours, which are visible as thin lines
