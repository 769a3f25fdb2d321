"""What a module is given, as hooks on it see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], Any]
) -> Any:
    """The arguments with the first floating tensor changed; None where there is none."""
    for index, value in enumerate(args):
        if is_real(value):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_real(value):
            return args, kwargs | {name: change(value)}
    return None


def first_real(value: Any) -> torch.Tensor | None:
    """Return the first tensor of reals among the leaves of a value."""
    return next((leaf for leaf in tree_iter(value) if is_real(leaf)), None)


def is_real(value: object) -> bool:
    """Return whether it is a tensor of reals."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
