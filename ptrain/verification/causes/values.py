"""Identify what a departing tensor holds of one device's tensor, by its values; of a table with one
row per position, which positions the tokens were given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ptrain.axes.context.attention import Span
from ptrain.axes.context.draw import spans_text
from ptrain.verification.causes.rerun import EXACT, Investigation
from ptrain.verification.parts import (
    TensorBox,
    factor_text,
    multiple,
    products,
    relative,
    rounded,
    rounded_to,
)


def positions_text(rows: Tensor, table: Tensor, own: Sequence[Span]) -> str:
    """Return which positions' rows of `table` [S, ...] these are, in words, beside those that they
    should be; "" where some are no position's, or all are right."""
    table, rows = table.double().flatten(1), rows.double().flatten(1)
    distances = torch.cdist(rows, table)
    least, positions = distances.min(1)
    size = float(torch.linalg.vector_norm(table)) / len(table) ** 0.5
    spans = tuple(runs(positions.tolist()))
    if float(least.max()) > EXACT * size or spans == tuple(own):
        return ""
    return f"positions {spans_text(spans)} for {spans_text(own)}"


def runs(positions: Sequence[int]) -> Iterator[Span]:
    """Yield the spans that these are, one after the other."""
    first = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            yield positions[first], positions[place - 1] + 1
            first = place


ALIKE = EXACT * 1e-4  # relative: what is closer than this is the same
_MOST = 8  # slices that are tried one by one
OF_VALUES = (
    "another rank's part, slices in another order, a rounding, a multiple, its elements in other "
    "places"
)


class Explanation(NamedTuple):
    """What one rank says of its part: the factor, what to do, what came of undoing it ("" where
    that was not tried), the axis where it is one's whichever ranks depart, and of which ranks the
    factor is."""

    factor: str
    sentence: str
    tried: str = ""
    axis: str = ""
    whose: str = ""


@dataclass(frozen=True, slots=True)
class Sides:
    """What this rank has, the reference's whole tensor, and which part of it this should be."""

    own: Tensor
    whole: Tensor
    part: TensorBox

    @property
    def expected(self) -> Tensor:
        return self.part.of(self.whole)

    @property
    def wrong(self) -> Tensor:
        """Which elements are: a rank's rows may be made of several ranks' shards."""
        expected = self.expected.double()
        return (self.own.double() - expected).abs() > ALIKE * expected.abs()


def of_values(
    scene: Investigation, what: str, sides: Sides, places: Mapping[int, TensorBox]
) -> Explanation | None:
    """Return what it is, in words about `what`; `places` are other ranks' parts. None where nothing
    is known of it."""
    own, expected = sides.own, sides.expected
    for rank, part in places.items():
        there = part.of(sides.whole)
        if part != sides.part and there.shape == own.shape and relative(own, there) <= EXACT:
            sentence = f"{what} is the part of rank {rank}: places or groups of ranks are wrong"
            tried = "one device's there is what the rank has"
            axis = scene.ranks.axis_of([scene.rank, rank])
            return Explanation(f"part of rank {rank}", sentence, tried, axis)
    for axis in scene.axes:
        if (order := order_of_slices(own, expected, scene.spec.degree(axis))) is not None:
            sentence = (
                f"{what} is put together of the right slices of {axis} in the order "
                f"{', '.join(map(str, order))}: gather them by rank"
            )
            tried = "put in order, they are one device's"
            return Explanation("slices in another order", sentence, tried, str(axis))
    if dtype := rounded_to(own, expected):
        sentence = f"{what} has the rounding of {dtype}: keep, and compute, it in the spec's dtype"
        its = rounded(expected, getattr(torch, dtype))
        is_it = torch.equal(its, own.to(expected.dtype))
        tried = f"one device's rounded to {dtype} is what is there" if is_it else ""
        return Explanation(f"rounded to {dtype}", sentence, tried)
    fit = multiple(own, expected)
    if fit.holds(EXACT) and abs(fit.factor - 1.0) > EXACT:
        text = factor_text(fit.factor, scene.degrees)
        axes = (n for its in products(fit.factor, scene.degrees) for n in its.axes if n != "K")
        sentence = f"{what} is {text} of one device's: scale, average or sum it over ranks once"
        tried = f"divided by {fit.factor:.4g} it is one device's"
        return Explanation(text, sentence, tried, next(axes, ""))
    one_sorted, other = (tensor.double().reshape(-1).sort().values for tensor in (own, expected))
    if relative(one_sorted, other) <= EXACT:
        sentence = f"{what} has its elements in other places: load, and gather, shards by rank"
        return Explanation("elements in another order", sentence)
    return None


def order_of_slices(
    actual: Tensor, expected: Tensor, count: int, dims: Iterable[int] | None = None
) -> tuple[int, ...] | None:
    """Return where each of `count` slices along some dimension belongs (of `dims`, or of all), if
    that is not where it is; None where `actual` is not `expected` cut and put together again. The
    innermost dimensions are last."""
    if actual.shape != expected.shape or not 1 < count <= _MOST:
        return None
    for dim in range(actual.dim()) if dims is None else dims:
        if actual.shape[dim] % count or actual.shape[dim] < count:
            continue
        slices, wanted = actual.chunk(count, dim), expected.chunk(count, dim)
        order = [place for piece in slices if (place := _belongs(piece, wanted)) is not None]
        if sorted(order) == list(range(count)) != order:
            return tuple(order)
    return None


def _belongs(part: Tensor, wanted: tuple[Tensor, ...]) -> int | None:
    """Return the place of the slice that it is; None of what is none."""
    same = (place for place, candidate in enumerate(wanted) if relative(part, candidate) <= EXACT)
    return next(same, None)
