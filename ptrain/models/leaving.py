"""When a backward pass has left a module: the gradients of its inputs are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class _LeaveBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of a unit's inputs are complete. FSDP2
    places its own hook in the same way."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.notify()
        return (None, *gradients)


def when_left(inputs: Any, notify: Callable[[], None]) -> Any:
    """Return a module's inputs, nested as they are. When a backward pass has the gradients of all
    that have one, it calls `notify`; where none has, nobody does."""
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if has_gradient(x) else None, inputs)
    if not tensors:
        return inputs
    marked = iter(_LeaveBackward.apply(notify, *tensors))
    return tree_map(lambda x: next(marked) if has_gradient(x) else x, inputs)


def has_gradient(x: Any) -> bool:
    """Return whether it is a tensor that autograd makes a gradient of."""
    return isinstance(x, Tensor) and x.requires_grad
