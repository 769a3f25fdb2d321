"""Modules whose tensors have no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.internals.dispatch import without_modes


@torch.no_grad()
def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have no values."""
    with without_modes():
        tensors: dict[int, Any] = {id(buffer): as_meta(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            tensors[id(parameter)] = nn.Parameter(as_meta(parameter), parameter.requires_grad)
        return copy.deepcopy(module, tensors)


def as_meta(value: object) -> object:
    """Return a tensor of the same shape and dtype without values; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")
