"""Sheets as SVG text, without a drawing library.

Equal sheets give equal text. Letters are text, so that readers can search and copy them; a sheet
assumes wider letters than those of common fonts. Ink, paper and thin lines follow the screen: light
or dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ptrain.charts.sheet import BLACK, GREY, LIGHT, WHITE, Label, Line, Rectangle, Sheet

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
    width, height = _number(sheet.width), _number(sheet.height)
    title = escape(sheet.title)
    style = f"<style>@media (prefers-color-scheme:dark){{{DARK_RULES}}}</style>" * is_file
    paper = f'<path class="p" fill="{WHITE}" d="M0 0h{width}v{height}H0z"/>' * is_file
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="c" role="img" width="{width}pt" '
        f'height="{height}pt" viewBox="0 0 {width} {height}" font-family="{FONT}">'
        f"<title>{title}</title>{style}{paper}"
        f"{''.join(_paths(sheet.rectangles))}{''.join(map(_line, sheet.lines))}"
        f"{''.join(map(_text, sheet.texts))}</svg>"
    )


def _paths(rectangles: Iterable[Rectangle]) -> Iterable[str]:
    """Yield paths; consecutive rectangles of one style share a path, which keeps files small."""
    style, places = ("", "", 0.0), ""
    for box in rectangles:
        if (box.colour, box.edge, box.edge_width) != style and places:
            yield _path(*style, places)
            places = ""
        style = box.colour, box.edge, box.edge_width
        x, y, width, height = map(_number, (box.x, box.y, box.width, box.height))
        places += f"M{x} {y}h{width}v{height}h-{width}z"
    if places:
        yield _path(*style, places)


def _path(colour: str, edge: str, edge_width: float, places: str) -> str:
    """Return a path with a fill and an edge."""
    classes = [_CLASSES.get(colour, "")]
    stroke = ""
    if edge_width:
        classes.append(f"{_CLASSES[edge]}s" if edge in _CLASSES else "")
        stroke = f' stroke="{edge}" stroke-width="{_number(edge_width)}"'
    return f'<path{_class(*classes)} fill="{colour}"{stroke} d="{places}"/>'


def _line(line: Line) -> str:
    """Return the element of a line."""
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    named = _class(f"{_CLASSES[line.colour]}s" if line.colour in _CLASSES else "")
    dash = f' stroke-dasharray="{_number(line.dash)}"' if line.dash else ""
    width = f'stroke-width="{_number(line.width)}"'
    return (
        f'<polyline{named} style="fill:none" stroke="{line.colour}" {width}{dash} '
        f'points="{points}"/>'
    )


def _text(text: Label) -> str:
    """Return the element of a line of text."""
    place = f'x="{_number(text.x)}" y="{_number(text.y + _MIDDLE * text.size)}"'
    bold = ' font-weight="600"' * text.is_bold
    return (
        f"<text{_class(_CLASSES.get(text.colour, ''))} {place} "
        f'font-size="{_number(text.size)}" fill="{text.colour}"{_ANCHORS[text.align]}{bold}>'
        f"{escape(text.text)}</text>"
    )


def _class(*names: str) -> str:
    """Return the attribute `class`, empty without names."""
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""


def _number(value: float) -> str:
    """Return a length with two digits after the point, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
