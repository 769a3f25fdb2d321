"""Colours of the kinds of action that the colour-blind tell apart, and their shades by stage.

Okabe and Ito's sky blue, yellow and vermillion (2008, https://jfly.uni-koeln.de/color/), the yellow
darker, so that its shades are seen on white; and grey, farther from the three than their other
colours are once white is mixed in.
"""

from __future__ import annotations

from functools import cache

from ptrain.charts.sheet import BLACK, WHITE
from ptrain.timeline import Kind

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
