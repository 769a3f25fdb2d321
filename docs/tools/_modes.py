"""Draw the pictures of the pages that no command of ptrain draws."""

from __future__ import annotations

from ptrain.charts.sheet import GREY, WHITE, Label, Rectangle, Sheet

_EDGE, _NAME, _BOX, _GAP, _ROW = 14.0, 205.0, 92.0, 10.0, 36.0
_TALL, _HOST = 24.0, 14.0  # heights: a device, and the host memory below it
_SIZE, _HEAD = 9.0, 10.0
_KEPT, _TEMPORARY, _ON_HOST = "#0072b2", "#009e73", "#e69f00"
HALVES = ((True, False), (False, True))  # the parts of a tensor that rank 0 and rank 1 keep
ALL, NOTHING = ((True, True),) * 2, ((False, False),) * 2

# Mode, meaning, parts on the device between uses, parts on the device during use.
MODES = (
    ("R", "replicated: each rank keeps all", ALL, ALL),
    ("S", "sharded: each rank keeps a part", HALVES, HALVES),
    ("S*", "sharded, and all-gathered for use", HALVES, ALL),
    ("M", "materialized: created for use", NOTHING, ALL),
    ("O", "offloaded: parts in host memory", NOTHING, ALL),
)


def modes() -> Sheet:
    """Return a picture of the five modes of a state on an axis of two ranks."""
    sheet = Sheet(
        title="the five modes", width=_EDGE + _NAME + 4 * (_BOX + _GAP) + 3 * _GAP + _EDGE
    )
    columns = [_EDGE + _NAME + (_BOX + _GAP) * place + 3 * _GAP * (place > 1) for place in range(4)]
    sheet.height = _EDGE
    for text, x in (("between uses", columns[0]), ("in use", columns[2])):
        label = Label(text=text, x=x, y=sheet.height, size=_HEAD, is_bold=True)
        sheet.texts.append(label)
    sheet.height += 1.5 * _HEAD
    for place, x in enumerate(columns):
        text = f"rank {place % 2}"
        sheet.texts.append(Label(text=text, x=x, y=sheet.height, size=_SIZE, colour=GREY))
    sheet.height += _SIZE
    for mode, meaning, kept, used in MODES:
        y = sheet.height
        name = Label(text=mode, x=_EDGE, y=y + _TALL / 2, size=_HEAD, is_bold=True)
        about = Label(text=meaning, x=_EDGE + 22, y=y + _TALL / 2, size=_SIZE)
        sheet.texts += [name, about]
        for place, x in enumerate(columns):
            rank = place % 2
            is_used = place > 1
            temporary = tuple(a and not b for a, b in zip(used[rank], kept[rank], strict=True))
            _add_box(sheet, x, y, kept[rank], _KEPT, _TALL)
            if is_used:
                _add_parts(sheet, x, y, temporary, _TEMPORARY, _TALL)
            if mode == "O":
                _add_box(sheet, x, y + _TALL + 2, HALVES[rank], _ON_HOST, _HOST)
        sheet.height += _ROW if mode != "O" else _ROW + _HOST
    names = {_KEPT: "kept on the device", _TEMPORARY: "temporary", _ON_HOST: "in host memory"}
    sheet.add_legend(columns[0], names, _SIZE)
    return sheet


def _add_box(
    sheet: Sheet, x: float, y: float, parts: tuple[bool, ...], colour: str, height: float
) -> None:
    box = Rectangle(x=x, y=y, width=_BOX, height=height, colour=WHITE, edge=GREY, edge_width=0.7)
    sheet.rectangles.append(box)
    _add_parts(sheet, x, y, parts, colour, height)


def _add_parts(
    sheet: Sheet, x: float, y: float, parts: tuple[bool, ...], colour: str, height: float
) -> None:
    width = _BOX / len(parts)
    for number, is_there in enumerate(parts):
        if is_there:
            part = Rectangle(
                x=x + number * width + 1.5,
                y=y + 1.5,
                width=width - 3,
                height=height - 3,
                colour=colour,
            )
            sheet.rectangles.append(part)


DRAWINGS = {"modes": modes}
