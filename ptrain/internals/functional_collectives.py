"""Functional collectives (torch/distributed/_functional_collectives.py): their results, which are
wrapped until they are awaited."""

from __future__ import annotations

from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ptrain.internals.part import PrivatePart

__all__ = ["AsyncCollectiveTensor"]

RESULTS = _functional_collectives, "_wrap_tensor_autograd"

PARTS = (
    PrivatePart(
        owner=_functional_collectives, members=("AsyncCollectiveTensor", "_wrap_tensor_autograd")
    ),
)
