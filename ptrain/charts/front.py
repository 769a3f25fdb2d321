"""The picture of a search: candidates by time and memory, and the usable memory of a device.

Each derived candidate is a dot. Those of the Pareto front, than which no other is both faster and
smaller, are numbered as in the list below the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.charts.sheet import (
    BLACK,
    EDGE,
    GREY,
    LIGHT,
    LINE,
    MEMORY,
    SMALL,
    TIME,
    WIDE,
    Label,
    Line,
    Rectangle,
    Sheet,
    ink_on,
    round_ticks,
    text_width,
)
from ptrain.report.selection import describe_settings
from ptrain.selection.ranking import PlacementRanking, Ranked
from ptrain.units import format_memory

_HEIGHT, _DOT, _NUMBERED = 240.0, 4.0, 11.0
# Okabe and Ito's vermillion and sky blue (2008).
_ON_FRONT, _OTHER = "#d55e00", "#56b4e9"
_STEPS = 5  # intervals of each scale, at most


def front_sheet(selection: PlacementRanking, width: float = WIDE) -> Sheet:
    """Return the picture of a ranking; without step times it shows nominal seconds.

    Args:
        selection: The ranking.
        width: The width of the sheet in points.
    """
    job, cluster = selection.job, selection.job.base.cluster
    title = f"{job.base.name} on {job.devices} devices: step time and peak memory"
    sheet = Sheet(title=title, width=width, height=EDGE)
    what = "nominal seconds: the time is unknown" if selection.unknown else "seconds per step"
    sheet.add_heading(title, f"vertical: {what}; horizontal: peak memory per device")
    room = cluster.usable_memory if cluster else 0
    front = [*dict.fromkeys(map(_point_of, selection.front))]
    points = [_point_of(row) for row in selection.ranking]
    plane = _Plane(sheet, [*points, *front], room)
    plane.draw_axes(room)
    on_front = set(front)
    for point in dict.fromkeys(points):
        if point not in on_front:
            plane.draw_dot(point)
    for number, point in reversed([*enumerate(front, 1)]):  # the fastest covers others
        plane.draw_dot(point, str(number))
    sheet.height = plane.bottom + 3 * SMALL
    names = {_ON_FRONT: "numbered: no other is faster and smaller", _OTHER: "other candidates"}
    sheet.add_legend(EDGE, names, SMALL)
    sheet.height += SMALL
    for row in selection.front:
        number = front.index(_point_of(row)) + 1
        figures = f"{row.nominal_seconds:.3g} s, {format_memory(row.peak_bytes)}"
        text = f"{number}  {figures}: {describe_settings(row.spec)}"
        sheet.write([Label(text=text, x=EDGE, y=0, size=SMALL)])
    sheet.height += EDGE
    return sheet


Point = tuple[float, float]  # peak bytes and seconds


def _point_of(row: Ranked) -> Point:
    """Return the place of a candidate in the picture."""
    return row.peak_bytes, row.nominal_seconds


class _Plane:
    """The plane of memory and time on a sheet; both scales begin at 0."""

    def __init__(self, sheet: Sheet, points: Sequence[Point], room: int) -> None:
        self.sheet, self.top = sheet, sheet.height + SMALL * LINE
        self.bottom = self.top + _HEIGHT
        self.most = 1.03 * max(room, *(memory for memory, _ in points))
        self.slowest = 1.05 * max(seconds for _, seconds in points)
        self.times = round_ticks(self.slowest, TIME, _STEPS)
        self.left = EDGE + max(text_width(text, SMALL) for _, text in self.times) + 6

    def place(self, point: Point) -> tuple[float, float]:
        """Return the position of a memory size in bytes and of a time in seconds."""
        wide = self.sheet.width - EDGE - self.left
        x = self.left + wide * point[0] / self.most
        return x, self.bottom - _HEIGHT * point[1] / self.slowest

    def draw_axes(self, room: int) -> None:
        """Draw both scales, and the line of usable memory."""
        wide = self.sheet.width - EDGE - self.left
        for seconds, text in self.times:
            _, y = self.place((0, seconds))
            self._add_box(self.left, y, wide, 0.6, LIGHT)
            number = Label(text=text, x=self.left - 4, y=y, size=SMALL, colour=GREY, align="right")
            self.sheet.texts.append(number)
        for memory, text in round_ticks(self.most, MEMORY, max(2, int(wide / 74))):
            x, _ = self.place((memory, 0))
            self._add_box(x, self.top, 0.6, _HEIGHT, LIGHT)
            y = self.bottom + SMALL + 2
            number = Label(text=text, x=x, y=y, size=SMALL, colour=GREY, align="center")
            self.sheet.texts.append(number.within(self.left, self.sheet.width))
        if room:
            x, _ = self.place((room, 0))
            line = Line(points=((x, self.top), (x, self.bottom)), colour=BLACK, dash=3)
            self.sheet.lines.append(line)
            text = f"usable memory {format_memory(room)}"
            label = Label(text=text, x=x, y=self.top - SMALL * 0.8, size=SMALL, align="right")
            self.sheet.texts.append(label.within(EDGE, self.sheet.width))

    def draw_dot(self, point: Point, number: str = "") -> None:
        """Draw a dot, larger with a number in it."""
        x, y = self.place(point)
        size, colour = (_NUMBERED, _ON_FRONT) if number else (_DOT, _OTHER)
        self._add_box(x - size / 2, y - size / 2, size, size, colour)
        if number:
            ink = ink_on(colour)
            text = Label(text=number, x=x, y=y, size=SMALL - 1, colour=ink, align="center")
            self.sheet.texts.append(text)

    def _add_box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        edge = 0.6 if colour in (_ON_FRONT, _OTHER) else 0.0
        self.sheet.rectangles.append(
            Rectangle(x=x, y=y, width=width, height=height, colour=colour, edge_width=edge)
        )
