"""DistributedDataParallel and its reducer (torch/csrc/distributed/c10d/reducer.cpp).

The replay of DDP on fake tensors depends on these members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ptrain.internals.part import PrivatePart

# torch's default (torch/nn/parallel/distributed.py, 2.13). DDP uses the default only for
# `bucket_cap_mb=None`, and then makes the first bucket small.
DEFAULT_BUCKET_BYTES = 25 * 2**20

PARTS = (
    PrivatePart(owner=DistributedDataParallel, members=("no_sync", "register_comm_hook")),
    PrivatePart(owner=dist.Reducer, members=("prepare_for_backward",)),
    PrivatePart(
        owner=DistributedDataParallel.__init__,
        arguments=("broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view", "init_sync"),
    ),
    PrivatePart(
        owner=dist,
        members=("_DEFAULT_FIRST_BUCKET_BYTES", "_compute_bucket_assignment_by_size"),
    ),
)


def rebuilt_buckets(arrived: Sequence[torch.Tensor], bucket_bytes: int | None) -> list[list[int]]:
    """Return the buckets that DDP uses from the second step on, as indices of `arrived`.

    Args:
        arrived: The parameters, in the order in which their gradients arrived.
        bucket_bytes: The size of a bucket. None: DDP's default, with its small first bucket.
    """
    # `Reducer::rebuild_buckets` (reducer.cpp, torch 2.13). Without indices, torch sorts the result.
    default = [dist._DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_BYTES]
    limits = default if bucket_bytes is None else [bucket_bytes]
    indices = list(range(len(arrived)))
    buckets, _ = dist._compute_bucket_assignment_by_size(list(arrived), limits, [], indices)
    return [list(bucket) for bucket in buckets]
