"""Functional collectives (torch/distributed/_functional_collectives.py), awaited at once except for
`all_to_all`."""

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
    "all_gather_tensor",
    "all_reduce_max",
    "all_reduce_sum",
    "all_to_all",
    "all_to_all_single_autograd",
    "exchange_parts",
    "reduce_scatter_sum",
    "wait_for",
]

RESULTS = _functional_collectives, "_wrap_tensor_autograd"

PARTS = (
    PrivatePart(
        owner=_functional_collectives,
        members=("AsyncCollectiveTensor", "_wrap_tensor_autograd", "all_to_all_single_autograd"),
    ),
)

# The operators and not torch's Python functions: these wrap results in AsyncCollectiveTensor, which
# dispatch modes and autograd functions would see.
_OPERATORS = torch.ops._c10d_functional


def all_gather_tensor(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the shards [n, ...] of all ranks along the first dimension."""
    return wait_for(_OPERATORS.all_gather_into_tensor(shard, group.size(), group.group_name))


def all_reduce_sum(addend: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce the ranks' addends by summation."""
    return wait_for(_OPERATORS.all_reduce(addend, "sum", group.group_name))


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce the ranks' tensors by the elementwise maximum."""
    return wait_for(_OPERATORS.all_reduce(tensor, "max", group.group_name))


def reduce_scatter_sum(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter `parts` [ranks, ...] by summation, and return this rank's part [1, ...]."""
    operator = _OPERATORS.reduce_scatter_tensor
    return wait_for(operator(parts, "sum", group.size(), group.group_name))


def exchange_parts(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange one part per rank (all-to-all).

    Args:
        parts: One part for each rank, [ranks, ...].
        group: The ranks.

    Returns:
        The parts that all ranks have for this one, in the order of ranks.
    """
    # One row of the first dimension for each rank.
    singles = [1] * group.size()
    return wait_for(_OPERATORS.all_to_all_single(parts, singles, singles, group.group_name))


def all_to_all(
    rows: torch.Tensor, arrived: Sequence[int], left: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Start an all-to-all of rows.

    Args:
        rows: The rows to send, in the order of ranks.
        arrived: The number of rows that arrive from each rank.
        left: The number of rows that leave for each rank.
        group: The ranks.

    Returns:
        The rows that arrive. Pass them to `wait_for` before reading them.
    """
    operator, name = _OPERATORS.all_to_all_single, group.group_name
    # The operator's schema takes the output's split sizes before the input's.
    tensor: torch.Tensor = operator(rows, [*arrived], [*left], name)
    return tensor


def wait_for(result: torch.Tensor) -> torch.Tensor:
    """Wait for a collective, and return its result."""
    tensor: torch.Tensor = _OPERATORS.wait_tensor(result)
    return tensor
