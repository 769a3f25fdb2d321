"""The dispatcher: dispatch modes, the names of all operators, and hooks of eager updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
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


def hook_eager_updates(hook: Callable[..., None]) -> Callable[[], None]:
    """Call a hook before each update that is not compiled, and return the function to remove it.

    Dynamo traces the hooks of a compiled `optimizer.step`, and the X-ray's would fail in it.
    """

    def call_hook(*arguments: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            hook(*arguments)

    remove: Callable[[], None] = register_optimizer_step_pre_hook(call_hook).remove
    return remove
