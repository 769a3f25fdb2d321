"""The points of a sweep as a sheet: a bar of each peak by state, and a line at usable memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.charts.memory import STATE_COLOURS
from ptrain.charts.sheet import BLACK, GREY, LIGHT, LINE, Label, Rectangle, Sheet
from ptrain.cost import PLACED, State
from ptrain.report.predict import Prediction
from ptrain.report.sweep import SweepPoint, step_seconds
from ptrain.units import format_memory, format_seconds

_MEANINGS = {True: "fits", False: "does not fit", None: "fit unknown"}
_LEGEND = {
    **{STATE_COLOURS[state]: str(state) for state in PLACED},
    STATE_COLOURS[State.TRANSIENT]: "temporary",
    BLACK: "peak",
}
_EDGE, _TITLE, _SMALL = 14.0, 12.0, 8.0
_BAR, _GAP, _WIDTH = 14.0, 8.0, 420.0
_NUMBERS = 190.0  # right of the bars: the peak, whether it fits, and the step's seconds
_TICK = 2.0


def sweep_sheet(points: Sequence[SweepPoint]) -> Sheet:
    """Return one row per point: label, bar and figures.

    A bar stacks the largest size of each state on the device, and temporary tensors up to the peak.
    States need not be largest at the same time, so a stack may exceed its peak. Rejected points and
    unknown peaks have text in place of a bar.
    """
    title = "predicted peak per rank, by state"
    left = _EDGE + max(
        (Label(text=point.label, x=0, y=0, size=_SMALL).width for point in points), default=0
    )
    sheet = Sheet(title=title, width=left + _GAP + _WIDTH + _NUMBERS + _EDGE, height=_EDGE)
    sheet.write([Label(text=title, x=_EDGE, y=0, size=_TITLE, is_bold=True)])
    capacities = sorted({size for point in points if (size := _capacity(point))})
    sheet.height += (1 + len(capacities)) * _SMALL * LINE
    top, first = sheet.height, left + _GAP
    stacks = [sum(size for _, size in _stack(point)) for point in points]
    scale = _WIDTH / max([*stacks, *capacities, 1])
    bottom = top + len(points) * (_BAR + _GAP)
    sheet.rectangles.append(
        Rectangle(x=first - 0.5, y=top, width=0.5, height=bottom - top, colour=LIGHT)
    )
    for row, point in enumerate(points):
        _add_row(sheet, point, first, top + _GAP / 2 + row * (_BAR + _GAP), scale)
    for number, capacity in enumerate(capacities):
        sheet.rectangles.append(
            Rectangle(x=first + capacity * scale, y=top, width=1, height=bottom - top, colour=BLACK)
        )
        sheet.texts.append(
            Label(
                text=f"usable memory {format_memory(capacity)}",
                x=first + capacity * scale,
                y=top - (number + 0.5) * _SMALL * LINE,
                size=_SMALL,
                align="center" if capacity * scale < 0.8 * _WIDTH else "right",
            )
        )
    sheet.height = bottom + _SMALL * LINE
    sheet.add_legend(first, _LEGEND, _SMALL)
    sheet.height += _EDGE
    return sheet


def _capacity(point: SweepPoint) -> int | None:
    return point.prediction.fit.usable_memory if point.prediction else None


def _peak(point: SweepPoint) -> int | None:
    return point.prediction.fit.peak_bytes if point.prediction else None


def _stack(point: SweepPoint) -> list[tuple[str, int]]:
    """Return the colour and size of each part of a bar; none if the peak is unknown."""
    peak = _peak(point)
    if point.prediction is None or not peak:
        return []
    exact = point.prediction.derivation.exact
    parts = [(STATE_COLOURS[state], exact.bytes_of(state)) for state in PLACED]
    temporary = max(0, peak - sum(size for _, size in parts))
    return [*parts, (STATE_COLOURS[State.TRANSIENT], temporary)]


def _add_row(sheet: Sheet, point: SweepPoint, x: float, y: float, scale: float) -> None:
    middle = y + _BAR / 2
    sheet.texts.append(Label(text=point.label, x=x - _GAP, y=middle, size=_SMALL, align="right"))
    left = x
    for colour, size in _stack(point):
        box = Rectangle(x=left, y=y, width=size * scale, height=_BAR, colour=colour)
        sheet.rectangles.append(box)
        left += box.width
    if peak := _peak(point):
        end = x + peak * scale - _TICK / 2
        tick = Rectangle(x=end, y=y - 1, width=_TICK, height=_BAR + 2, colour=BLACK)
        sheet.rectangles.append(tick)
    after = x + _WIDTH + _GAP if point.prediction else x + 4  # clear of the lines
    words = Label(text=_words(point), x=after, y=middle, size=_SMALL, colour=GREY)
    sheet.texts.append(words)


def _words(point: SweepPoint) -> str:
    if point.prediction is None:
        return "refused"
    return ", ".join(_figures(point.prediction))


def _figures(prediction: Prediction) -> Iterator[str]:
    peak = prediction.fit.peak_bytes
    yield "peak unknown" if peak is None else format_memory(peak)
    if peak is not None:
        yield _MEANINGS[prediction.fit.fits]
    if (seconds := step_seconds(prediction.derivation.exact)) is not None:
        yield f"{format_seconds(seconds)} per step"
