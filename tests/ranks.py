"""A pool of gloo ranks that stays up for the whole test session.

Starting ranks and importing torch is most of what a distributed test costs, so it is paid once: a
fork server imports torch and what trains, and each pool (1, 2, 4 or 8 ranks) is forked from it when
it is first asked for. A test then runs an importable function on all ranks of a pool and gets one
result per rank.

A pool serves many tests, so a call must leave nothing behind: before the next one every sub-group
is destroyed and what DTensor cached about their meshes is dropped. A pool in which a rank raised,
died or hung is killed and started again when it is next needed: the others may wait in a
collective that nobody joins. So is one that has answered many calls. Between calls the ranks are
stopped (SIGSTOP): threads of gloo that never sleep take none of the cores that others test on.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from ptrain.train.rank_start import die_with_parent

SIZES = (1, 2, 4, 8)
CALL_SECONDS = 120.0
START_SECONDS = 90.0
COLLECTIVE_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for the other ranks to report, once one has raised
# gloo leaves threads of every group that was destroyed, which never sleep: after 200 calls a rank
# has 380 of them, and burns an eighth of a core while it waits.
MOST_CALLS = 25
MOST_THREADS = 40  # of a rank: a call that verifies makes some ten groups
# elsewhere a rank does not die with the fork server, and one that is stopped would stay for ever
ARE_STOPPED = sys.platform == "linux"

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "tests.gloo.runs",  # what trains: 2 CPU seconds of every rank that is started, if it imports it
    "transformers.models.llama.modeling_llama",  # where it is installed: 4 CPU seconds
    "tests.gloo.sessions",
    "tests.gloo.verify_runs",
    "tests.forked",  # what traces the part of a rank
]


def fork_server() -> ForkServerContext:
    """Return where processes are forked from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class RankError(AssertionError):
    """A failure on ranks; `causes` maps a rank to its traceback or its exit."""

    def __init__(self, causes: dict[int, str]) -> None:
        self.causes = causes
        super().__init__("\n".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))

    @property
    def is_of_the_pool(self) -> bool:
        """Return True if a rank died within torch. This happens in about one of ten thousand calls,
        in a functional collective, on ranks whose earlier groups were destroyed. A job that a test
        starts is never retried."""
        return f"died with exit code {-signal.SIGSEGV}" in self.causes.values()


@dataclass
class Pool:
    """`size` processes in one gloo group; `size` 1 is a process without a group."""

    size: int
    processes: list[ForkServerProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    calls: int = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Run `function(*args)` on every rank; return the results in the order of the ranks."""
        if self.calls == MOST_CALLS or self._num_threads() > MOST_THREADS:
            self.close()
        try:
            return self._call((function, args), timeout)
        except RankError as error:
            if not error.is_of_the_pool:
                raise
            once_more = f"{function.__name__} runs once more, on new ranks: {error}"
            warnings.warn(once_more, stacklevel=3)
            return self._call((function, args), timeout)

    def _num_threads(self) -> int:
        """Return the thread count of the first rank; 0 if the system does not report it."""
        tasks = [Path(f"/proc/{process.pid}/task") for process in self.processes[:1]]
        return sum(len(list(task.iterdir())) for task in tasks if task.is_dir())

    def _start(self) -> None:
        self.calls = 0
        context = fork_server()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        port = self._answers(START_SECONDS, ranks=(0,))[0]  # rank 0 keeps the store
        for pipe in self.pipes[1:]:
            _send(pipe, port)
        self._answers(START_SECONDS)

    def _call(self, work: tuple[Callable[..., Any], tuple[Any, ...]], timeout: float) -> list[Any]:
        if not self.processes:
            self._start()
        self.calls += 1
        message = pickle.dumps(work)  # once: a function that cannot be imported fails here
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send_bytes(message)
        answers = self._answers(timeout)
        self._signal(signal.SIGSTOP)
        return [answers[rank] for rank in range(self.size)]

    def _answers(self, timeout: float, ranks: tuple[int, ...] | None = None) -> dict[int, Any]:
        """Return one answer of each rank; kill the pool and raise unless all of them are
        results."""
        waiting = {self.pipes[rank]: rank for rank in (ranks or range(self.size))}
        results: dict[int, Any] = {}
        causes: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                failed, value = self._receive(rank)
                (causes if failed else results)[rank] = value
            if causes:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting or causes:
            fate = "waited for the others" if causes else f"no answer within {timeout:g} s"
            causes.update(dict.fromkeys(waiting.values(), fate))
            self.kill()
            raise RankError(causes)
        return results

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            failed, value = pickle.loads(self.pipes[rank].recv_bytes())
            return failed, value
        except EOFError:
            self.processes[rank].join(GRACE_SECONDS)
            return True, f"died with exit code {self.processes[rank].exitcode}"

    def _signal(self, number: signal.Signals) -> None:
        """Stop or continue the ranks; the pipe reports a rank that died meanwhile."""
        for process in self.processes if ARE_STOPPED else ():
            with contextlib.suppress(ProcessLookupError):
                if process.pid and process.is_alive():
                    os.kill(process.pid, number)

    def close(self) -> None:
        """Let the ranks exit; kill those that do not."""
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                _send(pipe, None)
        for process in self.processes:
            process.join(GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes.clear()
        self.pipes.clear()


class Ranks:
    """The pools of a session, started when first needed."""

    def __init__(self) -> None:
        self._pools = {size: Pool(size) for size in SIZES}
        atexit.register(self.close)

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_SECONDS,
    ) -> list[Any]:
        """`function(*args)` on `size` ranks at once -> one result per rank.

        The function must be importable by name, arguments and results must pickle. Inside, the
        default process group is initialised (except with one rank, which has none); every rank
        computes with one thread. Raises RankError with the traceback of each rank that failed.
        """
        return self._pools[size].run(function, *args, timeout=timeout)

    def processes(self, size: int) -> list[ForkServerProcess]:
        """Return the living processes of a pool (none before its first use)."""
        return list(self._pools[size].processes)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        atexit.unregister(self.close)


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value))  # plain pickle: tensors travel by value, not by file


def _serve(rank: int, size: int, pipe: Connection) -> None:
    """Run one rank: join the group, answer calls, exit without exit handlers (a gloo process may
    abort in them)."""
    die_with_parent(
        os.getppid()
    )  # the fork server: a session that is killed may leave ranks stopped
    faulthandler.enable()  # a rank that dies within C++ says where
    gc.freeze()  # what the fork server imported: no collection need walk through it
    try:
        _join(rank, size, pipe)
        while (work := pickle.loads(pipe.recv_bytes())) is not None:
            _forget()
            _send(pipe, _answer(*work))
    except EOFError:
        pass  # the session is gone
    except BaseException:  # noqa: BLE001 - carried to the session, which raises it
        with contextlib.suppress(OSError):
            _send(pipe, (True, traceback.format_exc()))
    os._exit(0)


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return False, function(*args)
    except (Exception, SystemExit):  # noqa: BLE001 - carried to the session, which raises it
        return True, traceback.format_exc()


def _join(rank: int, size: int, pipe: Connection) -> None:
    """Join a gloo group of `size` ranks over the loopback interface, on which its store listens."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, size, is_master=True, timeout=timeout,
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        _send(pipe, (False, port))
    else:
        port = pickle.loads(pipe.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout)
    if size > 1:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("pool", store), rank=rank, world_size=size,
            timeout=timeout,
        )  # fmt: skip
    _send(pipe, (False, None))


def _forget() -> None:
    """Destroy what the last call left: its sub-groups, and what was cached about their meshes.

    What lives then is modules and caches, half a million objects that every collection would walk
    through (0.5 s, several times a test): the collector is told that they stay.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    gc.collect()
    if dist.is_initialized():
        for group in _sub_groups():
            dist.destroy_process_group(group)
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    gc.collect()
    gc.freeze()


def _sub_groups() -> Iterator[Any]:
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    default = dist.group.WORLD
    yield from [group for group in world.pg_map if group is not default]
