"""autograd (torch/csrc/autograd): whether a backward pass runs, what happens at its end, the hooks
on what is saved, and the numbers of a graph's nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

from ptrain.internals.part import PrivatePart

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # of a saved tensor: pack, unpack

PARTS = (
    PrivatePart(owner=torch._C, members=("_current_graph_task_id",)),
    PrivatePart(owner=torch._C._autograd, members=("_top_saved_tensors_default_hooks",)),
    PrivatePart(owner=torch._C._autograd, members=("_get_sequence_nr",)),
    PrivatePart(owner=Node, members=("_sequence_nr",)),
    PrivatePart(owner=Variable._execution_engine, members=("queue_callback",)),
)


def is_in_backward() -> bool:
    """Return whether this thread is within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that runs is over. Raises RuntimeError in none."""
    Variable._execution_engine.queue_callback(function)


def saving_hooks() -> Hooks | None:
    """Return the innermost hooks on saved tensors; None where there are none."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def next_number() -> int:
    """Return the number of the next node that this thread's forward passes make: they count up."""
    return int(torch._C._autograd._get_sequence_nr())


def number_of(node: Node) -> int:
    """Return the number of a node that a forward pass made."""
    return int(node._sequence_nr())
