"""The picture of a search: candidates by time and memory, and the usable memory of a device.

Each derived candidate is a dot. Those of the Pareto front, than which no other is both faster and
smaller, are numbered as in the list below the picture.
"""

from __future__ import annotations

from ptrain.charts.bars import Plane
from ptrain.charts.sheet import (
    BLACK,
    EDGE,
    LINE,
    MEMORY,
    SMALL,
    TIME,
    WIDE,
    Label,
    Polyline,
    Rectangle,
    Sheet,
    ink_on,
    round_ticks,
)
from ptrain.report.selection import describe_settings
from ptrain.selection.ranking import PlacementRanking, Ranked
from ptrain.units import format_memory

_HEIGHT, _DOT, _NUMBERED = 240.0, 4.0, 11.0
# Okabe and Ito's vermillion and sky blue (2008).
_ON_FRONT, _OTHER = "#d55e00", "#56b4e9"
_TICKS_APART = 82.0  # points for each number of the horizontal axis, at least


def front_sheet(selection: PlacementRanking, width: float = WIDE) -> Sheet:
    """Return the picture of a ranking; without step times it shows nominal seconds.

    Args:
        selection: The ranking.
        width: The width of the sheet in points.
    """
    job, cluster = selection.job, selection.job.base.cluster
    title = f"{job.base.name} on {job.devices} devices: step time and peak memory"
    sheet = Sheet(title=title, width=width, height=EDGE)
    sheet.add_heading(
        title,
        "vertical: nominal seconds, because the time is unknown"
        if selection.unknown
        else "vertical: seconds per step",
        "horizontal: peak memory per device",
    )
    room = cluster.usable_memory if cluster else 0
    front = [*dict.fromkeys(map(_point_of, selection.front))]
    points = [*dict.fromkeys([*map(_point_of, selection.ranking), *front])]
    most, slowest = (max(figures) for figures in zip((room, 0), *points, strict=True))
    sheet.height += SMALL * LINE
    plane = Plane(sheet, (0, 1.03 * most, 0, 1.05 * slowest), TIME, _HEIGHT)
    plane.add_numbers(round_ticks(1.03 * most, MEMORY, max(2, int(width / _TICKS_APART))))
    others = [point for point in points if point not in front]
    for point in (*others, *reversed(front)):  # the fastest of the front covers others
        number = str(front.index(point) + 1) if point in front else ""
        _add_dot(sheet, plane.point_position(*point), number)
    if room:
        x, bottom = plane.point_position(room, 0)
        sheet.lines.append(Polyline(points=((x, plane.top), (x, bottom)), colour=BLACK, dash=3))
        text = f"usable memory {format_memory(room)}"
        label = Label(text=text, x=x, y=plane.top - SMALL * 0.8, size=SMALL, align="right")
        sheet.texts.append(label.clamp_between(EDGE, width))
    names = {_ON_FRONT: "numbered: no other is faster and smaller", _OTHER: "other candidates"}
    sheet.add_legend(EDGE, names, SMALL)
    sheet.height += SMALL
    for row in selection.front:
        figures = f"{row.nominal_seconds:.3g} s, {format_memory(row.peak_bytes)}"
        place = front.index(_point_of(row)) + 1
        text = f"{place}  {figures}: {describe_settings(row.spec)}"
        sheet.write([Label(text=text, x=EDGE, y=0, size=SMALL)])
    sheet.height += EDGE
    return sheet


def _point_of(row: Ranked) -> tuple[float, float]:
    """Return the place of a candidate: peak bytes and seconds."""
    return row.peak_bytes, row.nominal_seconds


def _add_dot(sheet: Sheet, place: tuple[float, float], number: str) -> None:
    """Add a dot at a place, larger with a number in it."""
    (x, y), (size, colour) = place, (_NUMBERED, _ON_FRONT) if number else (_DOT, _OTHER)
    sheet.rectangles.append(
        Rectangle(
            x=x - size / 2, y=y - size / 2, width=size, height=size, colour=colour, edge_width=0.6
        )
    )
    if number:
        ink = ink_on(colour)
        text = Label(text=number, x=x, y=y, size=SMALL - 1, colour=ink, align="center")
        sheet.texts.append(text)
