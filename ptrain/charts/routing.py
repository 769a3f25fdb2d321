"""Tokens per expert over the steps of a run: of each layer a field, a column for every step that
was looked at and a row for every expert, the darker the more tokens went there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ptrain.charts.sheet import GREY, LIGHT, Label, Rectangle, Sheet

_EDGE, _TITLE, _SMALL = 14.0, 12.0, 8.0
_WIDTH, _TALLEST, _ROW = 150.0, 96.0, 12.0  # of a field, and of an expert's row at most
_COLUMNS, _GAP = 4, 44.0  # fields side by side
_MOST = 2.0  # times the mean, from which on a colour grows no darker
_DARK = (0, 66, 128)
_SCALE = (0.0, 0.5, 1.0, 1.5, 2.0)

Steps = Mapping[int, Mapping[str, Sequence[int]]]  # by step, layer and expert


def logged_tokens(metrics: Path) -> Steps:
    """Return the tokens per expert of the steps in a run's metrics, the last that was said of a
    step: a run that goes on from a checkpoint says some anew."""
    rows = (json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line)
    return {row["step"]: row["tokens_per_expert"] for row in rows if "tokens_per_expert" in row}


def routing_sheet(name: str, steps: Steps) -> Sheet:
    """Return the picture; of a run of which nothing was logged its title alone."""
    layers = [*dict.fromkeys(layer for of_step in steps.values() for layer in of_step)]
    width = 2 * _EDGE + min(_COLUMNS, max(1, len(layers))) * (_WIDTH + _GAP)
    sheet = Sheet(title=f"{name}: tokens per expert", width=width, height=_EDGE)
    sheet.write([Label(text=sheet.title, x=_EDGE, y=0, size=_TITLE, is_bold=True)])
    if not steps:
        return sheet
    first, last = min(steps), max(steps)
    what = (
        f"one column per logged step, {first} to {last}; one row per expert; relative to "
        "the layer's mean"
    )
    sheet.write([Label(text=what, x=_EDGE, y=0, size=_SMALL, colour=GREY)])
    _add_legend(sheet)
    for start in range(0, len(layers), _COLUMNS):
        _add_fields(sheet, layers[start : start + _COLUMNS], steps)
    sheet.height += _EDGE
    return sheet


def _add_legend(sheet: Sheet) -> None:
    y, x = sheet.height + _SMALL, _EDGE
    for times in _SCALE:
        sheet.rectangles.append(
            Rectangle(
                x=x,
                y=y - _SMALL / 2,
                width=_SMALL,
                height=_SMALL,
                colour=_colour(times),
                edge=LIGHT,
                edge_width=0.5,
            )
        )
        word = f"{times:g}×" + (" or more" if times == _MOST else "")
        sheet.texts.append(Label(text=word, x=x + _SMALL + 4, y=y, size=_SMALL))
        x += 48
    sheet.height += 2 * _SMALL


def _add_fields(sheet: Sheet, layers: Sequence[str], steps: Steps) -> None:
    """Add a row of them."""
    top, heights = sheet.height + 2 * _SMALL, [0.0]
    for place, layer in enumerate(layers):
        left = _EDGE + _GAP / 2 + place * (_WIDTH + _GAP)
        sheet.texts.append(Label(text=layer, x=left, y=top - _SMALL, size=_SMALL))
        heights.append(_add_field(sheet, left, top, [its[layer] for its in steps.values()]))
    sheet.height = top + max(heights) + _SMALL


def _add_field(sheet: Sheet, left: float, top: float, columns: Sequence[Sequence[int]]) -> float:
    """Add one layer's and return its height."""
    experts, width = len(columns[0]), _WIDTH / len(columns)
    height = min(_ROW, _TALLEST / experts)
    for place, tokens in enumerate(columns):
        mean = sum(tokens) / experts
        for expert, number in enumerate(tokens):
            x, y = left + place * width, top + expert * height
            colour = _colour(number / mean)
            sheet.rectangles.append(Rectangle(x=x, y=y, width=width, height=height, colour=colour))
    for expert in sorted({0, experts - 1}):
        middle = top + (expert + 0.5) * height
        sheet.texts.append(
            Label(text=str(expert), x=left - 4, y=middle, size=_SMALL, align="right", colour=GREY)
        )
    line = Rectangle(x=left, y=top + experts * height, width=_WIDTH, height=0.5, colour=LIGHT)
    sheet.rectangles.append(line)
    return experts * height


def _colour(times: float) -> str:
    """Return white for nothing, and the darkest for twice the mean and more."""
    share = min(times, _MOST) / _MOST
    red, green, blue = (round(255 - share * (255 - part)) for part in _DARK)
    return f"#{red:02x}{green:02x}{blue:02x}"
