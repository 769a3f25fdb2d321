"""Fake tensors and the fake process group (torch/_subclasses, torch/testing/_internal)."""

from __future__ import annotations

from typing import Any

import torch
from torch import _guards
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed import fake_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptrain.internals.part import PrivatePart

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "unset_fake_temporarily",
]

# Errors of code that reads a value, or a shape that depends on values, from a fake tensor.
READ = (DataDependentOutputException, DynamicOutputShapeException)
COPIES = FakeTensor, "__deepcopy__"
LOGGER = "torch._subclasses.fake_tensor"
_DEVICE_OF = torch.ops.prim.device.default


def is_device_query(function: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operator only returns the device of a fake tensor.

    C++ code, such as autograd, reads a fake tensor's device by this operator. It is two thirds of
    the operators of a training step. In Python the attribute needs no operator.
    """
    return function is _DEVICE_OF and type(args[0]) is FakeTensor


PARTS = (
    PrivatePart(owner=FakeTensorMode.__init__, arguments=("allow_non_fake_inputs",)),
    PrivatePart(
        owner=fake_tensor,
        members=(
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "FakeTensor",
            "FakeTensorMode",
            "unset_fake_temporarily",
        ),
    ),
    PrivatePart(owner=_guards, members=("detect_fake_mode",)),
    PrivatePart(owner=torch.ops.prim, members=("device",)),
    PrivatePart(owner=fake_pg, members=("FakeStore",)),
)
