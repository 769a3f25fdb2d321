"""A sub-block whose code counts features or heads by attributes of its own, or by the width of what
it is given: it sees the rank's numbers, and its column layers the whole input all the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ptrain.models.arguments import with_first


class OwnCounts:
    """While a module runs, its first floating tensor is as wide as the rank's part of it, for code
    that reads its shape; `columns`, which take it, get all of it."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._narrow: torch.Tensor | None = None
        self._whole: torch.Tensor | None = None

    def around(
        self, module: nn.Module, attributes: Iterable[str], columns: list[nn.Module]
    ) -> None:
        """Called once the styles of the columns are applied, before which they are to look."""
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // self.degree)
        if columns:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        for column in columns:
            column.register_forward_pre_hook(self._give, prepend=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first(args, kwargs, self._narrowed)

    def _narrowed(self, whole: torch.Tensor) -> torch.Tensor:
        self._whole = whole
        self._narrow = whole.narrow(-1, 0, whole.shape[-1] // self.degree)
        return self._narrow

    def _give(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        assert args and args[0] is self._narrow, "a column takes what its sub-block is given"
        return (self._whole, *args[1:])

    def _leave(self, *_: object) -> None:
        self._narrow = self._whole = None
