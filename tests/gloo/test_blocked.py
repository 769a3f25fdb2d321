"""The wait meter measures the time a rank waits for others, for every kind of collective; a rank
that sleeps before a collective does not wait itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ptrain.axes.data.run.apply import handing_over
from ptrain.meters.blocked import WaitMeter
from ptrain.runtime.comm import TagRegistry
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SLEEP = 0.4
AXES = ("dp_replicate",)


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(SLEEP)


def reduce_synchronously() -> None:
    sleep_on_rank_1()
    dist.all_reduce(torch.ones(8))


def reduce_asynchronously() -> None:
    sleep_on_rank_1()
    work = dist.all_reduce(torch.ones(8), async_op=True)
    assert work is not None
    work.wait()


def reduce_functionally() -> None:
    sleep_on_rank_1()
    functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD).sum()


def reduce_in_ddp(*, hook: str = "") -> Callable[[], None]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = DistributedDataParallel(nn.Sequential(first, second), bucket_cap_mb=1e-6)
    works: list[dist.Work | None] = []

    def receive(bucket: torch.Tensor) -> None:
        works.append(dist.all_reduce(bucket, async_op=True))

    if hook:
        hooks = {"torch": allreduce_hook, "ours": handing_over(receive, TagRegistry())}
        model.register_comm_hook(None, hooks[hook])

    def late() -> None:
        model.module[0].weight.register_hook(lambda gradient: sleep_on_rank_1())
        model(torch.ones(2, 4)).sum().backward()
        for work in works:
            assert work is not None
            work.wait()

    return late


def reduce_after_finished_work(step: Callable[[], None]) -> Callable[[], None]:
    """All-reduce after other works that are finished and still referenced."""
    held: list[dist.Work | None] = []

    def late() -> None:
        for _ in range(2):
            work = dist.all_reduce(torch.ones(8), async_op=True)
            assert work is not None
            work.wait()
            held.append(work)
        step()

    return late


def _seconds(way: str) -> float:
    step = {
        "blocking": lambda: reduce_synchronously,
        "awaited": lambda: reduce_asynchronously,
        "functional": lambda: reduce_functionally,
        "reducer": reduce_in_ddp,
        "reducer with a hook": lambda: reduce_in_ddp(hook="torch"),
        "buckets handed over": lambda: reduce_in_ddp(hook="ours"),
        "reducer behind others": lambda: reduce_after_finished_work(reduce_in_ddp()),
    }[way]()
    dist.barrier()
    with WaitMeter({dist.group.WORLD.group_name: AXES}, rank=dist.get_rank()) as stopwatch:
        step()
    (row,) = stopwatch.rows()
    assert row.axes == AXES
    return row.seconds


@pytest.mark.parametrize(
    "way",
    [
        "blocking",
        "awaited",
        "functional",
        "reducer",
        "reducer with a hook",
        "buckets handed over",
        "reducer behind others",
    ],
)
def test_who_waits_is_who_came_first(ranks: Ranks, way: str) -> None:
    first, late = ranks.run(2, _seconds, way)
    assert first - late > SLEEP / 4  # on a busy machine the other may be late, too


def _wait_of_overlapped() -> float:
    dist.barrier()
    with WaitMeter({dist.group.WORLD.group_name: AXES}, rank=0) as stopwatch:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(SLEEP)  # as computing would take
        assert work is not None
        work.wait()
    return stopwatch.rows()[0].seconds


def test_overlapped_communication_is_not_counted_as_waiting(ranks: Ranks) -> None:
    assert all(seconds < SLEEP * 0.75 for seconds in ranks.run(2, _wait_of_overlapped))


def _of_another_group() -> int:
    with WaitMeter({}, rank=dist.get_rank()) as stopwatch:
        reduce_synchronously()
    return len(stopwatch.rows())


def test_collectives_outside_the_program_are_excluded(ranks: Ranks) -> None:
    assert ranks.run(2, _of_another_group) == [0, 0]


def _restored_functions() -> bool:
    before = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "broadcast")}
    with WaitMeter({dist.group.WORLD.group_name: AXES}, rank=0):
        assert vars(dist.ProcessGroup)["allreduce"] is not before["allreduce"]
    return all(vars(dist.ProcessGroup)[name] is found for name, found in before.items())


def test_it_leaves_torch_as_it_was(ranks: Ranks) -> None:
    assert all(ranks.run(2, _restored_functions))
