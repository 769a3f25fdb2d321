"""Functional collectives (torch/distributed/_functional_collectives.py): their results, which are
wrapped until they are awaited."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)

from ptrain.internals.part import PrivatePart

__all__ = [
    "AsyncCollectiveTensor",
    "all_gathered",
    "all_largest",
    "all_summed",
    "all_to_all",
    "all_to_all_single_autograd",
    "awaited",
    "exchanged",
    "reduce_scattered",
]

RESULTS = _functional_collectives, "_wrap_tensor_autograd"

PARTS = (
    PrivatePart(
        owner=_functional_collectives,
        members=("AsyncCollectiveTensor", "_wrap_tensor_autograd", "all_to_all_single_autograd"),
    ),
)

_OPERATORS = torch.ops._c10d_functional


def all_gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the shards [n, ...] of all ranks, one after the other along the first dimension."""
    return awaited(_OPERATORS.all_gather_into_tensor(shard, group.size(), group.group_name))


def all_summed(addend: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' addends, on every rank."""
    return awaited(_OPERATORS.all_reduce(addend, "sum", group.group_name))


def all_largest(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the maxima of the ranks' tensors, on every rank."""
    return awaited(_OPERATORS.all_reduce(tensor, "max", group.group_name))


def reduce_scattered(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the ranks' sum of `parts` [ranks, ...], as [1, ...]."""
    operator = _OPERATORS.reduce_scatter_tensor
    return awaited(operator(parts, "sum", group.size(), group.group_name))


def exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what each rank has for this one, of `parts` [ranks, ...] that have one for each."""
    singles = [1] * group.size()
    return awaited(_OPERATORS.all_to_all_single(parts, singles, singles, group.group_name))


def all_to_all(
    rows: torch.Tensor, arrived: Sequence[int], left: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Begin an exchange of `rows`, so many of which leave for each rank, and return those that
    arrive from each; nothing but `awaited` may read them before they are there."""
    operator, name = _OPERATORS.all_to_all_single, group.group_name
    tensor: torch.Tensor = operator(rows, [*arrived], [*left], name)
    return tensor


def awaited(result: torch.Tensor) -> torch.Tensor:
    """Return a result that is there."""
    tensor: torch.Tensor = _OPERATORS.wait_tensor(result)
    return tensor
