"""What a picture is made of, with nothing that draws: rectangles and lines of text on a sheet.

Lengths are in points (1/72 inch), from the upper left corner; colours are `#rrggbb`. Text is as
wide as DejaVu Sans at most makes it, so what fits here fits where it is drawn.

Colours of the kinds of action that the colour-blind tell apart, and their shades by stage.

Okabe and Ito's sky blue, yellow and vermillion (2008, https://jfly.uni-koeln.de/color/), the yellow
darker, so that its shades are seen on white; and grey, farther from the three than their other
colours are once white is mixed in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from ptrain.timeline import Kind

BLACK, GREY, LIGHT, WHITE = "#000000", "#555555", "#cccccc", "#ffffff"
# the blank around a picture, and the sizes of its title, its head lines and its small text
EDGE, TITLE, HEAD, SMALL = 14.0, 12.0, 9.0, 8.0
LINE = 1.35  # from one line of text to the next, in sizes of the font

# Advance widths of DejaVu Sans over the size: a digit has 0.636, a line of prose 0.57 a letter at
# most, bold prose 0.7 where few letters are capitals.
_DIGIT, _PROSE, _BOLD = 0.64, 0.58, 0.8
_FEW = 10  # letters; a line of fewer may be all digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    colour: str
    edge: str = WHITE
    edge_width: float = 0  # half of it lies within


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """`x` is where `align` says, `y` the middle of the line."""

    text: str
    x: float
    y: float
    size: float
    colour: str = BLACK
    align: Literal["left", "center", "right"] = "left"
    is_bold: bool = False

    @property
    def width(self) -> float:
        return width_of(self.text, self.size, is_bold=self.is_bold)

    @property
    def left(self) -> float:
        return self.x - self.width * {"left": 0, "center": 0.5, "right": 1}[self.align]


@dataclass(slots=True, kw_only=True)
class Sheet:
    """Grows downwards while it is filled; the later lies over the earlier."""

    title: str
    width: float
    height: float = 0
    rectangles: list[Rectangle] = field(default_factory=list)
    texts: list[Label] = field(default_factory=list)

    def add_below(self, other: Sheet) -> None:
        """Put another sheet at the lower end."""
        below = self.height
        self.rectangles += [replace(r, y=r.y + below) for r in other.rectangles]
        self.texts += [replace(text, y=text.y + below) for text in other.texts]
        self.width, self.height = max(self.width, other.width), below + other.height

    def add_legend(self, x: float, names: Mapping[str, str], size: float) -> None:
        """Add one line at the lower end: a square of each colour with its name."""
        y = self.height + size * LINE / 2
        for colour, name in names.items():
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
        self.height += size * LINE

    def write(self, lines: Iterable[Label]) -> None:
        """Line under line at the lower end, as many as each needs."""
        for line in lines:
            for text in wrapped(line, self.width - line.x):
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


def width_of(text: str, size: float, *, is_bold: bool = False) -> float:
    """Return the width in points, not less than what is drawn of digits and of prose."""
    letter = _BOLD if is_bold else _DIGIT if len(text) < _FEW else _PROSE
    return len(text) * letter * size


def wrapped(text: Label, width: float) -> Iterator[str]:
    """The lines of a text that may be `width` wide."""
    letters = int(width / width_of("x", text.size, is_bold=text.is_bold))
    yield from textwrap.wrap(text.text, max(1, letters))


_OF = {
    Kind.FORWARD: "#56b4e9",
    Kind.BACKWARD: "#e8d020",
    Kind.INPUT: "#d55e00",
    Kind.WEIGHT: "#777777",
}
_LIGHTEST = 0.45  # how much white is in the last stage's


@cache
def shades(kind: Kind, number: int) -> tuple[str, ...]:
    """Return the colours of the rank's stages, from the first to the last, darker to lighter."""
    steps = max(1, number - 1)
    return tuple(_lightened(_OF[kind], _LIGHTEST * place / steps) for place in range(number))


# Okabe and Ito's other colours; of more places the same again, with more white.
_OF_PLACES = "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#b8a000", "#777777"
_FADED = 0.3


@cache
def of_place(place: int) -> str:
    """Return the colour of a rank by its place along an axis; eight that follow each other are
    told apart."""
    turn, number = divmod(place, len(_OF_PLACES))
    return _lightened(_OF_PLACES[number], _FADED * (turn % 3))


@cache
def ink_on(colour: str) -> str:
    """Black or white, whichever contrasts more: 4.5 to 1 at least, as WCAG 2.1 asks of text."""
    light = luminance(colour)
    return BLACK if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else WHITE


def luminance(colour: str) -> float:
    """Return the luminance: 0 for black to 1 for white (WCAG 2.1, relative luminance of sRGB)."""
    red, green, blue = (_linear(value / 255) for value in _parts(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _lightened(colour: str, white: float) -> str:
    mixed = (round(value + (255 - value) * white) for value in _parts(colour))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
