"""The ranks a program runs on: gloo, nccl or fake. An argument of `interpret`, never a global.

On the rank's side this is the only module that reads the environment. A process group that exists
already (a notebook, Ray, the test pool) is used and left alone.

Fake ranks: one process plays rank r of N; its collectives return at once and move nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptrain.errors import Fault, RankFailed, SpecError
from ptrain.internals.fakes import (
    LOGGER,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from ptrain.internals.process_groups import limit_collectives
from ptrain.processor import shares_gpus
from ptrain.spec.job import Timeout


def launched() -> bool:
    """Return whether a launcher (torchrun or our own) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def flight_recorder_size() -> int:
    """Collectives that c10d's flight recorder keeps in this process: torch's default is 2000."""
    text = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    return int(text) if text and text.isdigit() else 2000


@dataclass(kw_only=True)
class World:
    """One rank's view of the job. `owns_group` says whether `close` destroys the process group;
    `stands_in`, that fake tensors on a processor are for those of a GPU."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    owns_group: bool = False
    stands_in: bool = False
    timeout: Timeout = field(default_factory=Timeout)

    @classmethod
    def join(
        cls, timeout: Timeout | None = None, *, device: str = "auto", backend: str = "auto"
    ) -> World:
        """Meet the other ranks.

        Uses the default process group where one exists; else what torchrun or our launcher put
        into the environment; else one process alone. Raises SpecError for an environment or a
        device that cannot be used, RankFailed where the meeting fails within `timeout.init`.
        """
        timeout = timeout or Timeout()
        if dist.is_initialized():
            rank = dist.get_rank()
            local_rank = _whole("LOCAL_RANK", os.environ.get("LOCAL_RANK", str(rank)))
            return cls(
                rank=rank,
                size=dist.get_world_size(),
                local_rank=local_rank,
                device=_device(device, local_rank, _num_local(os.environ, local_rank)),
                backend=dist.get_backend(),
                timeout=timeout,
            )
        if not launched():
            return cls(device=_device(device, 0, 1), timeout=timeout)
        ranks = _ranks(os.environ)
        num_local = _num_local(os.environ, ranks["LOCAL_RANK"])
        chosen = _device(device, ranks["LOCAL_RANK"], num_local)
        backend = _backend(backend, chosen)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
            _allow_shared_gpus(ranks["RANK"])
        _start(ranks, backend, timeout)
        return cls(
            rank=ranks["RANK"],
            size=ranks["WORLD_SIZE"],
            local_rank=ranks["LOCAL_RANK"],
            device=chosen,
            backend=backend,
            owns_group=True,
            timeout=timeout,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the process group if this world made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _ranks(environment: Mapping[str, str]) -> dict[str, int]:
    """RANK, WORLD_SIZE and their local twins as numbers that agree."""
    values: dict[str, int] = {}
    for name, default in (
        ("RANK", ""),
        ("WORLD_SIZE", ""),
        ("LOCAL_RANK", ""),
        ("MASTER_PORT", ""),
    ):
        text = environment.get(name, default)
        if name == "LOCAL_RANK" and not text:
            text = environment.get("RANK", "")
        values[name] = _whole(name, text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise _environment(
            "RANK", f"RANK={values['RANK']} must be less than WORLD_SIZE={values['WORLD_SIZE']}"
        )
    if not 0 < values["MASTER_PORT"] < 65536:
        raise _environment(
            "MASTER_PORT", f"must be a port, 1 to 65535; got {values['MASTER_PORT']}"
        )
    return values


def _num_local(environment: Mapping[str, str], local_rank: int) -> int:
    """Ranks on this node; as many as this one knows of where no launcher says."""
    text = environment.get("LOCAL_WORLD_SIZE", str(local_rank + 1))
    return max(_whole("LOCAL_WORLD_SIZE", text), local_rank + 1)


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise _environment(name, f"must be an integer; got {text!r}")
    return int(text)


def _environment(name: str, finding: str) -> SpecError:
    return SpecError(
        Fault(
            place=name,
            finding=finding,
            remedy="Start with `torchrun --nproc-per-node N -m ptrain.train SPEC`.",
            source="environment",
        )
    )


def _device(wanted: str, local_rank: int, num_local: int) -> torch.device:
    """`auto` is a GPU only if there is one for each of the node's ranks, so that all of them choose
    alike: ranks of which some came with nccl and some with gloo would never meet."""
    available = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and available and shares_gpus():
        return torch.device("cuda", local_rank % available)
    if wanted == "cuda" and local_rank >= available:
        raise SpecError(
            Fault(
                place="device",
                finding=(
                    f"each rank needs a GPU: found {available}, but this is local rank {local_rank}"
                ),
                remedy="Use `device=cpu`, or start fewer ranks on this node. To try NCCL on "
                "fewer GPUs, set PTRAIN_SHARE_GPUS=1.",
            )
        )
    if wanted == "cuda" or (wanted == "auto" and num_local <= available):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _allow_shared_gpus(rank: int) -> None:
    """Let NCCL connect ranks that share a GPU. It rejects two ranks on one GPU of a host
    ("Duplicate GPU detected"); with different host ids it takes them for GPUs of two hosts and uses
    sockets. From 2.30 on it needs the second variable, too."""
    if shares_gpus():
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def _backend(wanted: str, device: torch.device) -> str:
    if wanted == "nccl" and device.type != "cuda":
        raise SpecError(
            Fault(
                place="backend",
                finding="nccl needs a GPU per rank, but this rank has none",
                remedy="Use `backend=gloo`.",
            )
        )
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _start(ranks: Mapping[str, int], backend: str, timeout: Timeout) -> None:
    waits = timedelta(seconds=timeout.init)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        store = _store(ranks, host, waits)
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks["RANK"],
            world_size=ranks["WORLD_SIZE"],
            timeout=waits,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise RankFailed(
            f"rank {ranks['RANK']} could not connect to the other {ranks['WORLD_SIZE'] - 1} "
            f"at {host}:{ranks['MASTER_PORT']} within {timeout.init:g} s: {error}"
        ) from error
    set_timeout(None, timeout)


def _store(ranks: Mapping[str, int], host: str, waits: timedelta) -> dist.Store:
    """Where the ranks exchange addresses.

    Our launcher hands rank 0 a socket that it bound to the loopback, so that nobody outside can
    reach the store. Under torchrun the agent's store is shared by all attempts: a prefix per
    attempt keeps a restarted rank from reading a dead one's address. Where each attempt has a store
    of its own there is none: agents of several nodes do not count their restarts alike.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = ranks["RANK"] == 0 and not agent
    store = dist.TCPStore(
        host,
        ranks["MASTER_PORT"],
        ranks["WORLD_SIZE"],
        is_master=is_master,
        timeout=waits,
        wait_for_workers=False,
        **(_inherited() or listener(host, ranks["MASTER_PORT"]) if is_master else {}),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    return dist.PrefixStore(f"attempt{attempt}", store)


def _inherited() -> dict[str, int]:
    """The listening socket that our launcher bound."""
    descriptor = os.environ.get("PTRAIN_STORE_FD")
    return {} if descriptor is None else {"master_listen_fd": int(descriptor)}


def listener(address: str, port: int) -> dict[str, int]:
    """Return the arguments with which a TCPStore listens on this address alone, where torch takes
    all interfaces. There are none where that is no address of this node's (or a name: Debian's
    leads to its own node's loopback, where no other node could come), or somebody listens there."""
    with suppress(ValueError, OSError):
        version = ipaddress.ip_address(address).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((address, port))
            opened.listen(1024)
            return {"master_listen_fd": opened.detach()}
    return {}


def set_timeout(group: dist.ProcessGroup | None, timeout: Timeout) -> None:
    """From here on a collective of `group` fails after `timeout.step` (torch's default is half an
    hour under gloo, and new groups do not inherit)."""
    limit_collectives(group, timedelta(seconds=timeout.step))


_CPU = torch.device("cpu")
_LOG = logging.getLogger(LOGGER)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def fake_world(
    rank: int, size: int, device: torch.device = _CPU, *, stands_in: bool = False
) -> World:
    """Rank `rank` of `size` over torch's fake process group; `stands_in` as a world has it.
    Under `fake_tensors` nothing is computed either: shapes, collectives and storages are those of
    the real run, values are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return World(
        rank=rank,
        size=size,
        device=device,
        backend="fake",
        owns_group=True,
        stands_in=stands_in,
    )


def new_fakes() -> FakeTensorMode:
    """Return a mode in which `fake_tensors` are made."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Tensors without data, but for the few integers that DDP's reducer reads back. What was made
    in a `mode` of `new_fakes` is used again in that mode: others take copies of it."""
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)  # an operator that fails is logged, and raises the same
    try:
        with (
            mode or new_fakes(),
            _AsOnDevices(),
            _SeedsOnHost() if torch.cuda.is_available() else nullcontext(),
        ):
            yield
    finally:
        _LOG.setLevel(level)


class _AsOnDevices(TorchDispatchMode):
    """DDP's reducer writes the new order of its buckets into int32 tensors, sends them, and reads
    them in C++: these are real, and so is what is done with real tensors alone. What `torch.tensor`
    makes for a GPU, as a model's buffer, is not: no GPU is there that could copy it. What is
    awaited is there, as with real tensors, where torch's fake of waiting makes another one."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(argument, FakeTensor) for argument in args):  # most of all calls
            return args[0] if func is _WAIT else func(*args, **kwargs)
        tensors = [
            argument
            for argument in tree_leaves((args, kwargs))
            if isinstance(argument, torch.Tensor)
        ]
        if tensors:
            is_new_on_gpu = func is torch.ops.aten.lift_fresh.default and tensors[0].is_cuda
            is_fake = any(isinstance(argument, FakeTensor) for argument in tensors)
            is_real = not is_fake and not is_new_on_gpu
        else:
            empty = torch.ops.aten.empty.memory_format
            is_real = func is empty and kwargs.get("dtype") is torch.int32
        with unset_fake_temporarily() if is_real else nullcontext():
            return func(*args, **kwargs)


class _SeedsOnHost(TorchDispatchMode):
    """Efficient attention leaves seed and offset of its dropout on the host (but in a captured
    graph), where fake tensors have them on the device: torch's shape functions (Note [Seed and
    Offset]) know no better. So they are real here. Seen on an H100, with torch 2.11."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._scaled_dot_product_efficient_attention.default:
            return result
        output, statistics, *numbers = result
        with unset_fake_temporarily():
            return output, statistics, *(torch.zeros((), dtype=n.dtype) for n in numbers)
