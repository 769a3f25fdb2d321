"""Slices that are right, in the wrong order."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ptrain.verification.causes.scene import EXACT
from ptrain.verification.parts import relative

_MOST = 8  # slices that are tried one by one


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
