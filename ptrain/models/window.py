"""Windows of tensors: an offset and a size along each dimension, which describe a rank's shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

Window = tuple[tuple[int, int], ...]


def full_window(shape: Sequence[int]) -> Window:
    """Return the window of all elements of a shape."""
    return tuple((0, size) for size in shape)


def narrow_to_window(tensor: Tensor, window: Window) -> Tensor:
    """Return the view of a tensor that a window describes.

    Args:
        tensor: A tensor with at least as many dimensions as the window.
        window: Offset and size along each dimension, in elements; dimensions after them stay full.
    """
    for dim, (offset, size) in enumerate(window):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def select_rows(window: Window, start: int, count: int) -> Window:
    """Return the part of a window with `count` rows from row `start`, relative to the window.

    A window without dimensions is returned unchanged.

    Args:
        window: Offset and size along each dimension, in elements.
        start: The first row, counted from the window's offset.
        count: The number of rows in dimension 0.
    """
    return ((window[0][0] + start, count), *window[1:]) if window else window


def split_window(
    window: Window, place: Tensor, shape: Sequence[int], most: int
) -> Iterator[tuple[Window, Tensor]]:
    """Yield parts of a window, each with the matching part of a tensor that receives it.

    Args:
        window: Window of a tensor of this shape.
        place: Tensor of the window's size.
        shape: Shape of the full tensor.
        most: Maximum number of elements of the full tensor that a part spans; a part of one row
            along the last two dimensions may exceed it.
    """
    row = math.prod(shape[1:])
    if row > most and len(shape) > 2:
        for index in range(len(place)):
            for inner, target in split_window(window[1:], place[index], shape[1:], most):
                yield (select_rows(window, index, 1)[0], *inner), target.unsqueeze(0)
        return
    step = max(1, most // max(1, row))
    for start in range(0, len(place), step):
        target = place[start : start + step]
        yield select_rows(window, start, len(target)), target


def has_overlapping_rows(tensor: Tensor) -> bool:
    """Return True if rows of the last two dimensions overlap: each starts one element after the
    last."""
    return tensor.dim() > 1 and tensor.stride()[-2:] == (1, 1) and min(tensor.shape[-2:]) > 1
