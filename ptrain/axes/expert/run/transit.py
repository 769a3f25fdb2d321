"""An exchange that is under way while something else is computed, in forward and in backward.

torch's own functional all-to-all awaits its gradient where it is begun, so that in backward nothing
would run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptrain.internals.functional_collectives import all_to_all, awaited


class Transit:
    """Rows of this rank that leave for the others of `group`, so many for each, and so many that
    arrive."""

    def __init__(
        self, left: Sequence[int], arrived: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._left, self._arrived, self._group = left, arrived, group
        self._leaving: Tensor | None = None  # the backend reads it until all is there
        self._coming: Tensor | None = None

    def around(self, x: Tensor, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rows [arrived, ...] for which those of `x` [left, ...] are exchanged, and what
        is computed meanwhile. In backward the gradient of the latter is computed while that of the
        rows is under way: autograd runs first what forward ran last, and this was run between."""
        x = _Departure.apply(x, self)
        result = compute()
        return _Arrival.apply(x, self), result

    def depart(self, x: Tensor) -> Tensor:
        """Begin the exchange, and return what nobody may read until it has arrived."""
        self._leaving = x
        return all_to_all(x, self._arrived, self._left, self._group)

    def arrive(self, x: Tensor) -> Tensor:
        """End it."""
        x, self._leaving = awaited(x), None
        return x

    def depart_back(self, gradient: Tensor) -> None:
        """Begin that of gradients."""
        self._leaving = gradient.contiguous()
        self._coming = all_to_all(self._leaving, self._left, self._arrived, self._group)

    def arrive_back(self) -> Tensor:
        """End it, and return those of the rows that left."""
        assert self._coming is not None, "they have departed"
        gradient, self._leaving, self._coming = awaited(self._coming), None, None
        return gradient


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transit: Transit) -> Tensor:
        ctx.transit = transit
        return transit.depart(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.transit.arrive_back(), None


class _Arrival(torch.autograd.Function):
    """Of gradients it hands on those that leave: autograd wants as many rows as came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transit: Transit) -> Tensor:
        ctx.transit = transit
        return transit.arrive(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.transit.depart_back(gradient)
        return gradient, None
