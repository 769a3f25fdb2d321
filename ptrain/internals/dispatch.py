"""The dispatcher: modes that see operators, and the list of all operators."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from ptrain.internals.part import PrivatePart

PARTS = (
    PrivatePart(owner=_python_dispatch, members=("TorchDispatchMode", "_disable_current_modes")),
    PrivatePart(owner=torch._C, members=("_dispatch_get_all_op_names",)),
)

without_modes = _disable_current_modes  # within it no mode sees operators


def operator_names() -> list[str]:
    """Return the full names of all operators, `aten::add.Tensor`, in order."""
    return sorted(torch._C._dispatch_get_all_op_names())
