"""Windows: which elements of a tensor somebody keeps, an offset and a size along each dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

Window = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Window:
    """Return the window of all elements."""
    return tuple((0, size) for size in shape)


def narrowed(tensor: Tensor, window: Window) -> Tensor:
    """Return a window of a tensor, as a view."""
    for dim, (offset, size) in enumerate(window):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def rows(window: Window, start: int, count: int) -> Window:
    """Return a window's own window of so many rows, from its `start`th on; one of a tensor without
    dimensions has none."""
    return ((window[0][0] + start, count), *window[1:]) if window else window


def stretches(
    window: Window, place: Tensor, shape: Sequence[int], most: int
) -> Iterator[tuple[Window, Tensor]]:
    """Yield the parts of a window of a tensor of this shape, each with its part of `place`, which
    is to have the window. None reaches over more than `most` elements of the tensor, unless one of
    its last rows does."""
    row = math.prod(shape[1:])
    if row > most and len(shape) > 2:
        for index in range(len(place)):
            for inner, target in stretches(window[1:], place[index], shape[1:], most):
                yield (rows(window, index, 1)[0], *inner), target.unsqueeze(0)
        return
    step = max(1, most // max(1, row))
    for start in range(0, len(place), step):
        target = place[start : start + step]
        yield rows(window, start, len(target)), target


def overlaps(tensor: Tensor) -> bool:
    """Return whether the rows of a matrix, or of several, each begin one element behind the one
    before."""
    return tensor.dim() > 1 and tensor.stride()[-2:] == (1, 1) and min(tensor.shape[-2:]) > 1
