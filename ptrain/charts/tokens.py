"""Tokens as sheets: shards of the tokens over cp, and tokens per expert over the steps of a run.

Shards: who has which tokens of a sample, which block of scores whose queries compute at which hop,
and whose keys and values each place of the ring has then. Scores are a square of all tokens,
queries downwards and keys to the right; white is left out by the causal mask. Where tokens are
exchanged for heads the ranks of a group compute the same blocks, each of its own heads.

Experts: a field for each layer, with a column for every step that was logged and a row for every
expert, the darker the more tokens went there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ptrain.axes.context.attention import MetBlock, Span, all_spans, blocks_of, source_at
from ptrain.axes.context.draw import balance_text, kind_text
from ptrain.charts.sheet import (
    EDGE,
    GREY,
    HEAD,
    LIGHT,
    SMALL,
    TITLE,
    WHITE,
    Label,
    Rectangle,
    Sheet,
    ink_on,
    of_place,
    width_of,
)
from ptrain.steps.step import ContextParallel
from ptrain.units import summed

_WIDTH = 560.0
_BAND, _GAP = 26.0, 12.0  # a band of heads; between two parts of the sheet
_SQUARE = 420.0  # the scores
_ROW, _LEAST_ROW, _TALLEST = 30.0, 8.0, 840.0  # a place of the ring; all of them
_STAIR = 5.0  # of a causal block, at least
_AIR = 3.0


def tokens_sheet(title: str, step: ContextParallel) -> Sheet:
    """Return the sheet of a spec's context axis."""
    left = EDGE + _widest_name(step) + 6
    sheet = Sheet(title=title, width=left + _WIDTH + EDGE, height=EDGE)
    sheet.write([Label(text=title, x=EDGE, y=0, size=TITLE, is_bold=True)])
    sizes = (
        kind_text(step),
        f"{step.axis} {step.ulysses * step.ring}",
        f"{step.sequence} tokens",
    )
    sheet.write([Label(text=" · ".join(sizes), x=EDGE, y=0, size=HEAD)])
    sheet.write([Label(text=balance_text(step), x=EDGE, y=0, size=HEAD, colour=GREY)])
    _add_tokens(sheet, step, left)
    _add_scores(sheet, step, left)
    if step.ring > 1:
        _add_hops(sheet, step, left)
    sheet.height += EDGE
    return sheet


def _add_part(sheet: Sheet, text: str) -> None:
    sheet.height += _GAP
    sheet.write([Label(text=text, x=EDGE, y=0, size=HEAD, is_bold=True)])
    sheet.height += 3


# -- who has which tokens


def _add_tokens(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """All heads of the tokens that a rank has; where they are exchanged, then those of its heads of
    the tokens of its group."""
    _add_part(sheet, "tokens per rank outside attention, for all heads")
    own = [*all_spans(step)]
    for rank, spans in enumerate(own):
        for span in spans:
            _fill(sheet, _of_tokens(step, span, left), f"{rank}", of_place(rank))
    sheet.height += _BAND
    _add_ticks(sheet, step, left)
    if step.ulysses == 1:
        return
    _add_part(sheet, "tokens per rank within attention: all tokens of its group, for its heads")
    for member in range(step.ulysses):
        name = f"heads {member + 1}/{step.ulysses}"
        _name(sheet, name, left, sheet.height + _BAND / 2)
        for place in range(step.ring):
            rank = place * step.ulysses + member
            for span in _stretches(own, step, place):
                _fill(sheet, _of_tokens(step, span, left), f"{rank}", of_place(rank))
        sheet.height += _BAND


def _stretches(own: Sequence[Sequence[Span]], step: ContextParallel, place: int) -> list[Span]:
    """Return the stretches of all ranks of a group, those that touch as one."""
    first = place * step.ulysses
    spans = sorted(span for spans in own[first : first + step.ulysses] for span in spans)
    merged = spans[:1]
    for span in spans[1:]:
        if span[0] == merged[-1][1]:
            merged[-1] = merged[-1][0], span[1]
        else:
            merged.append(span)
    return merged


def _of_tokens(step: ContextParallel, span: Span, left: float) -> tuple[float, float, float]:
    """Return x and width of a stretch, and the height of a band."""
    first, behind = span
    unit = _WIDTH / step.sequence
    return left + first * unit, (behind - first) * unit, _BAND


def _add_ticks(sheet: Sheet, step: ContextParallel, left: float) -> None:
    edges = sorted({edge for spans in all_spans(step) for span in spans for edge in span})
    last = -_WIDTH
    for edge in edges:
        x = left + edge * _WIDTH / step.sequence
        if x - last >= width_of(str(edge), SMALL) + _AIR:
            sheet.texts.append(
                Label(text=str(edge), x=x, y=sheet.height + 7, size=SMALL, align="center")
            )
            last = x
    sheet.height += 7 + SMALL


# -- which block meets which


def _add_scores(sheet: Sheet, step: ContextParallel, left: float) -> None:
    has_hops = step.ring > 1 and not step.gathers
    whose = "group of ranks" if step.ulysses > 1 else "rank"
    _add_part(sheet, f"scores computed per {whose}: queries downwards, keys to the right")
    unit = _SQUARE / step.sequence
    top = sheet.height
    sheet.rectangles.append(
        Rectangle(x=left, y=top, width=_SQUARE, height=_SQUARE, colour=WHITE, edge=LIGHT,
                  edge_width=0.6)
    )  # fmt: skip
    for place in range(step.ring):
        colour = of_place(place * step.ulysses)
        for block in blocks_of(step, place):
            sheet.rectangles += _drawn(block, left, top, unit, colour)
            if has_hops:
                sheet.texts += _hop(block, left, top, unit, colour)
    for place in range(step.ring):
        _name_rows(sheet, step, place, left, top)
    sheet.height += _SQUARE + 4
    notes = ["number: hops of the keys"] if has_hops else []
    notes += ["each rank of a group: only its heads"] if step.ulysses > 1 else []
    note = " · ".join(notes)
    sheet.write([Label(text=note, x=left, y=0, size=SMALL, colour=GREY)] if notes else [])


def _drawn(
    block: MetBlock, left: float, top: float, unit: float, colour: str
) -> Iterator[Rectangle]:
    """Yield a block: whole, or as stairs what a causal mask leaves."""
    (first_row, last_row), (first, behind) = block.queries, block.keys
    rows = last_row - first_row
    stairs = max(2, int(rows * unit / _STAIR)) if block.is_causal else 1
    edges = [first_row + rows * stair / stairs for stair in range(stairs + 1)]
    for above, below in pairwise(edges):
        end = below if block.is_causal else behind
        yield Rectangle(
            x=left + first * unit,
            y=top + above * unit,
            width=(end - first) * unit,
            height=(below - above) * unit,
            colour=colour,
            edge=colour if block.is_causal else WHITE,
            edge_width=0 if block.is_causal else min(0.6, 0.06 * (behind - first) * unit),
        )


def _hop(block: MetBlock, left: float, top: float, unit: float, colour: str) -> Iterator[Label]:
    size, text = SMALL, str(block.hop)
    width = (block.keys[1] - block.keys[0]) * unit
    height = (block.queries[1] - block.queries[0]) * unit
    share = 0.33 if block.is_causal else 0.5  # within the triangle
    if min(width, height) * 2 * share >= width_of(text, size) + _AIR:
        yield Label(
            text=text,
            x=left + block.keys[0] * unit + width * share,
            y=top + block.queries[0] * unit + height * (1 - share),
            size=size,
            colour=ink_on(colour),
            align="center",
        )


def _name_rows(sheet: Sheet, step: ContextParallel, place: int, left: float, top: float) -> None:
    unit = _SQUARE / step.sequence
    spans = {block.queries for block in blocks_of(step, place)}
    for first, behind in spans:
        if (behind - first) * unit >= SMALL:
            middle = top + (first + behind) / 2 * unit
            _name(sheet, _place_name(step, place), left, middle)


# -- whose keys are where


def _add_hops(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """A row for each place of the ring, a column for each hop: whose keys and values it has, and
    what it computes with them, as a part of the most that any does."""
    _add_part(sheet, "keys and values per hop, and the share of scores computed (filled)")
    hops = 1 if step.gathers else step.ring
    row = min(_ROW, max(_LEAST_ROW, _TALLEST / step.ring))
    scores = [
        summed((block.source, block.scores) for block in blocks_of(step, place))
        for place in range(step.ring)
    ]
    most = max(number for by_source in scores for number in by_source.values())
    columns = step.ring
    wide = _WIDTH / columns
    for column in range(columns):
        text = f"hop {column}" if hops > 1 else "gathered" if column == 0 else ""
        if text and width_of(text, SMALL) <= max(wide, _WIDTH / 4 if hops == 1 else 0):
            x = left + (column + 0.5) * wide
            y = sheet.height + SMALL / 2
            sheet.texts.append(Label(text=text, x=x, y=y, size=SMALL, align="center"))
    sheet.height += SMALL + 4
    for place in range(step.ring):
        if row >= SMALL:
            _name(sheet, _place_name(step, place), left, sheet.height + row / 2)
        for column in range(columns):
            source = column if step.gathers else source_at(step, place, column)
            share = scores[place].get(source, 0) / most
            _add_cell(sheet, left + column * wide, (wide, row), share, step, source)
        sheet.height += row


def _add_cell(
    sheet: Sheet,
    x: float,
    size: tuple[float, float],
    share: float,
    step: ContextParallel,
    source: int,
) -> None:
    """Filled from below as far as scores are computed; white where keys only pass by."""
    width, height = size
    colour, y = of_place(source * step.ulysses), sheet.height
    sheet.rectangles += [
        Rectangle(x=x, y=y, width=width, height=height, colour=WHITE, edge=LIGHT, edge_width=0.6),
        Rectangle(x=x, y=y + height * (1 - share), width=width, height=height * share,
                  colour=colour, edge=LIGHT, edge_width=0.6),
    ]  # fmt: skip
    text, high = f"from {_place_name(step, source)}", height * max(share, 1 - share)
    if width_of(text, SMALL) + _AIR <= width and high >= SMALL * 1.2:
        is_within = share >= 0.5  # the larger part has the text
        label = Label(
            text=text,
            x=x + width / 2,
            y=y + (height - high / 2 if is_within else high / 2),
            size=SMALL,
            colour=ink_on(colour) if is_within else GREY,
            align="center",
        )
        sheet.texts.append(label)


# -- what all of it has


def _fill(sheet: Sheet, place: tuple[float, float, float], text: str, colour: str) -> None:
    x, width, height = place
    y = sheet.height
    sheet.rectangles.append(
        Rectangle(x=x, y=y, width=width, height=height, colour=colour, edge_width=0.8)
    )
    if width_of(text, HEAD) + _AIR <= width:
        sheet.texts.append(
            Label(text=text, x=x + width / 2, y=y + height / 2, size=HEAD,
                  colour=ink_on(colour), align="center")
        )  # fmt: skip


def _name(sheet: Sheet, text: str, left: float, middle: float) -> None:
    sheet.texts.append(Label(text=text, x=left - 6, y=middle, size=SMALL, align="right"))


def _place_name(step: ContextParallel, place: int) -> str:
    """`cp 3`, or of a group `cp 4-5`."""
    first = place * step.ulysses
    last = first + step.ulysses - 1
    return f"{step.axis} {first}" if first == last else f"{step.axis} {first}-{last}"


def _widest_name(step: ContextParallel) -> float:
    names = [_place_name(step, place) for place in range(step.ring)]
    if step.ulysses > 1:
        names.append(f"heads {step.ulysses}/{step.ulysses}")
    return max(width_of(name, SMALL) for name in names)


_FIELD_WIDTH, _FIELD_HEIGHT, _EXPERT_ROW = (
    150.0,
    96.0,
    12.0,
)  # of a field, and of an expert's row at most
_COLUMNS, _FIELD_GAP = 4, 44.0  # fields side by side
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
    width = 2 * EDGE + min(_COLUMNS, max(1, len(layers))) * (_FIELD_WIDTH + _FIELD_GAP)
    sheet = Sheet(title=f"{name}: tokens per expert", width=width, height=EDGE)
    sheet.write([Label(text=sheet.title, x=EDGE, y=0, size=TITLE, is_bold=True)])
    if not steps:
        return sheet
    first, last = min(steps), max(steps)
    what = (
        f"one column per logged step, {first} to {last}; one row per expert; relative to "
        "the layer's mean"
    )
    sheet.write([Label(text=what, x=EDGE, y=0, size=SMALL, colour=GREY)])
    _add_legend(sheet)
    for start in range(0, len(layers), _COLUMNS):
        _add_fields(sheet, layers[start : start + _COLUMNS], steps)
    sheet.height += EDGE
    return sheet


def _add_legend(sheet: Sheet) -> None:
    y, x = sheet.height + SMALL, EDGE
    for times in _SCALE:
        sheet.rectangles.append(
            Rectangle(
                x=x,
                y=y - SMALL / 2,
                width=SMALL,
                height=SMALL,
                colour=_colour(times),
                edge=LIGHT,
                edge_width=0.5,
            )
        )
        word = f"{times:g}×" + (" or more" if times == _MOST else "")
        sheet.texts.append(Label(text=word, x=x + SMALL + 4, y=y, size=SMALL))
        x += 48
    sheet.height += 2 * SMALL


def _add_fields(sheet: Sheet, layers: Sequence[str], steps: Steps) -> None:
    """Add a row of them."""
    top, heights = sheet.height + 2 * SMALL, [0.0]
    for place, layer in enumerate(layers):
        left = EDGE + _FIELD_GAP / 2 + place * (_FIELD_WIDTH + _FIELD_GAP)
        sheet.texts.append(Label(text=layer, x=left, y=top - SMALL, size=SMALL))
        heights.append(_add_field(sheet, left, top, [its[layer] for its in steps.values()]))
    sheet.height = top + max(heights) + SMALL


def _add_field(sheet: Sheet, left: float, top: float, columns: Sequence[Sequence[int]]) -> float:
    """Add one layer's and return its height."""
    experts, width = len(columns[0]), _FIELD_WIDTH / len(columns)
    height = min(_EXPERT_ROW, _FIELD_HEIGHT / experts)
    for place, tokens in enumerate(columns):
        mean = sum(tokens) / experts
        for expert, number in enumerate(tokens):
            x, y = left + place * width, top + expert * height
            colour = _colour(number / mean)
            sheet.rectangles.append(Rectangle(x=x, y=y, width=width, height=height, colour=colour))
    for expert in sorted({0, experts - 1}):
        middle = top + (expert + 0.5) * height
        sheet.texts.append(
            Label(text=str(expert), x=left - 4, y=middle, size=SMALL, align="right", colour=GREY)
        )
    line = Rectangle(x=left, y=top + experts * height, width=_FIELD_WIDTH, height=0.5, colour=LIGHT)
    sheet.rectangles.append(line)
    return experts * height


def _colour(times: float) -> str:
    """Return white for nothing, and the darkest for twice the mean and more."""
    share = min(times, _MOST) / _MOST
    red, green, blue = (round(255 - share * (255 - part)) for part in _DARK)
    return f"#{red:02x}{green:02x}{blue:02x}"
