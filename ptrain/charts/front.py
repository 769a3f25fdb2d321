"""The picture of a search: candidates by time and memory, and the usable memory of a device.

Each derived candidate is a dot. The Pareto front is in colour, and usable memory is a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ptrain.charts.sheet import GREY, LIGHT, Label, Rectangle, Sheet
from ptrain.report.selection import describe_settings
from ptrain.selection.ranking import PlacementRanking, Ranked
from ptrain.units import format_memory

_WIDTH, _HEIGHT, _MARGIN, _DOT = 620.0, 300.0, 60.0, 5.0
_SIZE, _TITLE = 8.0, 11.0
_ON_FRONT, _OTHER, _ROOM = "#c1272d", "#9aa7b4", "#555555"
_STEPS = 4  # numbers on each scale


def front_sheet(selection: PlacementRanking) -> Sheet:
    """Return the picture of a ranking; without step times it shows nominal seconds."""
    job, cluster = selection.job, selection.job.base.cluster
    sheet = Sheet(title=f"{job.base.name} on {job.devices} devices", width=_WIDTH + 2 * _MARGIN)
    what = "nominal seconds (time is unknown)" if selection.unknown else "seconds per step"
    sheet.write(
        [
            Label(text=sheet.title, x=_MARGIN, y=0, size=_TITLE, is_bold=True),
            Label(text=f"{what} versus peak memory per device", x=_MARGIN, y=0, size=_SIZE),
        ]
    )
    top = sheet.height + _TITLE
    room = float(cluster.usable_memory) if cluster else 0.0
    rows = [*selection.ranking, *selection.front]
    slowest = 1.05 * max(map(_seconds_of, rows), default=1.0)
    plane = _Plane(sheet, top, max(room * 1.05, *(row.peak_bytes for row in rows)), slowest)
    plane.draw_frame(room)
    plane.draw_dots(selection.ranking, _OTHER)
    plane.draw_dots(selection.front, _ON_FRONT)
    sheet.height = top + _HEIGHT + 2 * _TITLE
    sheet.write(
        Label(
            text=f"{_seconds_of(row):.3g} s, {format_memory(row.peak_bytes)}: "
            f"{describe_settings(row.spec)}",
            x=_MARGIN,
            y=0,
            size=_SIZE,
        )
        for row in selection.front
    )
    sheet.height += _TITLE
    return sheet


def _seconds_of(row: Ranked) -> float:
    """Return the step time of a row, or its nominal seconds if it has none."""
    return row.closed.seconds if row.seconds is None else row.seconds


class _Plane:
    """The plane of memory and time on a sheet; both scales begin at 0."""

    def __init__(self, sheet: Sheet, top: float, most: float, slowest: float) -> None:
        self.sheet, self.top, self.most, self.slowest = sheet, top, most, slowest

    def x(self, size: float) -> float:
        """Return the horizontal position of a memory size in bytes."""
        return _MARGIN + _WIDTH * size / self.most

    def y(self, seconds: float) -> float:
        """Return the vertical position of a step time in seconds."""
        return self.top + _HEIGHT * (1 - seconds / self.slowest)

    def draw_frame(self, room: float) -> None:
        """Draw the axes with their scales, and the line of usable memory."""
        line, bottom = 0.7, self.top + _HEIGHT
        self._add_rectangle(_MARGIN, self.top, line, _HEIGHT, GREY)
        self._add_rectangle(_MARGIN, bottom, _WIDTH, line, GREY)
        for step in range(1, _STEPS + 1):
            part = step / _STEPS
            self._add_rectangle(_MARGIN, self.y(part * self.slowest), _WIDTH, line / 2, LIGHT)
            self._add_text(f"{part * self.slowest:.3g} s", _MARGIN - 4, self.y(part * self.slowest))
            self._add_text(
                format_memory(part * self.most),
                self.x(part * self.most),
                bottom + _SIZE,
            )
        if room:
            self._add_rectangle(self.x(room), self.top, line, _HEIGHT, _ROOM)
            self._add_text("usable memory", self.x(room) - 3, self.top + _SIZE)

    def draw_dots(self, rows: Iterable[Ranked] | Sequence[Ranked], colour: str) -> None:
        """Draw a dot for each row."""
        for row in rows:
            x, y = self.x(row.peak_bytes), self.y(_seconds_of(row))
            self._add_rectangle(x - _DOT / 2, y - _DOT / 2, _DOT, _DOT, colour)

    def _add_rectangle(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.sheet.rectangles.append(Rectangle(x=x, y=y, width=width, height=height, colour=colour))

    def _add_text(self, text: str, x: float, y: float) -> None:
        self.sheet.texts.append(Label(text=text, x=x, y=y, size=_SIZE, align="right"))
