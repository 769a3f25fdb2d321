"""Sheets of rectangles, lines and text, independent of a drawing library, and their colours.

Lengths are in points (1/72 inch) from the upper left corner, and colours are `#rrggbb`. The assumed
width of text is an upper bound for DejaVu Sans, so text that fits here fits when it is drawn.

BLACK, GREY, LIGHT and WHITE are ink, secondary ink, thin lines and paper: an SVG replaces them if
the reader's screen is dark (`charts/svg.py`). All other colours are the same on both.

Kinds of actions have colours that colour-blind readers can distinguish, with a shade for each
stage: Okabe and Ito's sky blue, yellow and vermillion (2008, https://jfly.uni-koeln.de/color/), and
grey. The yellow is darker, so that its shades are visible on white. Grey remains farther from the
three than their other colours do when white is mixed in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import floor, log10
from typing import Literal

from ptrain.timeline import Kind

BLACK, GREY, LIGHT, WHITE = "#000000", "#555555", "#cccccc", "#ffffff"
# The width of a page on a desktop and on a phone of 390 pixels, without margins.
WIDE, NARROW = 720.0, 264.0
# The margin of a picture, and the font sizes of its title, head lines and small text.
EDGE, TITLE, HEAD, SMALL = 14.0, 12.0, 9.0, 8.0
LINE = 1.35  # distance between lines of text, in font sizes

# Advance widths of DejaVu Sans over the font size: a digit has 0.636, a line of prose at most 0.57
# per letter, bold prose 0.7 if few letters are capitals.
_DIGIT, _PROSE, _BOLD = 0.64, 0.58, 0.8
_FEW = 10  # letters; a shorter line may consist of digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A filled rectangle; `x` and `y` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    edge: str = WHITE
    edge_width: float = 0  # half of it is inside the rectangle


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A line of text; `x` is its left, centre or right by `align`, and `y` is its middle."""

    text: str
    x: float
    y: float
    size: float
    colour: str = BLACK
    align: Literal["left", "center", "right"] = "left"
    is_bold: bool = False

    @property
    def width(self) -> float:
        """The width in points, an upper bound."""
        return text_width(self.text, self.size, is_bold=self.is_bold)

    @property
    def left(self) -> float:
        """The horizontal position of the first letter."""
        return self.x - self.width * {"left": 0, "center": 0.5, "right": 1}[self.align]

    def move_to(
        self, align: Literal["left", "center", "right"], *, x: float = -1, y: float = -1
    ) -> Label:
        """Return the text at another place; negative positions stay as they are."""
        x, y = self.x if x < 0 else x, self.y if y < 0 else y
        return replace(self, align=align, x=x, y=y)

    def clamp_between(self, left: float, right: float) -> Label:
        """Return the text moved so that it is between two positions."""
        if self.left < left:
            return self.move_to("left", x=left)
        return self.move_to("right", x=right) if self.left + self.width > right else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Polyline:
    """Straight lines from point to point; `dash` is the length of dashes, 0 for a solid line."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.2
    dash: float = 0


@dataclass(slots=True, kw_only=True)
class Sheet:
    """A drawing that grows downwards as parts are added; later parts cover earlier ones.

    Lines cover rectangles, and texts cover both.
    """

    title: str
    width: float
    height: float = 0
    rectangles: list[Rectangle] = field(default_factory=list)
    lines: list[Polyline] = field(default_factory=list)
    texts: list[Label] = field(default_factory=list)

    def add_below(self, other: Sheet) -> None:
        """Append another sheet at the bottom."""
        below = self.height
        self.rectangles += [replace(r, y=r.y + below) for r in other.rectangles]
        moved = (
            replace(line, points=tuple((x, y + below) for x, y in line.points))
            for line in other.lines
        )
        self.lines += moved
        self.texts += [replace(text, y=text.y + below) for text in other.texts]
        self.width, self.height = max(self.width, other.width), below + other.height

    def add_heading(self, title: str, *notes: str) -> None:
        """Append a title and secondary lines below it."""
        self.write([Label(text=title, x=EDGE, y=0, size=TITLE, is_bold=True)])
        self.write(Label(text=note, x=EDGE, y=0, size=SMALL, colour=GREY) for note in notes)
        self.height += SMALL

    def add_legend(self, x: float, names: Mapping[str, str], size: float) -> None:
        """Append lines of coloured squares with names at the bottom.

        Args:
            x: The left edge of the first square of a line.
            names: The name of each colour.
            size: The size of the squares and of the text.
        """
        first, y = x, self.height + size * LINE / 2
        for colour, name in names.items():
            if x > first and x + size + 4 + text_width(name, size) > self.width:
                x, y = first, y + size * 1.6
            box = Rectangle(
                x=x,
                y=y - size / 2,
                width=size,
                height=size,
                colour=colour,
                edge=LIGHT,
                edge_width=0.5,
            )
            word = Label(text=name, x=x + size + 4, y=y, size=size)
            self.rectangles.append(box)
            self.texts.append(word)
            x = word.x + word.width + 12
        self.height = y + size * LINE / 2

    def write(self, lines: Iterable[Label]) -> None:
        """Append lines of text at the bottom; a line that is too wide is wrapped."""
        for line in lines:
            for text in wrap_text(line, self.width - line.x):
                self.height += line.size * LINE
                self.texts.append(
                    Label(
                        text=text,
                        x=line.x,
                        y=self.height - line.size * LINE / 2,
                        size=line.size,
                        colour=line.colour,
                        is_bold=line.is_bold,
                    )
                )


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Return an upper bound of a text's width in points.

    Args:
        text: A line of text.
        size: The font size in points.
        is_bold: The text is bold, which is wider.
    """
    letter = _BOLD if is_bold else _DIGIT if len(text) < _FEW else _PROSE
    return len(text) * letter * size


def wrap_text(text: Label, width: float) -> Iterator[str]:
    """Yield the lines of a text, none wider than `width`."""
    letters = int(width / text_width("x", text.size, is_bold=text.is_bold))
    yield from textwrap.wrap(text.text, max(1, letters))


Units = Sequence[tuple[str, float]]  # the largest first
MEMORY: Units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
TRAFFIC: Units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
TIME: Units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
NUMBER: Units = (("", 1.0),)


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50 … or their tenths that is not below a number."""
    power = 10.0 ** floor(log10(least))
    # 1e-9 allows for rounding: 0.2 / 0.1 may be above 2.
    return power * next(digit for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def round_ticks(
    most: float, units: Units, number: int = 5, least: float = 0
) -> list[tuple[float, str]]:
    """Return the round numbers of a scale with their texts.

    Args:
        most: The end of the scale.
        units: The names and sizes of the units of the scale.
        number: The number of intervals, at most.
        least: The start of the scale.

    Example:
        >>> [text for _, text in round_ticks(74 * 2**30, MEMORY)]
        ['0', '20 GiB', '40 GiB', '60 GiB']
    """
    unit, size = next((unit for unit in units if most >= unit[1]), units[-1])
    step = size * round_step(max((most - least) / size, 1e-12) / number)
    places = range(-floor(-least / step + 1e-9), floor(most / step + 1e-9) + 1)
    texts = (f"{place * step / size:.6g} {unit}".strip() if place else "0" for place in places)
    return [(place * step, text) for place, text in zip(places, texts, strict=True)]


_COLOUR_OF_KIND = {
    Kind.FORWARD: "#56b4e9",
    Kind.BACKWARD: "#e8d020",
    Kind.INPUT: "#d55e00",
    Kind.WEIGHT: "#777777",
}
_LIGHTEST = 0.45  # share of white in the last stage's colour


@cache
def shades(kind: Kind, number: int) -> tuple[str, ...]:
    """Return the colours of a rank's stages, from the first to the last, darker to lighter.

    Args:
        kind: The kind of action, which has a colour.
        number: The number of stages of a rank.
    """
    steps = max(1, number - 1)
    return tuple(
        _lighten_colour(_COLOUR_OF_KIND[kind], _LIGHTEST * place / steps) for place in range(number)
    )


# Okabe and Ito's other colours. Further places repeat them with more white.
_PLACE_COLOURS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#0072b2",
    "#d55e00",
    "#b8a000",
    "#777777",
)
_FADED = 0.3


@cache
def place_colour(place: int) -> str:
    """Return the colour of a rank by its place along an axis; eight neighbours differ."""
    # The eight colours with 0, 30 and 60 % of white; then they repeat.
    turn, number = divmod(place, len(_PLACE_COLOURS))
    return _lighten_colour(_PLACE_COLOURS[number], _FADED * (turn % 3))


@cache
def ink_on(colour: str) -> str:
    """Return black or white, the one with more contrast to a colour.

    Its contrast is at least 4.5 to 1, which WCAG 2.1 requires for text. The two differ by one from
    BLACK and WHITE, because text on a colour stays as it is on a dark screen.
    """
    light = luminance(colour)
    return "#010101" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#fefefe"


def luminance(colour: str) -> float:
    """Return the luminance of a colour: 0 for black to 1 for white.

    It is the relative luminance of sRGB by WCAG 2.1.
    """
    red, green, blue = (_linear_channel(value / 255) for value in _rgb_channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear_channel(value: float) -> float:
    """Return the linear intensity of an sRGB channel, both from 0 to 1."""
    # The threshold of IEC 61966-2-1. WCAG 2.1 has 0.03928, which is the same for channels of 8
    # bits.
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _lighten_colour(colour: str, white: float) -> str:
    """Return a colour mixed with a share of white."""
    mixed = (round(value + (255 - value) * white) for value in _rgb_channels(colour))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb_channels(colour: str) -> tuple[int, ...]:
    """Return the red, green and blue of a colour, from 0 to 255."""
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
