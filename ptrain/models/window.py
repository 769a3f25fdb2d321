"""Windows: which elements of a tensor somebody keeps, an offset and a size along each dimension."""

from __future__ import annotations

from collections.abc import Sequence

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
