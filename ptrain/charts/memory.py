"""One rank's memory over a step as a sheet: live bytes by state, stacked, from event to event.

The horizontal axis counts births and deaths of storages, for fake ranks have no clock; of those
that share a column the highest is drawn, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ptrain.charts.sheet import GREY, LIGHT, LINE, WHITE, Label, Rectangle, Sheet
from ptrain.cost import Phase, State
from ptrain.report.composition import MemoryHistory, MemorySample
from ptrain.units import format_memory

# Okabe and Ito's colours (2008), which the colour-blind tell apart; grey for what is no state.
STATE_COLOURS = {
    State.PARAMETERS: "#0072b2",
    State.OPTIMIZER: "#56b4e9",
    State.GRADIENTS: "#d55e00",
    State.ACTIVATIONS: "#f0e442",
    State.TRANSIENT: "#009e73",
    State.OTHER: "#777777",
}
_EDGE, _LEFT = 14.0, 74.0
_WIDTH, _HEIGHT = 720.0, 300.0  # of what is drawn within the axes
_COLUMNS = 720  # at most, and one more for each pass
_TITLE, _SMALL = 12.0, 8.0
_TICKS = 5


def course_sheet(course: MemoryHistory) -> Sheet:
    """States that last at the bottom, phases above, what each colour is below."""
    title = f"memory of rank {course.rank}"
    sheet = Sheet(title=title, width=_LEFT + _WIDTH + _EDGE, height=_EDGE)
    peak = course.peak
    sheet.write(
        [
            Label(text=title, x=_EDGE, y=0, size=_TITLE, is_bold=True),
            Label(
                text=f"peak {format_memory(peak.total)} in {peak.phase}, micro-batch "
                f"{peak.micro_batch}, after {peak.event} of {len(course.moments) - 1} "
                "allocations and frees of storages",
                x=_EDGE,
                y=0,
                size=_SMALL,
                colour=GREY,
            ),
        ]
    )
    sheet.height += 2 * _SMALL * LINE
    top = sheet.height
    scale = _HEIGHT / max(1, peak.total)
    sheet.rectangles += _ticks(top)
    sheet.texts += _numbers(peak.total, top)
    columns = list(_columns(course.moments))
    width = _WIDTH / len(columns)
    sheet.rectangles += _bars(columns, width, top + _HEIGHT, scale)
    sheet.rectangles += _boundaries(columns, width, top)
    sheet.texts += _phases(columns, width, top)
    sheet.height += _HEIGHT + _SMALL * LINE
    names = {colour: str(state) for state, colour in STATE_COLOURS.items()}
    sheet.add_legend(_LEFT, names, _SMALL)
    sheet.height += _EDGE
    return sheet


def _columns(moments: Sequence[MemorySample]) -> Iterator[MemorySample]:
    """The highest moment of each column, and no column of two passes."""

    def column(moment: MemorySample) -> tuple[object, ...]:
        place = moment.event * _COLUMNS // len(moments)
        return place, moment.phase, moment.micro_batch

    for _, alike in groupby(moments, key=column):
        yield max(alike, key=lambda moment: moment.total)


def _bars(
    columns: Sequence[MemorySample], width: float, bottom: float, scale: float
) -> Iterator[Rectangle]:
    """Yield the bars of each state, neighbours of the same place and height as one."""
    for index, state in enumerate(State):
        sizes = [(sum(m.device_bytes[:index]), m.device_bytes[index]) for m in columns]
        place = 0
        for (below, size), equal in groupby(sizes):
            number = len(list(equal))
            if size > 0:
                yield Rectangle(
                    x=_LEFT + place * width,
                    y=bottom - (below + size) * scale,
                    width=number * width,
                    height=size * scale,
                    colour=STATE_COLOURS[state],
                )
            place += number


def _ticks(top: float) -> Iterator[Rectangle]:
    """A thin line at each number."""
    for part in range(_TICKS + 1):
        y = top + _HEIGHT * (1 - part / _TICKS)
        yield Rectangle(x=_LEFT, y=y - 0.25, width=_WIDTH, height=0.5, colour=LIGHT)


def _numbers(peak: int, top: float) -> Iterator[Label]:
    for part in range(_TICKS + 1):
        yield Label(
            text=format_memory(peak * part / _TICKS),
            x=_LEFT - 4,
            y=top + _HEIGHT * (1 - part / _TICKS),
            size=_SMALL,
            align="right",
        )


def _passes(columns: Sequence[MemorySample]) -> Iterator[tuple[int, int, MemorySample]]:
    """First column, number of columns and a moment of each pass through a phase."""
    first = 0
    for _, moments in groupby(columns, key=lambda moment: (moment.phase, moment.micro_batch)):
        shown = list(moments)
        yield first, len(shown), shown[0]
        first += len(shown)


def _boundaries(columns: Sequence[MemorySample], width: float, top: float) -> Iterator[Rectangle]:
    for first, _, _ in _passes(columns):
        yield Rectangle(
            x=_LEFT + first * width - 0.25, y=top, width=0.5, height=_HEIGHT, colour=WHITE
        )


def _phases(columns: Sequence[MemorySample], width: float, top: float) -> Iterator[Label]:
    """Its name above each pass that is wide enough for it, a letter above those that are nearly."""
    for first, number, moment in _passes(columns):
        named = (
            f"{moment.phase} {moment.micro_batch}" if moment.phase is not Phase.UPDATE else "update"
        )
        for text in (named, named[0]):
            word = Label(
                text=text,
                x=_LEFT + (first + number / 2) * width,
                y=top - _SMALL * LINE / 2,
                size=_SMALL,
                align="center",
            )
            if word.width <= number * width:
                yield word
                break
