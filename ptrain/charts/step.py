"""A step as a sheet: a row for the rank, where white is waiting, and one for each lane beside it;
of a pipeline a row for every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from ptrain.charts.sheet import GREY, LIGHT, WHITE, Label, Rectangle, Sheet, width_of
from ptrain.cost import Collective, Phase, Spent, TimeKey
from ptrain.derivation.clock import LaneSpan
from ptrain.units import format_seconds

_EDGE, _RIGHT, _WIDTH, _ROW, _GAP = 14.0, 30.0, 900.0, 30.0, 6.0
_TITLE, _HEAD, _SMALL = 12.0, 9.0, 8.0
_TICKS = 8
_LEAST = 0.15  # points: what is narrower is not drawn by itself

# Okabe and Ito's colours (2008); grey for what is no computation of the model.
_MEANINGS = {
    "forward": "#56b4e9",
    "backward": "#e8d020",
    "update": "#009e73",
    "wrappers": "#777777",
    "gather": "#0072b2",
    "reduction": "#d55e00",
    "copy": "#cc79a7",
    "other collective": "#999999",
}
_REDUCTIONS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def step_sheet(title: str, note: str, spans: Sequence[LaneSpan]) -> Sheet:
    """Return the sheet of a step with these spans."""
    lanes = [*dict.fromkeys(span.lane for span in spans)]
    lanes.sort(key=lambda lane: (lane is not None, lane if isinstance(lane, int) else -1))
    end = max(span.end for span in spans)
    left = _EDGE + max(width_of(_name(lane), _HEAD) for lane in lanes) + 6
    sheet = Sheet(title=title, width=left + _WIDTH + _RIGHT, height=_EDGE)
    sheet.write([Label(text=title, x=_EDGE, y=0, size=_TITLE, is_bold=True)])
    sheet.write([Label(text=note, x=_EDGE, y=0, size=_HEAD, colour=GREY)])
    sheet.height += _HEAD
    top, scale = sheet.height, _WIDTH / end
    for place, lane in enumerate(lanes):
        y = top + place * _ROW
        middle = y + _ROW / 2
        sheet.texts.append(Label(text=_name(lane), x=left - 6, y=middle, size=_HEAD, align="right"))
        sheet.rectangles += _row([s for s in spans if s.lane == lane], left, y, scale)
    sheet.height += len(lanes) * _ROW
    _add_axis(sheet, left, end)
    _add_legend(sheet, spans)
    sheet.height += _EDGE
    return sheet


def _name(lane: Hashable) -> str:
    match lane:
        case None:
            return "rank"
        case int():
            return f"pp {lane}"
        case tuple():
            return "+".join(lane)
        case _:
            return str(lane)


def _row(spans: Sequence[LaneSpan], left: float, y: float, scale: float) -> Iterator[Rectangle]:
    yield Rectangle(x=left, y=y + _ROW - 0.25, width=_WIDTH, height=0.5, colour=LIGHT)
    for start, end, meaning in _merged(spans):
        if (end - start) * scale >= _LEAST:
            yield Rectangle(
                x=left + start * scale,
                y=y + _GAP / 2,
                width=(end - start) * scale,
                height=_ROW - _GAP,
                colour=_MEANINGS[meaning],
            )


def _merged(spans: Sequence[LaneSpan]) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, meaning) of what follows each other and means the same, once."""
    start = end = 0.0
    meaning: str | None = None
    for span in spans:
        own = _meaning(span)
        if own == meaning and span.start <= end:
            end = max(end, span.end)
            continue
        if meaning is not None:
            yield start, end, meaning
        start, end, meaning = span.start, span.end, own
    if meaning is not None:
        yield start, end, meaning


def _meaning(span: LaneSpan) -> str | None:
    """None of the rank's own waiting, which is white."""
    key = span.key
    is_own = span.lane is None or isinstance(span.lane, int)
    match key.spent:
        case Spent.COMPUTE:
            return "forward" if key.phase is Phase.FORWARD else "backward"
        case Spent.UPDATE:
            return "update"
        case Spent.WRAPPERS:
            return "wrappers"
        case _:
            return None if is_own else _moves(key)


def _moves(key: TimeKey) -> str:
    if key.spent is Spent.COPIES:
        return "copy"
    if key.collective in _REDUCTIONS:
        return "reduction"
    return "gather" if key.collective is Collective.ALL_GATHER else "other collective"


def _add_axis(sheet: Sheet, left: float, end: float) -> None:
    top = sheet.height
    for part in range(_TICKS + 1):
        x = left + _WIDTH * part / _TICKS
        sheet.rectangles.append(
            Rectangle(x=x - 0.25, y=top, width=0.5, height=4, colour=GREY, edge=GREY)
        )
        text = format_seconds(end * part / _TICKS) if part else "0"
        sheet.texts.append(Label(text=text, x=x, y=top + 10, size=_SMALL, align="center"))
    sheet.height += 10 + 2 * _SMALL


def _add_legend(sheet: Sheet, spans: Sequence[LaneSpan]) -> None:
    used = {_meaning(span) for span in spans} | {"waiting"}
    meanings = {**_MEANINGS, "waiting": WHITE}
    names = {colour: meaning for meaning, colour in meanings.items() if meaning in used}
    sheet.add_legend(_EDGE, names, _SMALL)
