"""The ranks that a program runs on: gloo, nccl or fake. An argument of `interpret`, never a global.

On the rank's side, this is the only module that reads the environment. If a process group exists
already (a notebook, Ray, the test pool), it is used and never destroyed.

Fake ranks: one process plays rank r of N. Its collectives return at once and move nothing.
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
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptrain.errors import Fault, RankFailed, SpecError
from ptrain.internals.compiled import is_tracing
from ptrain.internals.fakes import (
    LOGGER,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from ptrain.internals.process_groups import set_group_timeout
from ptrain.processor import shares_gpus
from ptrain.spec.job import Timeout


def is_launched() -> bool:
    """Return True if a launcher (torchrun or ptrain's) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def flight_recorder_size() -> int:
    """Return the number of collectives that c10d's flight recorder keeps (default: 2000)."""
    text = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    return int(text) if text and text.isdigit() else 2000


@dataclass(kw_only=True)
class World:
    """The place of one rank in a job.

    Attributes:
        rank: The global rank.
        size: Number of ranks.
        device: The rank's device.
        backend: `gloo`, `nccl`, `fake`, or `none` for a single process without a group.
        owns_group: `close` destroys the process group.
        stands_in: Fake tensors on a CPU represent tensors on a GPU.
        timeout: Time limits of rendezvous and of a step.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    owns_group: bool = False
    stands_in: bool = False
    timeout: Timeout = field(default_factory=Timeout)

    @classmethod
    def join(
        cls, timeout: Timeout | None = None, *, device: str = "auto", backend: str = "auto"
    ) -> World:
        """Connect to the other ranks.

        It uses the default process group if there is one, else the environment set by torchrun or
        ptrain's launcher, else it is a single process.

        Args:
            timeout: Time limits.
            device: `cpu`, `cuda`, or `auto` for GPUs if there is one per rank of the node.
            backend: `gloo`, `nccl`, or `auto` for the one that fits the device.

        Raises:
            SpecError: The environment or the device cannot be used.
            RankFailed: The ranks cannot connect within `timeout.init`.
        """
        timeout = timeout or Timeout()
        if dist.is_initialized():
            rank = dist.get_rank()
            local_rank = _parse_integer("LOCAL_RANK", os.environ.get("LOCAL_RANK", str(rank)))
            return cls(
                rank=rank,
                size=dist.get_world_size(),
                device=_choose_device(device, local_rank, _num_local(os.environ, local_rank)),
                backend=dist.get_backend(),
                timeout=timeout,
            )
        if not is_launched():
            return cls(device=_choose_device(device, 0, 1), timeout=timeout)
        ranks = _ranks_from_environment(os.environ)
        num_local = _num_local(os.environ, ranks["LOCAL_RANK"])
        chosen = _choose_device(device, ranks["LOCAL_RANK"], num_local)
        backend = _choose_backend(backend, chosen)
        if chosen.type == "cuda":
            # Before the group is created: NCCL and later allocations use the current device, which
            # is GPU 0 on every rank by default.
            torch.cuda.set_device(chosen)
            _allow_shared_gpus(ranks["RANK"])
        _create_default_group(ranks, backend, timeout)
        return cls(
            rank=ranks["RANK"],
            size=ranks["WORLD_SIZE"],
            device=chosen,
            backend=backend,
            owns_group=True,
            timeout=timeout,
        )

    @property
    def is_first(self) -> bool:
        """True for the rank that prints."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the process group if this world created it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _ranks_from_environment(environment: Mapping[str, str]) -> dict[str, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT as numbers, checked against each other.

    Raises:
        SpecError: A variable is missing, no number, or out of range.
    """
    values: dict[str, int] = {}
    for name, default in (
        ("RANK", ""),
        ("WORLD_SIZE", ""),
        ("LOCAL_RANK", ""),
        ("MASTER_PORT", ""),
    ):
        text = environment.get(name, default)
        # without LOCAL_RANK, assume that all ranks are on one node
        if name == "LOCAL_RANK" and not text:
            text = environment.get("RANK", "")
        values[name] = _parse_integer(name, text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise _environment_error(
            "RANK", f"RANK={values['RANK']} must be less than WORLD_SIZE={values['WORLD_SIZE']}"
        )
    if not 0 < values["MASTER_PORT"] < 65536:
        raise _environment_error(
            "MASTER_PORT", f"must be a port, 1 to 65535; got {values['MASTER_PORT']}"
        )
    return values


def _num_local(environment: Mapping[str, str], local_rank: int) -> int:
    """Return the number of ranks on this node.

    Without LOCAL_WORLD_SIZE, the local rank gives a lower bound.
    """
    text = environment.get("LOCAL_WORLD_SIZE", str(local_rank + 1))
    return max(_parse_integer("LOCAL_WORLD_SIZE", text), local_rank + 1)


def _parse_integer(name: str, text: str) -> int:
    """Return a variable as a number; raise SpecError if it is not a non-negative integer."""
    if not text.isdigit():
        raise _environment_error(name, f"must be an integer; got {text!r}")
    return int(text)


def _environment_error(name: str, finding: str) -> SpecError:
    """Return the error of an environment variable."""
    return SpecError(
        Fault(
            place=name,
            finding=finding,
            remedy="Start with `torchrun --nproc-per-node N -m ptrain.train SPEC`.",
            source="environment",
        )
    )


def _choose_device(wanted: str, local_rank: int, num_local: int) -> torch.device:
    """Return the device of a rank.

    `auto` is a GPU only if the node has one for each of its ranks, so that all ranks choose
    equally: ranks with nccl and ranks with gloo would never connect.
    """
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
    """Let NCCL connect ranks that share a GPU, if PTRAIN_SHARE_GPUS is set.

    NCCL rejects two ranks on one GPU of a host ("Duplicate GPU detected"). With different host ids,
    it assumes GPUs of two hosts and uses sockets. From NCCL 2.30 on, the second variable is needed
    too.
    """
    if shares_gpus():
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def _choose_backend(wanted: str, device: torch.device) -> str:
    """Return the backend for a device; raise SpecError for nccl without a GPU."""
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


def _create_default_group(ranks: Mapping[str, int], backend: str, timeout: Timeout) -> None:
    """Create the default process group.

    Raises:
        RankFailed: The ranks cannot connect within `timeout.init`.
    """
    waits = timedelta(seconds=timeout.init)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        store = _open_store(ranks, host, waits)
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
    # the timeout of `init_process_group` was the rendezvous's; collectives have the step's
    set_timeout(None, timeout)


def _open_store(ranks: Mapping[str, int], host: str, waits: timedelta) -> dist.Store:
    """Return the store in which the ranks exchange addresses.

    ptrain's launcher passes rank 0 a socket that it bound to the loopback interface, so that the
    store cannot be reached from outside. Under torchrun, all attempts share the agent's store: a
    prefix per attempt keeps a restarted rank from reading a dead rank's address. If each attempt
    has a separate store, the prefix is constant, since the agents of several nodes may count
    restarts differently.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = ranks["RANK"] == 0 and not agent
    store = create_store(
        host,
        ranks["MASTER_PORT"],
        waits,
        world_size=ranks["WORLD_SIZE"],
        is_master=is_master,
        **(
            _inherited_socket() or listen_arguments(host, ranks["MASTER_PORT"]) if is_master else {}
        ),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    return dist.PrefixStore(f"attempt{attempt}", store)


def create_store(host: str, port: int, waits: timedelta, **arguments: Any) -> dist.TCPStore:
    """Return a store, or a connection to one, within a time limit.

    torch 2.13 waits without a limit for a process that accepts its connection and is silent. So it
    connects in a thread, which is abandoned then.

    Args:
        host: The address of the store.
        port: Its port.
        waits: The time limit.
        arguments: More arguments of `TCPStore`.

    Raises:
        TimeoutError: The process at this address is silent.
        RuntimeError: There is none, as `TCPStore` raises it.
    """
    results: Queue[dist.TCPStore | Exception] = Queue()

    def connect_store() -> None:
        try:
            results.put(
                dist.TCPStore(host, port, timeout=waits, wait_for_workers=False, **arguments)
            )
        except (RuntimeError, ValueError, OSError) as error:
            results.put(error)

    Thread(target=connect_store, daemon=True).start()
    try:
        # Half a second longer, so that an error of torch comes first.
        result = results.get(timeout=waits.total_seconds() + 0.5)
    except Empty:
        raise TimeoutError("the process at this address is silent") from None
    if isinstance(result, Exception):
        raise result
    return result


def _inherited_socket() -> dict[str, int]:
    """Return the arguments for the listening socket that ptrain's launcher bound, if any."""
    descriptor = os.environ.get("PTRAIN_STORE_FD")
    return {} if descriptor is None else {"master_listen_fd": int(descriptor)}


def listen_arguments(address: str, port: int) -> dict[str, int]:
    """Return the arguments with which a TCPStore listens on this address only.

    torch would listen on all interfaces. The result is empty if `address` is a name, is not an
    address of this node, or is in use. A name is not resolved: Debian maps a node's name to its
    loopback interface, which other nodes cannot reach.

    Args:
        address: An IPv4 or IPv6 address of this node.
        port: The TCP port.

    Returns:
        The keyword argument `master_listen_fd` of TCPStore, or {} if the store must bind the port
        itself.
    """
    with suppress(ValueError, OSError):
        version = ipaddress.ip_address(address).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as opened:
            # a restarted job may use the port while old connections are in TIME_WAIT
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((address, port))
            opened.listen(1024)
            # the store owns the descriptor from here on
            return {"master_listen_fd": opened.detach()}
    return {}


def set_timeout(group: dist.ProcessGroup | None, timeout: Timeout) -> None:
    """Set the time limit of a group's collectives.

    torch's default is 30 minutes under gloo, and new groups do not inherit a limit.

    Args:
        group: The group, or None for the default group.
        timeout: The limits of the spec; `timeout.step` is used, in seconds.
    """
    set_group_timeout(group, timedelta(seconds=timeout.step))


_CPU = torch.device("cpu")
_LOG = logging.getLogger(LOGGER)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def fake_world(
    rank: int, size: int, device: torch.device = _CPU, *, stands_in: bool = False
) -> World:
    """Return rank `rank` of `size` over torch's fake process group.

    Under `fake_tensors` no values are computed; shapes, collectives and storages are as in the
    real run.

    Args:
        rank: The rank to play.
        size: Number of ranks.
        device: The device of its tensors.
        stands_in: See `World`.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return World(
        rank=rank,
        size=size,
        device=device,
        backend="fake",
        owns_group=True,
        stands_in=stands_in,
    )


def create_fake_mode() -> FakeTensorMode:
    """Return a new mode for `fake_tensors`."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Temporarily create tensors without data.

    The few integers that DDP's reducer reads are real.

    Args:
        mode: The mode that creates the tensors, None for a new one. Its tensors can be used again
            only in this mode; other modes copy them.
    """
    level = _LOG.level
    # torch logs failing operators, which raise the same error anyway
    _LOG.setLevel(logging.CRITICAL)
    try:
        with (
            mode or create_fake_mode(),
            _AsOnDevices(),
            _SeedsOnHost() if torch.cuda.is_available() else nullcontext(),
        ):
            yield
    finally:
        _LOG.setLevel(level)


class _AsOnDevices(TorchDispatchMode):
    """The mode that decides which tensors are real under fake tensors.

    - DDP's reducer writes the new order of its buckets into int32 tensors, sends them, and reads
      them in C++. These are real, and so are results of real tensors only.
    - `torch.tensor` on a GPU (such as a model's buffer) gives a fake tensor, since there is no GPU
      to copy it to.
    - Waiting for a functional collective returns its argument, as with real tensors. torch's fake
      implementation of `wait_tensor` creates another tensor. Programs that are being compiled keep
      the operator.
    """

    # Recomputation within a compiled region saves the random state by a higher-order operator.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: with another mode around it, Dynamo would run compiled code eagerly."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(argument, FakeTensor) for argument in args):  # fast path for most calls
            return args[0] if func is _WAIT and not is_tracing() else func(*args, **kwargs)
        tensors = [
            argument
            for argument in tree_leaves((args, kwargs))
            if isinstance(argument, torch.Tensor)
        ]
        if tensors:
            # torch.tensor ends with lift_fresh on the new real tensor.
            is_new_on_gpu = func is torch.ops.aten.lift_fresh.default and tensors[0].is_cuda
            is_fake = any(isinstance(argument, FakeTensor) for argument in tensors)
            is_real = not is_fake and not is_new_on_gpu
        else:
            empty = torch.ops.aten.empty.memory_format
            is_real = func is empty and kwargs.get("dtype") is torch.int32
        with unset_fake_temporarily() if is_real else nullcontext():
            return func(*args, **kwargs)


class _SeedsOnHost(TorchDispatchMode):
    """The mode that keeps seed and offset of efficient attention on the host.

    CUDA leaves them there for dropout.

    torch's shape functions (Note [Seed and Offset]) put them on the device, which is right only in
    a captured graph. They are real tensors here. Observed on an H100 with torch 2.11.
    """

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
