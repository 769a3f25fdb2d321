"""The points of a sweep as a sheet: a bar for each peak, and a line where the devices end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.charts.sheet import BLACK, GREY, LIGHT, LINE, Label, Rectangle, Sheet
from ptrain.report.predict import Prediction
from ptrain.report.sweep import SweepPoint, step_seconds
from ptrain.units import format_memory, format_seconds

# Okabe and Ito's blue and vermillion (2008), which the colour-blind tell apart; grey for unknown.
_FITS = {True: "#0072b2", False: "#d55e00", None: "#999999"}
_MEANINGS = {True: "fits", False: "does not fit", None: "unknown"}
_EDGE, _TITLE, _SMALL = 14.0, 12.0, 8.0
_BAR, _GAP, _WIDTH = 14.0, 8.0, 420.0
_NUMBERS = 130.0  # right of the bars: the peak and the step's seconds


def sweep_sheet(points: Sequence[SweepPoint]) -> Sheet:
    """A row per point, top down: its label, the bar and the figure; what is refused, and what has
    no peak, as words in place of the bar."""
    title = "predicted peak per rank"
    left = _EDGE + max(
        (Label(text=point.label, x=0, y=0, size=_SMALL).width for point in points), default=0
    )
    sheet = Sheet(title=title, width=left + _GAP + _WIDTH + _NUMBERS + _EDGE, height=_EDGE)
    sheet.write([Label(text=title, x=_EDGE, y=0, size=_TITLE, is_bold=True)])
    capacities = sorted({size for point in points if (size := _capacity(point))})
    sheet.height += (1 + len(capacities)) * _SMALL * LINE
    top, first = sheet.height, left + _GAP
    peaks = [peak for point in points if (peak := _peak(point))]
    scale = _WIDTH / max([*peaks, *capacities], default=1)
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
                text=f"a peak may fill {format_memory(capacity)}",
                x=first + capacity * scale,
                y=top - (number + 0.5) * _SMALL * LINE,
                size=_SMALL,
                align="center" if capacity * scale < 0.8 * _WIDTH else "right",
            )
        )
    sheet.height = bottom + _SMALL * LINE
    _add_legend(sheet, points, first)
    sheet.height += _EDGE
    return sheet


def _capacity(point: SweepPoint) -> int | None:
    return point.prediction.fit.usable_memory if point.prediction else None


def _peak(point: SweepPoint) -> int | None:
    return point.prediction.fit.peak_bytes if point.prediction else None


def _add_row(sheet: Sheet, point: SweepPoint, x: float, y: float, scale: float) -> None:
    middle = y + _BAR / 2
    sheet.texts.append(Label(text=point.label, x=x - _GAP, y=middle, size=_SMALL, align="right"))
    length = (_peak(point) or 0) * scale
    if point.prediction is not None and length:
        colour = _FITS[point.prediction.fit.fits]
        sheet.rectangles.append(Rectangle(x=x, y=y, width=length, height=_BAR, colour=colour))
    beside = x + _WIDTH + _GAP if point.prediction else x + 4  # clear of the lines
    words = Label(text=_words(point), x=beside, y=middle, size=_SMALL, colour=GREY)
    sheet.texts.append(words)


def _words(point: SweepPoint) -> str:
    if point.prediction is None:
        return "refused"
    return ", ".join(_figures(point.prediction))


def _figures(prediction: Prediction) -> Iterator[str]:
    peak = prediction.fit.peak_bytes
    yield "peak unknown" if peak is None else format_memory(peak)
    if (seconds := step_seconds(prediction.derivation.exact)) is not None:
        yield f"{format_seconds(seconds)} a step"


def _add_legend(sheet: Sheet, points: Sequence[SweepPoint], x: float) -> None:
    shown = dict.fromkeys(point.prediction.fit.fits for point in points if point.prediction)
    y = sheet.height + _SMALL * LINE / 2
    for fits in shown:
        sheet.rectangles.append(
            Rectangle(x=x, y=y - _SMALL / 2, width=_SMALL, height=_SMALL, colour=_FITS[fits])
        )
        word = Label(text=_MEANINGS[fits], x=x + _SMALL + 4, y=y, size=_SMALL)
        sheet.texts.append(word)
        x = word.x + word.width + 12
    sheet.height += _SMALL * LINE
