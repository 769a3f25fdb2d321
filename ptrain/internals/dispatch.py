"""The dispatcher: modes that see operators, and the list of all operators."""

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


def without_modes() -> AbstractContextManager[Any]:
    """Return the context within which no mode sees operators. torch's own imports three modules by
    name each time, for nothing where no mode is entered."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def operator_names() -> list[str]:
    """Return the full names of all operators, `aten::add.Tensor`, in order."""
    return sorted(torch._C._dispatch_get_all_op_names())
