"""ZeroRedundancyOptimizer (torch/distributed/optim): owners of parameters, and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ptrain.internals.part import PrivatePart

PARTS = (
    PrivatePart(
        owner=ZeroRedundancyOptimizer,
        members=("_build_param_buckets", "_param_to_rank", "_partition_parameters"),
    ),
    PrivatePart(
        owner=ZeroRedundancyOptimizer.__init__,
        arguments=("parameters_as_bucket_view", "process_group"),
    ),
)


def owner_ranks(optimizer: ZeroRedundancyOptimizer) -> Mapping[torch.Tensor, int]:
    """Return the rank that updates each parameter."""
    ranks: Mapping[torch.Tensor, int] = optimizer._param_to_rank
    return ranks


def buckets(optimizer: ZeroRedundancyOptimizer) -> Iterator[torch.Tensor]:
    """Yield the buckets whose views the parameters are, one per owner and device."""
    for of_device in optimizer._buckets:
        yield from of_device
