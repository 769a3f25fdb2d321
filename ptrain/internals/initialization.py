"""torch.nn.init: the function that all draws of a truncated normal distribution end in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.nn import init

from ptrain.internals.part import PrivatePart, replaced

_NAME = "_no_grad_trunc_normal_"
PARTS = (PrivatePart(owner=init, members=(_NAME,)),)


def truncated_normal_as(stand_in: Callable[..., Any]) -> AbstractContextManager[None]:
    """Temporarily call `stand_in` in its place, with torch's own function and its arguments. Code
    that holds `torch.nn.init.trunc_normal_` from before, as transformers does, ends in it too."""
    return replaced(init, **{_NAME: partial(stand_in, getattr(init, _NAME))})
