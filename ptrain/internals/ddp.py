"""DistributedDataParallel and its reducer (torch/csrc/distributed/c10d/reducer.cpp).

Nothing private is called. The replay of DDP on fake tensors depends on these members.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ptrain.internals.part import PrivatePart

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
