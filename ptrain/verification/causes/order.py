"""Slices that are right, in the wrong order."""

from __future__ import annotations

from torch import Tensor

from ptrain.verification.causes.scene import EXACT
from ptrain.verification.parts import relative

_MOST = 8  # slices that are tried one by one


def order_of_slices(found: Tensor, expected: Tensor, count: int) -> tuple[int, ...] | None:
    """Where each of `count` slices along some dimension belongs, if that is not where it is; None
    where `found` is not `expected` cut and put together again. The innermost dimensions last."""
    if found.shape != expected.shape or not 1 < count <= _MOST:
        return None
    for dim in range(found.dim()):
        if found.shape[dim] % count or found.shape[dim] < count:
            continue
        slices, wanted = found.chunk(count, dim), expected.chunk(count, dim)
        order = [place for each in slices if (place := _belongs(each, wanted)) is not None]
        if sorted(order) == list(range(count)) != order:
            return tuple(order)
    return None


def _belongs(part: Tensor, wanted: tuple[Tensor, ...]) -> int | None:
    """The place of the slice that it is; None of what is none."""
    same = (place for place, each in enumerate(wanted) if relative(part, each) <= EXACT)
    return next(same, None)
