"""The function with which a module moves its tensors (torch/nn/modules/module.py)."""

from __future__ import annotations

from torch import nn

from ptrain.internals.part import PrivatePart

MOVES = nn.Module, "_apply"

PARTS = (
    PrivatePart(owner=nn.Module, members=("_apply",)),
    PrivatePart(owner=nn.Module._apply, arguments=("fn", "recurse")),
)
