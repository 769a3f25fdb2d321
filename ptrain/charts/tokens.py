"""Pictures of tokens: token shards over cp, and tokens per expert over the steps of a run.

Shards: a band shows each rank's tokens of a sample. A square shows the blocks of attention scores,
with queries downwards and keys to the right, by the rank and hop that compute them; the causal mask
leaves white. A table shows whose keys and values each place of the ring has at each hop. If tokens
are exchanged for heads, all ranks of a group compute the same blocks, each for its heads.

Experts: each layer has a field with a column for every logged step and a row for every expert. The
more tokens an expert received, the darker its cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ptrain.axes.context.attention import ScoreBlock, Span, all_spans, blocks_of, source_at
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
    place_colour,
    text_width,
)
from ptrain.steps.step import ContextParallel
from ptrain.units import sum_by_key

_WIDTH = 560.0
_BAND, _GAP = 26.0, 12.0  # the height of a band of tokens; the distance between parts
_SQUARE = 420.0  # the side of the square of scores
_ROW, _LEAST_ROW, _TALLEST = 30.0, 8.0, 840.0  # heights of a ring place's row, and of all rows
_STAIR = 5.0  # the smallest step along the diagonal of a causal block
_AIR = 3.0


def tokens_sheet(title: str, step: ContextParallel) -> Sheet:
    """Return the picture of a spec's context axis.

    Args:
        title: The name of the spec.
        step: The plan's step of context parallelism.
    """
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
    """Add the heading of a part of the picture."""
    sheet.height += _GAP
    sheet.write([Label(text=text, x=EDGE, y=0, size=HEAD, is_bold=True)])
    sheet.height += 3


# -- the tokens of each rank


def _add_tokens(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """Add a band with each rank's tokens.

    If tokens are exchanged for heads, further bands show a group's tokens, which each of its ranks
    has within attention for a part of the heads.
    """
    _add_part(sheet, "tokens per rank outside attention, for all heads")
    spans_of_rank = [*all_spans(step)]
    for rank, spans in enumerate(spans_of_rank):
        for span in spans:
            _add_box(sheet, _span_geometry(step, span, left), f"{rank}", place_colour(rank))
    sheet.height += _BAND
    _add_ticks(sheet, step, left)
    if step.ulysses == 1:
        return
    _add_part(sheet, "tokens per rank within attention: all tokens of its group, for its heads")
    for member in range(step.ulysses):
        name = f"heads {member + 1}/{step.ulysses}"
        _add_row_name(sheet, name, left, sheet.height + _BAND / 2)
        for place in range(step.ring):
            rank = place * step.ulysses + member
            for span in _group_spans(spans_of_rank, step, place):
                _add_box(sheet, _span_geometry(step, span, left), f"{rank}", place_colour(rank))
        sheet.height += _BAND


def _group_spans(
    spans_of_rank: Sequence[Sequence[Span]], step: ContextParallel, place: int
) -> list[Span]:
    """Return the spans of a group's tokens; spans that touch are merged.

    Args:
        spans_of_rank: The spans of each rank's tokens.
        step: The plan's step of context parallelism.
        place: The place of the group in the ring.
    """
    first = place * step.ulysses
    spans = sorted(span for spans in spans_of_rank[first : first + step.ulysses] for span in spans)
    merged = spans[:1]
    for span in spans[1:]:
        if span[0] == merged[-1][1]:
            merged[-1] = merged[-1][0], span[1]
        else:
            merged.append(span)
    return merged


def _span_geometry(step: ContextParallel, span: Span, left: float) -> tuple[float, float, float]:
    """Return the horizontal position and the width of a span, and the height of a band."""
    first, last = span
    unit = _WIDTH / step.sequence
    return left + first * unit, (last - first) * unit, _BAND


def _add_ticks(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """Add the token numbers at the edges of shards, without numbers that would overlap."""
    edges = sorted({edge for spans in all_spans(step) for span in spans for edge in span})
    last = -_WIDTH  # left of the drawing, so that the first number is always shown
    for edge in edges:
        x = left + edge * _WIDTH / step.sequence
        if x - last >= text_width(str(edge), SMALL) + _AIR:
            sheet.texts.append(
                Label(text=str(edge), x=x, y=sheet.height + 7, size=SMALL, align="center")
            )
            last = x
    sheet.height += 7 + SMALL


# -- the blocks of attention scores


def _add_scores(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """Add the square of attention scores."""
    has_hops = step.ring > 1 and not step.gathers
    owner = "group of ranks" if step.ulysses > 1 else "rank"
    _add_part(sheet, f"scores computed per {owner}: queries downwards, keys to the right")
    unit = _SQUARE / step.sequence
    top = sheet.height
    sheet.rectangles.append(
        Rectangle(x=left, y=top, width=_SQUARE, height=_SQUARE, colour=WHITE, edge=LIGHT,
                  edge_width=0.6)
    )  # fmt: skip
    for place in range(step.ring):
        colour = place_colour(place * step.ulysses)
        for block in blocks_of(step, place):
            sheet.rectangles += _block_rectangles(block, left, top, unit, colour)
            if has_hops:
                sheet.texts += _hop_label(block, left, top, unit, colour)
    for place in range(step.ring):
        _name_rows(sheet, step, place, left, top)
    sheet.height += _SQUARE + 4
    notes = ["number: hops of the keys"] if has_hops else []
    notes += ["each rank of a group: only its heads"] if step.ulysses > 1 else []
    note = " · ".join(notes)
    sheet.write([Label(text=note, x=left, y=0, size=SMALL, colour=GREY)] if notes else [])


def _block_rectangles(
    block: ScoreBlock, left: float, top: float, unit: float, colour: str
) -> Iterator[Rectangle]:
    """Yield the rectangles of a block: one, or steps along the diagonal if the block is causal.

    Args:
        block: The queries and keys of the block, in tokens.
        left: The left edge of the square of scores.
        top: Its upper edge.
        unit: Points per token.
        colour: The colour of the rank.
    """
    (first_row, last_row), (first, behind) = block.queries, block.keys
    rows = last_row - first_row
    # Rectangles are the only shapes of a sheet, so a triangle is drawn as stairs.
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
            # White edges between stairs would make stripes.
            edge=colour if block.is_causal else WHITE,
            edge_width=0 if block.is_causal else min(0.6, 0.06 * (behind - first) * unit),
        )


def _hop_label(
    block: ScoreBlock, left: float, top: float, unit: float, colour: str
) -> Iterator[Label]:
    """Yield the number of a block's hop, if it fits."""
    size, text = SMALL, str(block.hop)
    width = (block.keys[1] - block.keys[0]) * unit
    height = (block.queries[1] - block.queries[0]) * unit
    share = 0.33 if block.is_causal else 0.5  # a third of each side is within the triangle
    if min(width, height) * 2 * share >= text_width(text, size) + _AIR:
        yield Label(
            text=text,
            x=left + block.keys[0] * unit + width * share,
            y=top + block.queries[0] * unit + height * (1 - share),
            size=size,
            colour=ink_on(colour),
            align="center",
        )


def _name_rows(sheet: Sheet, step: ContextParallel, place: int, left: float, top: float) -> None:
    """Add the name of a place to the rows of its queries."""
    unit = _SQUARE / step.sequence
    spans = {block.queries for block in blocks_of(step, place)}
    for first, behind in spans:
        if (behind - first) * unit >= SMALL:
            middle = top + (first + behind) / 2 * unit
            _add_row_name(sheet, _place_name(step, place), left, middle)


# -- the keys of each hop


def _add_hops(sheet: Sheet, step: ContextParallel, left: float) -> None:
    """Add a table with a row for each place of the ring and a column for each hop.

    A cell names the place whose keys and values are there. It is filled by the share of scores that
    are computed with them, relative to the largest number of any cell.
    """
    _add_part(sheet, "keys and values per hop, and the share of scores computed (filled)")
    hops = 1 if step.gathers else step.ring
    row = min(_ROW, max(_LEAST_ROW, _TALLEST / step.ring))
    scores = [
        sum_by_key((block.source, block.num_scores) for block in blocks_of(step, place))
        for place in range(step.ring)
    ]
    most = max(number for by_source in scores for number in by_source.values())
    columns = step.ring
    wide = _WIDTH / columns
    for column in range(columns):
        text = f"hop {column}" if hops > 1 else "gathered" if column == 0 else ""
        if text and text_width(text, SMALL) <= max(wide, _WIDTH / 4 if hops == 1 else 0):
            x = left + (column + 0.5) * wide
            y = sheet.height + SMALL / 2
            sheet.texts.append(Label(text=text, x=x, y=y, size=SMALL, align="center"))
    sheet.height += SMALL + 4
    for place in range(step.ring):
        if row >= SMALL:
            _add_row_name(sheet, _place_name(step, place), left, sheet.height + row / 2)
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
    """Add a cell, filled from below by `share`; white where keys only pass by.

    Args:
        sheet: The sheet; the cell is at its lower end.
        x: The left edge.
        size: The width and the height.
        share: The scores computed with these keys, relative to the largest number of any cell.
        step: The plan's step of context parallelism.
        source: The place of the ring whose keys and values the cell has.
    """
    width, height = size
    colour, y = place_colour(source * step.ulysses), sheet.height
    sheet.rectangles += [
        Rectangle(x=x, y=y, width=width, height=height, colour=WHITE, edge=LIGHT, edge_width=0.6),
        Rectangle(x=x, y=y + height * (1 - share), width=width, height=height * share,
                  colour=colour, edge=LIGHT, edge_width=0.6),
    ]  # fmt: skip
    text, high = f"from {_place_name(step, source)}", height * max(share, 1 - share)
    if text_width(text, SMALL) + _AIR <= width and high >= SMALL * 1.2:
        is_within = share >= 0.5  # the text is in the larger part
        label = Label(
            text=text,
            x=x + width / 2,
            y=y + (height - high / 2 if is_within else high / 2),
            size=SMALL,
            colour=ink_on(colour) if is_within else GREY,
            align="center",
        )
        sheet.texts.append(label)


# -- shared parts


def _add_box(sheet: Sheet, place: tuple[float, float, float], text: str, colour: str) -> None:
    """Add a rectangle at the bottom of the sheet, with a text in it if that fits."""
    x, width, height = place
    y = sheet.height
    sheet.rectangles.append(
        Rectangle(x=x, y=y, width=width, height=height, colour=colour, edge_width=0.8)
    )
    if text_width(text, HEAD) + _AIR <= width:
        sheet.texts.append(
            Label(text=text, x=x + width / 2, y=y + height / 2, size=HEAD,
                  colour=ink_on(colour), align="center")
        )  # fmt: skip


def _add_row_name(sheet: Sheet, text: str, left: float, middle: float) -> None:
    """Add the name of a row, left of the drawing."""
    sheet.texts.append(Label(text=text, x=left - 6, y=middle, size=SMALL, align="right"))


def _place_name(step: ContextParallel, place: int) -> str:
    """Return the name of a place of the ring: `cp 3`, or `cp 4-5` for a group."""
    first = place * step.ulysses
    last = first + step.ulysses - 1
    return f"{step.axis} {first}" if first == last else f"{step.axis} {first}-{last}"


def _widest_name(step: ContextParallel) -> float:
    """Return the width of the widest row name."""
    names = [_place_name(step, place) for place in range(step.ring)]
    if step.ulysses > 1:
        names.append(f"heads {step.ulysses}/{step.ulysses}")
    return max(text_width(name, SMALL) for name in names)


_FIELD_WIDTH, _FIELD_HEIGHT, _EXPERT_ROW = (
    150.0,
    96.0,
    12.0,
)  # a layer's field, and the largest height of an expert's row
_COLUMNS, _FIELD_GAP = 4, 44.0  # fields per row, and the distance between them
_MOST = 2.0  # tokens over the mean; more tokens do not get a darker colour
_DARK = (0, 66, 128)
_SCALE = (0.0, 0.5, 1.0, 1.5, 2.0)

Steps = Mapping[int, Mapping[str, Sequence[int]]]  # by step, layer and expert


def logged_tokens(rows: Iterable[Mapping[str, Any]]) -> Steps:
    """Return the tokens per expert of each step in a run's metrics.

    A run that continues from a checkpoint may log a step again; the last entry counts.

    Args:
        rows: The rows of the metrics.
    """
    return {row["step"]: row["tokens_per_expert"] for row in rows if "tokens_per_expert" in row}


def routing_sheet(name: str, steps: Steps) -> Sheet:
    """Return the picture of a run's routing.

    Args:
        name: The name of the spec.
        steps: The tokens per expert by step and layer. If there are none, the picture has only a
            title.
    """
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
    names = {_load_colour(times): f"{times:g}×" for times in _SCALE}
    names[_load_colour(_MOST)] += " or more"
    sheet.add_legend(EDGE, names, SMALL)
    sheet.height += SMALL
    for start in range(0, len(layers), _COLUMNS):
        _add_fields(sheet, layers[start : start + _COLUMNS], steps)
    sheet.height += EDGE
    return sheet


def _add_fields(sheet: Sheet, layers: Sequence[str], steps: Steps) -> None:
    """Add one row of fields."""
    top, heights = sheet.height + 2 * SMALL, [0.0]
    for place, layer in enumerate(layers):
        left = EDGE + _FIELD_GAP / 2 + place * (_FIELD_WIDTH + _FIELD_GAP)
        sheet.texts.append(Label(text=layer, x=left, y=top - SMALL, size=SMALL))
        heights.append(
            _add_field(
                sheet, left, top, [tokens_of_step[layer] for tokens_of_step in steps.values()]
            )
        )
    sheet.height = top + max(heights) + SMALL


def _add_field(sheet: Sheet, left: float, top: float, columns: Sequence[Sequence[int]]) -> float:
    """Add the field of one layer and return its height."""
    experts, width = len(columns[0]), _FIELD_WIDTH / len(columns)
    height = min(_EXPERT_ROW, _FIELD_HEIGHT / experts)
    for place, tokens in enumerate(columns):
        mean = sum(tokens) / experts
        for expert, number in enumerate(tokens):
            x, y = left + place * width, top + expert * height
            colour = _load_colour(number / mean)
            sheet.rectangles.append(Rectangle(x=x, y=y, width=width, height=height, colour=colour))
    for expert in sorted({0, experts - 1}):
        middle = top + (expert + 0.5) * height
        sheet.texts.append(
            Label(text=str(expert), x=left - 4, y=middle, size=SMALL, align="right", colour=GREY)
        )
    line = Rectangle(x=left, y=top + experts * height, width=_FIELD_WIDTH, height=0.5, colour=LIGHT)
    sheet.rectangles.append(line)
    return experts * height


def _load_colour(times: float) -> str:
    """Return the colour of tokens over the mean: white for 0, darkest from twice the mean."""
    share = min(times, _MOST) / _MOST
    # From 254: WHITE would be dark on a dark screen, unlike the other colours of the scale.
    red, green, blue = (round(254 - share * (254 - part)) for part in _DARK)
    return f"#{red:02x}{green:02x}{blue:02x}"
