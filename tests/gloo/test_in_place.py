"""In-place collectives for large tensors on gloo give the bits of gloo's gather and reduce-scatter,
and the meters count one call each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ptrain.cost import Collective, State, Traffic
from ptrain.meters.traffic import TrafficMeter
from ptrain.runtime import comm
from ptrain.runtime.comm import (
    IN_PLACE_BYTES,
    TaggedAllGather,
    TagRegistry,
    all_gather,
    reduce_scatter,
)
from ptrain.spec.dials import ReduceScatterVia
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

GATHERED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AXES = ("dp_shard",)


def _random_tensor(dtype: torch.dtype, ranks: int, size: int) -> torch.Tensor:
    """Return a tensor of about `size` bytes that `ranks` divide, different on every rank."""
    torch.manual_seed(dist.get_rank())
    numel = size // dtype.itemsize // ranks * ranks
    return (100 * torch.randn(numel)).to(dtype)


def _gathers_match(dtype: torch.dtype, size: int) -> list[bool]:
    """Return True if gathers of a separate shard, of a shard within the output, and of one that is
    awaited later equal gloo's gather."""
    group, registry = dist.group.WORLD, TagRegistry()
    assert group is not None
    whole = _random_tensor(dtype, group.size(), size)
    shard = whole.chunk(group.size())[group.rank()]
    wanted = torch.empty_like(whole)
    comm._all_gather(wanted, shard, group=group)
    beside, later, inside = (torch.empty_like(whole) for _ in range(3))
    assert all_gather(beside, shard, group, registry) is None
    TaggedAllGather(registry, "blocks.0")(inside, _gather_in_place(inside, shard), group)
    work = all_gather(later, shard, group, registry, is_awaited=False)
    assert isinstance(work, dist.Work)
    work.wait()
    return [torch.equal(wanted, made) for made in (beside, inside, later)]


def _gather_in_place(whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    own = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return own.copy_(shard)


@pytest.mark.parametrize("size", [IN_PLACE_BYTES // 2, 3 * IN_PLACE_BYTES])
@pytest.mark.parametrize("count", [2, 4])
def test_a_gather_places_every_shard(ranks: Ranks, count: int, size: int) -> None:
    for dtype in GATHERED:
        assert ranks.run(count, _gathers_match, dtype, size) == [[True] * 3] * count, dtype


def _sums_match(dtype: torch.dtype, size: int) -> list[bool]:
    group, registry = dist.group.WORLD, TagRegistry()
    assert group is not None
    whole = _random_tensor(dtype, group.size(), size)
    wanted, now, later = (whole.new_empty(whole.numel() // group.size()) for _ in range(3))
    comm._reduce_scatter(wanted, whole.clone(), group=group)
    native = ReduceScatterVia.NATIVE
    reduce_scatter(now, whole.clone(), group, native, registry).wait()
    reduce_scatter(later, whole.clone(), group, native, registry, is_awaited=False).wait()
    return [torch.equal(wanted, made) for made in (now, later)]


@pytest.mark.parametrize("size", [IN_PLACE_BYTES // 2, 3 * IN_PLACE_BYTES])
@pytest.mark.parametrize("count", [2, 4])
def test_a_sum_equals_gloos_reduce_scatter_to_the_bit(ranks: Ranks, count: int, size: int) -> None:
    for dtype in SUMMED:
        assert ranks.run(count, _sums_match, dtype, size) == [[True] * 2] * count, dtype


def _metered_calls(size: int) -> tuple[Traffic, ...]:
    """Return the meter's counts of a gather and a reduce-scatter, then of an all-reduce and a
    broadcast."""
    group, registry = dist.group.WORLD, TagRegistry()
    assert group is not None
    whole = registry.tag(torch.ones(size, dtype=torch.uint8), State.PARAMETERS)
    gradients = registry.tag(torch.ones(size, dtype=torch.uint8), State.GRADIENTS)
    shard = torch.ones(size // group.size(), dtype=torch.uint8)
    with TrafficMeter(registry, {group.group_name: AXES}) as meter:
        all_gather(whole, shard, group, registry)
        reduce_scatter(shard, gradients, group, ReduceScatterVia.NATIVE, registry).wait()
        dist.all_reduce(gradients)
        dist.broadcast(whole, src=0)
    return meter.calls()


@pytest.mark.parametrize("size", [IN_PLACE_BYTES // 2, 3 * IN_PLACE_BYTES])
@pytest.mark.parametrize("count", [2, 4])
def test_the_meter_counts_the_requested_collective(ranks: Ranks, count: int, size: int) -> None:
    part = size * (count - 1) // count
    for calls in ranks.run(count, _metered_calls, size):
        assert [(row.key.collective, row.key.state, row.sent_bytes) for row in calls] == [
            (Collective.ALL_GATHER, State.PARAMETERS, part),
            (Collective.REDUCE_SCATTER, State.GRADIENTS, part),
            (Collective.ALL_REDUCE, State.GRADIENTS, 2 * part),
            (Collective.BROADCAST, State.PARAMETERS, part),
        ]
        assert all((row.calls, row.payload_bytes) == (1, size) for row in calls)
        assert all(row.key.axes == AXES and row.key.via is None for row in calls)
