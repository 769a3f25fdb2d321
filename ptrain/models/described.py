"""What code that is not ptrain's gave, in words for its author."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def kind_of(value: Any) -> str:
    """`a tuple of (float32 [2, 16, 260], NoneType)`: types and shapes, no values."""
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        case dict():
            inner = ", ".join(f"{key}: {kind_of(item)}" for key, item in list(value.items())[:4])
        case tuple() | list():
            inner = ", ".join(map(kind_of, value[:4]))
        case _:
            return type(value).__name__
    more = ", …" if len(value) > 4 else ""
    return f"{type(value).__name__} ({inner}{more})"
