"""The pool of ranks: results, failures, hangs, and cleanup."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ARE_STOPPED, RankError, Ranks


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value.item()


def _own_pid() -> int:
    return os.getpid()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def _hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def _die_within_torch(folder: Path, times: int) -> int:
    """Die within torch on rank 1, `times` times."""
    rank = dist.get_rank()
    deaths = len(list(folder.iterdir()))
    if rank == 1 and deaths < times:
        (folder / str(deaths)).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _make_a_mesh() -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh["b"].get_group())
    return len(dist.distributed_c10d._world.pg_map)


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("size", [2, 4])
def test_a_function_runs_on_every_rank_of_one_group(ranks: Ranks, size: int) -> None:
    expected = float(sum(range(size)) + 10 * size)
    assert ranks.run(size, _sum_of_ranks, 10) == [expected] * size


def test_one_rank_has_no_group(ranks: Ranks) -> None:
    assert ranks.run(1, dist.is_initialized) == [False]


def test_the_ranks_stay_up_between_calls() -> None:
    ranks = Ranks()  # one that has answered no calls yet
    try:
        assert ranks.run(2, _own_pid) == ranks.run(2, _own_pid)
    finally:
        ranks.close()


def test_an_exception_is_returned_with_its_rank_and_traceback(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="the cause") as caught:
        ranks.run(2, _raise_on_rank_one)
    assert "_raise_on_rank_one" in caught.value.causes[1]
    assert ranks.run(2, _sum_of_ranks, 0) == [1.0, 1.0]  # a new pool serves


def test_a_hung_call_is_killed_and_names_the_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0: no answer within 1 s"):
        ranks.run(2, _hang_on_rank_zero, timeout=1)
    assert ranks.run(2, _sum_of_ranks, 0) == [1.0, 1.0]


def test_a_dead_rank_is_named_with_its_exit_code(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code -9"):
        ranks.run(2, _die_on_rank_one)


def test_ranks_restart_once_if_one_died_within_torch(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="runs once more, on new ranks"):
        assert ranks.run(2, _die_within_torch, tmp_path, 1) == [0, 1]
    with pytest.warns(UserWarning), pytest.raises(RankError, match="died with exit code -11"):
        ranks.run(2, _die_within_torch, tmp_path, 9)


def test_groups_of_a_call_are_destroyed_before_the_next(ranks: Ranks) -> None:
    assert min(ranks.run(4, _make_a_mesh)) > 1
    assert ranks.run(4, _groups) == [1] * 4


def test_closing_leaves_no_process() -> None:
    own = Ranks()
    own.run(2, _own_pid)
    processes = own.processes(2)
    own.close()
    assert len(processes) == 2
    assert not any(process.is_alive() for process in processes)


@pytest.mark.skipif(not ARE_STOPPED, reason="ranks are stopped on Linux alone")
def test_ranks_are_stopped_between_calls(ranks: Ranks) -> None:
    pids = ranks.run(4, _own_pid)
    deadline = time.monotonic() + 10  # a signal takes effect a moment after it was sent
    while (states := {_state(pid) for pid in pids}) != {"T"}:
        assert time.monotonic() < deadline, states
    assert ranks.run(4, _own_pid) == pids


def _state(pid: int) -> str:
    """Return the process state letter, which follows the last bracket of the process name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
