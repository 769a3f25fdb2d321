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
    """Within it the names are gathered of the modules of `model` that run and are given numbers
    without a gradient; none, where everything is trained."""
    stops: set[str] = set()
    handles = []
    if not all(parameter.requires_grad for parameter in model.parameters()):
        for name, module in model.named_modules():
            hook = partial(_look, stops, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield stops
    finally:
        for handle in handles:
            handle.remove()


def _look(stops: set[str], name: str, _: nn.Module, given: Any, by_name: Any) -> None:
    tensors = [leaf for leaf in tree_leaves((given, by_name)) if isinstance(leaf, Tensor)]
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    if numbers and not any(tensor.requires_grad for tensor in numbers):
        stops.add(name)
