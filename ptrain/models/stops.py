"""Where a backward pass stops: modules whose inputs have no gradient, for nothing that is trained
comes before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@contextmanager
def stops_of(model: nn.Module) -> Iterator[set[str]]:
    """Within it the names are gathered of the modules of `model` that are given numbers without a
    gradient whenever they run; none, where everything is trained."""
    stops: set[str] = set()
    goes_on: set[str] = set()
    handles = []
    if not all(parameter.requires_grad for parameter in model.parameters()):
        for name, module in model.named_modules():
            hook = partial(_look, stops, goes_on, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield stops
    finally:
        for handle in handles:
            handle.remove()


def _look(
    stops: set[str], goes_on: set[str], name: str, _: nn.Module, args: Any, kwargs: Any
) -> None:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    if any(tensor.requires_grad for tensor in numbers):
        goes_on.add(name)
    elif tensors:
        stops.add(name)
    stops -= goes_on
