"""What autograd's graph of a loss says: which leaves it is computed of, and by which calls of the
model.

A step of the user's own must use parameters within calls of the model alone: there they are
gathered, and there the hooks that reduce their gradients run. Nodes of the graph are numbered in
the order in which the forward pass makes them, so that a call is a span of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import Node

from ptrain.internals.autograd import next_number, number_of


class ModelCalls:
    """The calls of a model that return while it is watched."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._begun: list[int] = []
        self._spans: list[range] = []

    @property
    def count(self) -> int:
        return len(self._spans)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, calls are noted. Nothing that the model gives is changed."""
        handles = (
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._end),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def used_beside(self, loss: Tensor) -> list[str]:
        """Return the names of the parameters of which the loss is computed outside any call."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        beside = {
            names[id(leaf)]
            for leaf, user in uses_of_leaves(loss)
            if id(leaf) in names and not self._is_within(user)
        }
        return [name for name in names.values() if name in beside]

    def _is_within(self, node: Node | None) -> bool:
        return node is not None and any(number_of(node) in span for span in self._spans)

    def _begin(self, _: nn.Module, __: object) -> None:
        self._begun.append(next_number())

    def _end(self, _: nn.Module, __: object, ___: object) -> None:
        self._spans.append(range(self._begun.pop(), next_number()))


def uses_of_leaves(tensor: Tensor) -> Iterator[tuple[Tensor, Node | None]]:
    """Yield the tensors that autograd would give gradients, if it began at `tensor`, with every
    node that uses one; None where the tensor is one itself."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor, None
        return
    seen, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if (variable := getattr(following, "variable", None)) is not None:
                yield variable, node
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
