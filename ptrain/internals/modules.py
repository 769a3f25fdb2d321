"""Functions of torch.nn: the one with which a module moves its tensors, and the one that all
truncated normal initializations call (torch/nn/modules/module.py, torch/nn/init.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.nn import init

from ptrain.internals.part import PrivatePart, replace_attributes

MOVES = nn.Module, "_apply"
_NAME = "_no_grad_trunc_normal_"
PARTS = (
    PrivatePart(owner=nn.Module, members=("_apply",)),
    PrivatePart(owner=nn.Module._apply, arguments=("fn", "recurse")),
    PrivatePart(owner=init, members=(_NAME,)),
)


def replace_truncated_normal(stand_in: Callable[..., Any]) -> AbstractContextManager[None]:
    """Temporarily replace the truncated normal initialization by `stand_in`.

    It receives the original function and its arguments.

    Code that imported `torch.nn.init.trunc_normal_` earlier, as transformers does, calls it too.
    """
    # The private function and not `trunc_normal_`: a module that imported the public name keeps it,
    # but looks this one up at each call.
    return replace_attributes(init, **{_NAME: partial(stand_in, getattr(init, _NAME))})
