"""Autograd (torch/csrc/autograd): backward passes, their end, saved-tensor hooks, node numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

from ptrain.internals.part import PrivatePart

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # pack and unpack of a saved tensor

PARTS = (
    PrivatePart(owner=torch._C, members=("_current_graph_task_id",)),
    PrivatePart(owner=torch._C._autograd, members=("_top_saved_tensors_default_hooks",)),
    PrivatePart(owner=torch._C._autograd, members=("_get_sequence_nr",)),
    PrivatePart(owner=Node, members=("_sequence_nr",)),  # `_raw_saved_*` exist per class of node
    PrivatePart(owner=Variable._execution_engine, members=("queue_callback",)),
)


def is_in_backward() -> bool:
    """Return True if this thread runs a backward pass."""
    # -1: no graph task runs in this thread
    return bool(torch._C._current_graph_task_id() != -1)


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the running backward pass.

    Raises:
        RuntimeError: No backward pass is running.
    """
    Variable._execution_engine.queue_callback(function)


def innermost_saved_tensor_hooks() -> Hooks | None:
    """Return the innermost pack and unpack hooks on saved tensors, None if there are none."""
    # The argument is `ignore_is_tracing` (torch/_C/_autograd.pyi, 2.13). False: torch returns no
    # hooks while it traces.
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def next_sequence_number() -> int:
    """Return the sequence number that the next node of this thread's forward passes gets.

    Numbers increase by one per node.
    """
    return int(torch._C._autograd._get_sequence_nr())


def sequence_number(node: Node) -> int:
    """Return the sequence number of a node that a forward pass created."""
    return int(node._sequence_nr())


def running_node(root: Node) -> Node | None:
    """Return the node at which a backward pass has failed, None if it cannot be found.

    Autograd frees the saved tensors of each node after it has run, and runs ready nodes in
    descending order of their numbers.

    Args:
        root: The node from which the backward pass began.
    """
    waiting, seen, unfinished = [root], {root}, list[Node]()
    while waiting:
        node = waiting.pop()
        if False in _freed_tensors(node):
            unfinished.append(node)
            continue
        later = [after for after, _ in node.next_functions if after is not None]
        waiting += [after for after in later if after not in seen]
        seen.update(later)
    return max(unfinished, key=sequence_number, default=None)


def _freed_tensors(node: Node) -> Iterator[bool]:
    """Yield for each saved tensor of a node whether it is freed; nothing for absent ones."""
    for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
        try:
            saved = getattr(node, name)
            for tensor in saved if isinstance(saved, tuple) else (saved,):
                # Not the value: unpacking it may recompute a block or load it from the host.
                tensor.register_hooks(lambda value: value, lambda value: value)
        except RuntimeError as error:
            if "value None" not in str(error):
                yield "freed" in str(error)  # else hooks are set already
            continue
        yield False
