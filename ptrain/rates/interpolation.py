"""Seconds between measurements: along one size, and between shapes.

Both are exact where something was measured, and straight in logarithms between: time is a power of
size, of another exponent where memory bounds it than where a dispatch does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

Shape = tuple[int, ...]

# Of weights over distance: above the number of coordinates, or the many that are far decide.
_SHARPNESS = 6


class Curve:
    """Seconds by bytes. Below the smallest size the dispatch is all there is, and it takes as long
    as that; above the largest, each byte takes as long as its bytes do."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds, "a curve has points"
        self.sizes = sorted(seconds)
        self.seconds = [seconds[size] for size in self.sizes]

    def at(self, size: int) -> float:
        """Seconds of `size` bytes."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        end = bisect_left(self.sizes, size)
        (low, high), (fast, slow) = self.sizes[end - 1 : end + 1], self.seconds[end - 1 : end + 1]
        part = math.log(size / low) / math.log(high / low)
        return float(fast * (slow / fast) ** part)

    @property
    def bandwidth(self) -> float:
        """The most bytes per second of all sizes."""
        points = zip(self.sizes, self.seconds, strict=True)
        return max(size / taken for size, taken in points)


class Line:
    """Seconds by a quantity, in straight lines from (0, 0) through what was measured; beyond the
    largest quantity they stay what they are there."""

    def __init__(self, seconds: Mapping[float, float]) -> None:
        self.points = [(0.0, 0.0), *sorted(seconds.items())]

    def at(self, quantity: float) -> float:
        """Seconds of `quantity`."""
        end = bisect_left(self.points, (quantity,))
        if end == len(self.points):
            return self.points[-1][1]
        if end == 0:
            return 0.0
        (low, fast), (high, slow) = self.points[end - 1 : end + 1]
        return fast + (slow - fast) * (quantity - low) / (high - low)


class Surface:
    """Seconds by shape: what is `expected` of a shape, times how much longer those that were
    measured took than that, each of them weighted by how near it is in the logarithms of its
    `coordinates`. Of the shapes that are of one `kind` with it, where there are any."""

    def __init__(
        self,
        seconds: Mapping[Shape, float],
        *,
        expected: Callable[[Shape], float],
        coordinates: Callable[[Shape], Sequence[int]] = tuple,
        kind: Callable[[Shape], object] = lambda _: None,
    ) -> None:
        assert seconds, "a surface has points"
        self.known = dict(seconds)  # measured, and what was asked before
        self.expected, self.coordinates, self.kind = expected, coordinates, kind
        self.kinds: dict[object, list[tuple[tuple[float, ...], float]]] = {}
        for shape, taken in seconds.items():
            point = self._point(shape), math.log(taken / expected(shape))
            self.kinds.setdefault(kind(shape), []).append(point)

    def at(self, shape: Shape) -> float:
        """Seconds of a shape."""
        if shape not in self.known:
            self.known[shape] = self._between(shape)
        return self.known[shape]

    def _between(self, shape: Shape) -> float:
        points = self.kinds.get(self.kind(shape)) or list(chain(*self.kinds.values()))
        here = self._point(shape)
        total = excess = 0.0
        for there, more in points:
            distance = math.dist(here, there)
            if not distance:
                return self.expected(shape) * math.exp(more)
            weight = distance**-_SHARPNESS
            total += weight
            excess += weight * more
        return self.expected(shape) * math.exp(excess / total)

    def _point(self, shape: Shape) -> tuple[float, ...]:
        return tuple(math.log(size) for size in self.coordinates(shape))
