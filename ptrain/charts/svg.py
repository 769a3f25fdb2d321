"""Sheets as SVG text, without a drawing library.

Equal sheets give equal text. Letters are text, so that readers can search and copy them; a sheet
assumes wider letters than those of common fonts. Ink, paper and thin lines follow the screen: light
or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from operator import attrgetter

from ptrain.charts.sheet import BLACK, GREY, LIGHT, WHITE, Label, Polyline, Rectangle, Sheet

# The classes of colours that a dark screen replaces, and their replacements.
_CLASSES = {BLACK: "i", GREY: "g", LIGHT: "l", WHITE: "p"}
_DARK = {"i": "#f2f4f6", "g": "#b3bac2", "l": "#4a5158", "p": "#15181c"}
# For `@media (prefers-color-scheme: dark)` of a page with sheets.
DARK_RULES = "".join(
    f".c .{name}{{fill:{colour}}}.c .{name}s{{stroke:{colour}}}" for name, colour in _DARK.items()
)
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_ANCHORS = {"left": "", "center": ' text-anchor="middle"', "right": ' text-anchor="end"'}
_MIDDLE = 0.35  # from the middle of a line of letters to their baseline, in font sizes


def svg_text(sheet: Sheet, *, is_file: bool = True) -> str:
    """Return a sheet as SVG.

    Args:
        sheet: The rectangles, lines and texts.
        is_file: Add the rules for dark screens, and a background. An SVG within a page uses those
            of the page (`DARK_RULES`).

    Returns:
        The element `svg`, which is as wide as the sheet, or as its container if that is narrower.
    """
    width, height = _length_text(sheet.width), _length_text(sheet.height)
    title = escape(sheet.title)
    style = f"<style>@media (prefers-color-scheme:dark){{{DARK_RULES}}}</style>" * is_file
    paper = f'<path class="p" fill="{WHITE}" d="M0 0h{width}v{height}H0z"/>' * is_file
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="c" role="img" width="{width}pt" '
        f'height="{height}pt" viewBox="0 0 {width} {height}" font-family="{FONT}">'
        f"<title>{title}</title>{style}{paper}"
        f"{''.join(_path_elements(sheet.rectangles))}{''.join(map(_polyline_element, sheet.lines))}"
        f"{''.join(map(_text_element, sheet.texts))}</svg>"
    )


def _path_elements(rectangles: Iterable[Rectangle]) -> Iterator[str]:
    """Yield paths; consecutive rectangles of one style share a path, which keeps files small."""
    for style, boxes in groupby(rectangles, attrgetter("colour", "edge", "edge_width")):
        colour, edge, edge_width = style
        sizes = (map(_length_text, (box.x, box.y, box.width, box.height)) for box in boxes)
        places = (f"M{x} {y}h{width}v{height}h-{width}z" for x, y, width, height in sizes)
        edge_class = f"{_CLASSES[edge]}s" if edge_width and edge in _CLASSES else ""
        named = _class_attribute(_CLASSES.get(colour, ""), edge_class)
        stroke = f' stroke="{edge}" stroke-width="{_length_text(edge_width)}"' if edge_width else ""
        yield f'<path{named} fill="{colour}"{stroke} d="{"".join(places)}"/>'


def _polyline_element(line: Polyline) -> str:
    """Return the element of a line."""
    points = " ".join(f"{_length_text(x)},{_length_text(y)}" for x, y in line.points)
    named = _class_attribute(f"{_CLASSES[line.colour]}s" if line.colour in _CLASSES else "")
    dash = f' stroke-dasharray="{_length_text(line.dash)}"' if line.dash else ""
    width = f'stroke-width="{_length_text(line.width)}"'
    return (
        f'<polyline{named} style="fill:none" stroke="{line.colour}" {width}{dash} '
        f'points="{points}"/>'
    )


def _text_element(text: Label) -> str:
    """Return the element of a line of text."""
    place = f'x="{_length_text(text.x)}" y="{_length_text(text.y + _MIDDLE * text.size)}"'
    bold = ' font-weight="600"' * text.is_bold
    return (
        f"<text{_class_attribute(_CLASSES.get(text.colour, ''))} {place} "
        f'font-size="{_length_text(text.size)}" fill="{text.colour}"{_ANCHORS[text.align]}{bold}>'
        f"{escape(text.text)}</text>"
    )


def _class_attribute(*names: str) -> str:
    """Return the attribute `class`, empty without names."""
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""


def _length_text(value: float) -> str:
    """Return a length with two digits after the point, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
