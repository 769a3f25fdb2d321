"""Pictures of memory: one rank's live bytes over a step, and the peaks of a sweep's points.

A step is a stack of the live bytes by state. Its horizontal axis counts allocations and frees,
since fake ranks have no clock. If several moments share a column, the highest is drawn, so that no
peak is lost. A sweep has a bar by state for each point, with a line at usable memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ptrain.charts.sheet import (
    BLACK,
    EDGE,
    GREY,
    LIGHT,
    LINE,
    SMALL,
    TITLE,
    WHITE,
    Label,
    Rectangle,
    Sheet,
)
from ptrain.cost import PLACED, Phase, State
from ptrain.report.predict import Prediction
from ptrain.report.simulation import MemoryHistory, MemorySample
from ptrain.report.sweep import SweepPoint, step_seconds
from ptrain.units import format_memory, format_seconds

# Okabe and Ito's colours (2008), which colour-blind readers can distinguish; grey for other memory.
STATE_COLOURS = {
    State.PARAMETERS: "#0072b2",
    State.OPTIMIZER: "#56b4e9",
    State.GRADIENTS: "#d55e00",
    State.ACTIVATIONS: "#f0e442",
    State.TRANSIENT: "#009e73",
    State.OTHER: "#777777",
}
_LEFT = 74.0
_WIDTH, _HEIGHT = 720.0, 300.0  # of the area within the axes
_COLUMNS = 720  # at most, plus one for each pass, because passes do not share a column
_TICKS = 5


def course_sheet(course: MemoryHistory) -> Sheet:
    """Return the picture of one rank's memory over a step.

    States that last are at the bottom of the stack. Phases are named above it, colours below.
    """
    title = f"memory of rank {course.rank}"
    sheet = Sheet(title=title, width=_LEFT + _WIDTH + EDGE, height=EDGE)
    peak = course.peak
    sheet.write(
        [
            Label(text=title, x=EDGE, y=0, size=TITLE, is_bold=True),
            Label(
                text=f"peak {format_memory(peak.total)} in {peak.phase}, micro-batch "
                f"{peak.micro_batch}, after {peak.event} of {len(course.moments) - 1} "
                "allocations and frees of storages",
                x=EDGE,
                y=0,
                size=SMALL,
                colour=GREY,
            ),
        ]
    )
    sheet.height += 2 * SMALL * LINE
    top = sheet.height
    scale = _HEIGHT / max(1, peak.total)
    sheet.rectangles += _scale_lines(top)
    sheet.texts += _scale_numbers(peak.total, top)
    columns = list(_column_samples(course.moments))
    width = _WIDTH / len(columns)
    sheet.rectangles += _state_bars(columns, width, top + _HEIGHT, scale)
    sheet.rectangles += _pass_boundaries(columns, width, top)
    sheet.texts += _phase_labels(columns, width, top)
    sheet.height += _HEIGHT + SMALL * LINE
    names = {colour: str(state) for state, colour in STATE_COLOURS.items()}
    sheet.add_legend(_LEFT, names, SMALL)
    sheet.height += EDGE
    return sheet


def _column_samples(moments: Sequence[MemorySample]) -> Iterator[MemorySample]:
    """Yield the highest moment of each column; a column has moments of one pass."""

    def column(moment: MemorySample) -> tuple[object, ...]:
        place = moment.event * _COLUMNS // len(moments)
        return place, moment.phase, moment.micro_batch

    for _, moments_of_column in groupby(moments, key=column):
        yield max(moments_of_column, key=lambda moment: moment.total)


def _state_bars(
    columns: Sequence[MemorySample], width: float, bottom: float, scale: float
) -> Iterator[Rectangle]:
    """Yield the bars of each state; neighbours with equal place and height are merged.

    Args:
        columns: The moment of each column.
        width: The width of a column in points.
        bottom: The vertical position of 0 bytes.
        scale: Points per byte.
    """
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


def _scale_lines(top: float) -> Iterator[Rectangle]:
    """Yield a thin line at each number of the scale."""
    for part in range(_TICKS + 1):
        y = top + _HEIGHT * (1 - part / _TICKS)
        yield Rectangle(x=_LEFT, y=y - 0.25, width=_WIDTH, height=0.5, colour=LIGHT)


def _scale_numbers(peak: int, top: float) -> Iterator[Label]:
    """Yield the numbers of the scale."""
    for part in range(_TICKS + 1):
        yield Label(
            text=format_memory(peak * part / _TICKS),
            x=_LEFT - 4,
            y=top + _HEIGHT * (1 - part / _TICKS),
            size=SMALL,
            align="right",
        )


def _find_passes(columns: Sequence[MemorySample]) -> Iterator[tuple[int, int, MemorySample]]:
    """Yield the first column, the number of columns and a moment of each pass through a phase."""
    first = 0
    for _, moments in groupby(columns, key=lambda moment: (moment.phase, moment.micro_batch)):
        shown = list(moments)
        yield first, len(shown), shown[0]
        first += len(shown)


def _pass_boundaries(
    columns: Sequence[MemorySample], width: float, top: float
) -> Iterator[Rectangle]:
    """Yield a white line at the beginning of each pass."""
    for first, _, _ in _find_passes(columns):
        yield Rectangle(
            x=_LEFT + first * width - 0.25, y=top, width=0.5, height=_HEIGHT, colour=WHITE
        )


def _phase_labels(columns: Sequence[MemorySample], width: float, top: float) -> Iterator[Label]:
    """Yield a label above each pass: its name, its first letter, or nothing if it is too narrow."""
    for first, number, moment in _find_passes(columns):
        pass_name = (
            f"{moment.phase} {moment.micro_batch}" if moment.phase is not Phase.UPDATE else "update"
        )
        for text in (pass_name, pass_name[0]):
            word = Label(
                text=text,
                x=_LEFT + (first + number / 2) * width,
                y=top - SMALL * LINE / 2,
                size=SMALL,
                align="center",
            )
            if word.width <= number * width:
                yield word
                break


_MEANINGS = {True: "fits", False: "does not fit", None: "fit unknown"}
_LEGEND = {
    **{STATE_COLOURS[state]: str(state) for state in PLACED},
    STATE_COLOURS[State.TRANSIENT]: "temporary",
    BLACK: "peak",
}
_BAR, _BAR_GAP, _BARS_WIDTH = 14.0, 8.0, 420.0
_NUMBERS = 190.0  # width right of the bars: the peak, the fit, and the step time
_TICK = 2.0


def sweep_sheet(points: Sequence[SweepPoint]) -> Sheet:
    """Return one row per point: label, bar and figures.

    A bar stacks the largest size of each state on the device, and temporary tensors up to the peak.
    States need not be largest at the same time, so a stack may exceed its peak. Rejected points and
    unknown peaks have text in place of a bar.
    """
    title = "predicted peak per rank, by state"
    left = EDGE + max(
        (Label(text=point.label, x=0, y=0, size=SMALL).width for point in points), default=0
    )
    sheet = Sheet(title=title, width=left + _BAR_GAP + _BARS_WIDTH + _NUMBERS + EDGE, height=EDGE)
    sheet.write([Label(text=title, x=EDGE, y=0, size=TITLE, is_bold=True)])
    capacities = sorted({size for point in points if (size := _usable_memory(point))})
    sheet.height += (1 + len(capacities)) * SMALL * LINE
    top, first = sheet.height, left + _BAR_GAP
    stacks = [sum(size for _, size in _bar_parts(point)) for point in points]
    scale = _BARS_WIDTH / max([*stacks, *capacities, 1])
    bottom = top + len(points) * (_BAR + _BAR_GAP)
    sheet.rectangles.append(
        Rectangle(x=first - 0.5, y=top, width=0.5, height=bottom - top, colour=LIGHT)
    )
    for row, point in enumerate(points):
        _add_row(sheet, point, first, top + _BAR_GAP / 2 + row * (_BAR + _BAR_GAP), scale)
    for number, capacity in enumerate(capacities):
        sheet.rectangles.append(
            Rectangle(x=first + capacity * scale, y=top, width=1, height=bottom - top, colour=BLACK)
        )
        sheet.texts.append(
            Label(
                text=f"usable memory {format_memory(capacity)}",
                x=first + capacity * scale,
                y=top - (number + 0.5) * SMALL * LINE,
                size=SMALL,
                align="center" if capacity * scale < 0.8 * _BARS_WIDTH else "right",
            )
        )
    sheet.height = bottom + SMALL * LINE
    sheet.add_legend(first, _LEGEND, SMALL)
    sheet.height += EDGE
    return sheet


def _usable_memory(point: SweepPoint) -> int | None:
    """Return the usable device memory of a point, in bytes; None if it is unknown."""
    return point.prediction.fit.usable_memory if point.prediction else None


def _peak_bytes(point: SweepPoint) -> int | None:
    """Return the predicted peak of a point, in bytes; None if it is unknown."""
    return point.prediction.fit.peak_bytes if point.prediction else None


def _bar_parts(point: SweepPoint) -> list[tuple[str, int]]:
    """Return the colour and size of each part of a bar; empty if the peak is unknown."""
    peak = _peak_bytes(point)
    if point.prediction is None or not peak:
        return []
    exact = point.prediction.derivation.exact
    parts = [(STATE_COLOURS[state], exact.bytes_of(state)) for state in PLACED]
    temporary = max(0, peak - sum(size for _, size in parts))
    return [*parts, (STATE_COLOURS[State.TRANSIENT], temporary)]


def _add_row(sheet: Sheet, point: SweepPoint, x: float, y: float, scale: float) -> None:
    """Add the label, the bar, the peak's tick and the figures of one point.

    Args:
        sheet: The sheet to add to.
        point: The point of the sweep.
        x: The left edge of the bar.
        y: The upper edge of the bar.
        scale: Points per byte.
    """
    middle = y + _BAR / 2
    sheet.texts.append(Label(text=point.label, x=x - _BAR_GAP, y=middle, size=SMALL, align="right"))
    left = x
    for colour, size in _bar_parts(point):
        box = Rectangle(x=left, y=y, width=size * scale, height=_BAR, colour=colour)
        sheet.rectangles.append(box)
        left += box.width
    if peak := _peak_bytes(point):
        end = x + peak * scale - _TICK / 2
        tick = Rectangle(x=end, y=y - 1, width=_TICK, height=_BAR + 2, colour=BLACK)
        sheet.rectangles.append(tick)
    after = x + _BARS_WIDTH + _BAR_GAP if point.prediction else x + 4  # clear of the lines
    words = Label(text=_row_text(point), x=after, y=middle, size=SMALL, colour=GREY)
    sheet.texts.append(words)


def _row_text(point: SweepPoint) -> str:
    """Return the text right of a bar."""
    if point.prediction is None:
        return "refused"
    return ", ".join(_figure_texts(point.prediction))


def _figure_texts(prediction: Prediction) -> Iterator[str]:
    """Yield the peak, the fit and the step time of a prediction as text."""
    peak = prediction.fit.peak_bytes
    yield "peak unknown" if peak is None else format_memory(peak)
    if peak is not None:
        yield _MEANINGS[prediction.fit.fits]
    if (seconds := step_seconds(prediction.derivation.exact)) is not None:
        yield f"{format_seconds(seconds)} per step"
