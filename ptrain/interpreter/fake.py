"""Fake ranks: one process plays rank r of N; its collectives return at once and move nothing."""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptrain.interpreter.world import World


def fake_world(rank: int, size: int) -> World:
    """Rank `rank` of `size` over torch's fake process group. Under FakeTensorMode nothing is
    computed either: shapes, collectives and storages are those of the real run, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return World(rank=rank, size=size, backend="fake", owns_group=True)
