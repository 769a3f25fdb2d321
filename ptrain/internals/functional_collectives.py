"""Functional collectives (torch/distributed/_functional_collectives.py): their results, which are
wrapped until they are awaited."""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)

from ptrain.internals.part import PrivatePart

__all__ = ["AsyncCollectiveTensor", "all_to_all_single_autograd", "awaited"]

RESULTS = _functional_collectives, "_wrap_tensor_autograd"

PARTS = (
    PrivatePart(
        owner=_functional_collectives,
        members=("AsyncCollectiveTensor", "_wrap_tensor_autograd", "all_to_all_single_autograd"),
    ),
)


def awaited(result: torch.Tensor) -> torch.Tensor:
    """Return a result that is there."""
    tensor: torch.Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return tensor
