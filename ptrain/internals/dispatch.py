"""The dispatcher: dispatch modes, and the names of all operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from ptrain.internals.part import PrivatePart

PARTS = (
    PrivatePart(owner=_python_dispatch, members=("TorchDispatchMode", "_disable_current_modes")),
    PrivatePart(
        owner=torch._C, members=("_dispatch_get_all_op_names", "_len_torch_dispatch_stack")
    ),
)


def disable_modes() -> AbstractContextManager[Any]:
    """Temporarily run operators outside all dispatch modes.

    torch's function imports three modules by name on every call, so it is called only if a mode is
    active.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def operator_names() -> list[str]:
    """Return the full names of all operators, such as `aten::add.Tensor`, sorted."""
    return sorted(torch._C._dispatch_get_all_op_names())
