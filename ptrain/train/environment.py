"""The environment variables of ranks: set by launchers, recorded by runs.

`runtime.world` reads the variables on the side of the rank. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ptrain
from ptrain.processor import cores

# The allow-list of `recorded_variables`: names, because a prefix would admit unknown variables.
RECORDED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "GLOO_SOCKET_IFNAME",
    *(f"NCCL_{name}" for name in (
        "ALGO", "BUFFSIZE", "CROSS_NIC", "CUMEM_ENABLE", "DEBUG", "IB_DISABLE", "IB_HCA",
        "MAX_NCHANNELS", "MIN_NCHANNELS", "NET_GDR_LEVEL", "NTHREADS", "NVLS_ENABLE",
        "P2P_DISABLE", "P2P_LEVEL", "PROTO", "SHM_DISABLE", "SOCKET_IFNAME",
    )),
    *(f"TORCH_{name}" for name in (
        "DISABLE_SHARE_RDZV_TCP_STORE", "DISTRIBUTED_DEBUG", "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT", "NCCL_HEARTBEAT_TIMEOUT_SEC", "NCCL_TRACE_BUFFER_SIZE",
    )),
    *(f"TORCHELASTIC_{name}" for name in ("MAX_RESTARTS", "RESTART_COUNT", "USE_AGENT_STORE")),
)  # fmt: skip
# A child process that inherits these would be taken for a rank (`is_launched`).
_RANK_VARIABLES = RECORDED[:6]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rendezvous of the ranks: a listening socket of the parent, which rank 0 inherits.

    Attributes:
        address: The address.
        port: The port.
        descriptor: The file descriptor of the socket.
    """

    address: str
    port: int
    descriptor: int


def is_launched() -> bool:
    """Return True if a launcher (torchrun, a Slurm task, ptrain) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Return the number of ranks that the launcher started, 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "") if is_launched() else ""
    return int(text) if text.isdigit() else 1


def num_ranks_of_node() -> int:
    """Return the number of ranks that the launcher started on this node, 0 if unknown."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "") if is_launched() else ""
    return int(text) if text.isdigit() else 0


def is_first() -> bool:
    """Return True if this process prints: it is rank 0, or no rank, or has no valid rank number."""
    return _is_zero("RANK")


def is_first_of_node() -> bool:
    """Return True for the first rank of a node; for rank 0 if the launcher sets no local rank."""
    return _is_zero("LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK")


def _is_zero(variable: str) -> bool:
    """Return True if the variable of a rank is 0, missing or no number."""
    number = os.environ.get(variable, "0") if is_launched() else "0"
    return number == "0" or not number.isdigit()


def agent_id() -> str:
    """Return an identifier of the torch agent that started this rank, "" without one.

    It contains a digest of the job's id, the host, the process id of the agent, and its start time
    in clock ticks of Linux, so that a later process with this id is not taken for the agent. The
    job's id itself is shared by its nodes only, and this identifier is recorded.
    """
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return ""
    stat = Path(f"/proc/{os.getppid()}/stat")
    # Field 22 of proc(5)'s stat is the start time. Field 2, the name, may contain spaces and ")".
    since = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "?"
    job = hashlib.blake2b(run_id.encode(), digest_size=8).hexdigest()
    return f"{job} {platform.node()} {os.getppid()} {since}"


def recorded_variables() -> dict[str, str]:
    """Return the allow-listed variables. Others may hold secrets and are never recorded."""
    return {name: value for name, value in sorted(os.environ.items()) if name in RECORDED}


def threads_per_rank(world_size: int) -> str:
    """Return OMP_NUM_THREADS if it is set, else an equal share of the cores.

    Args:
        world_size: The number of ranks that share the cores of this machine.

    Returns:
        The number of threads as text, at least "1".
    """
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // world_size))


def rank_environment(
    rank: int, world_size: int, meeting: Rendezvous, error_file: Path
) -> dict[str, str]:
    """Return the environment of a rank that ptrain starts. Variables of the user are kept.

    Args:
        rank: The rank.
        world_size: The number of ranks, all on this host.
        meeting: The rendezvous.
        error_file: The file for the exception of the rank.
    """
    environment = dict(os.environ)
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=meeting.address,
        MASTER_PORT=str(meeting.port),
        TORCHELASTIC_ERROR_FILE=str(error_file),
        PYTHONPATH=_python_path(environment),
        # A report of a failure quotes the last lines of the log, also of a rank that was killed.
        PYTHONUNBUFFERED="1",
    )
    if rank == 0:
        # Only rank 0 opens the store; the others connect to it.
        environment["PTRAIN_STORE_FD"] = str(meeting.descriptor)
    # By default, torch starts one thread per core in each rank.
    environment.setdefault("OMP_NUM_THREADS", threads_per_rank(world_size))
    environment.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler's lines about USDT
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in [name for name in ("lo", "lo0") if name in interfaces][:1]:
        # With an interface, gloo does not resolve the host name, which may have no address.
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
    return environment


def non_rank_environment(folders: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that is no rank, with this import path."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return environment


def ptrain_environment() -> dict[str, str]:
    """Return the environment of a ptrain process that is started with `-P`.

    It imports this installation of ptrain, and no module of the current folder.
    """
    return {**os.environ, "PYTHONPATH": _python_path(os.environ)}


def exec_module(module: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process by one that runs a module of this installation of ptrain."""
    # `execve` discards the buffers of this process.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *argv], ptrain_environment())


def allow_agent_restarts() -> None:
    """Set the variables that torch's agents need for restarts.

    By default, an agent gives each attempt the store of the failed one; 0 of 5 restarts recovered.
    """
    # Read in torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # As torchrun does (torch/distributed/run.py, torch 2.13); `elastic_launch` does not.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the root of this installation first, and without empty entries.

    An empty entry means the current folder.
    """
    root = str(Path(ptrain.__file__).resolve().parent.parent)
    segments = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join((root, *filter(None, segments)))


def find_commit(folder: Path) -> str | None:
    """Return the commit that the git repository of a folder has checked out, None without one.

    `git` is not called, because it runs programs that a repository configures, such as
    `core.fsmonitor`. Whether files differ from the commit is therefore unknown.
    """
    with suppress(OSError, ValueError):  # unreadable files, or no text
        places = (parent / ".git" for parent in (folder, *folder.parents))
        return next((_head_commit(git) for git in places if git.exists()), None)
    return None


def _head_commit(git: Path) -> str | None:
    """Return the commit of HEAD, None if it cannot be resolved."""
    if git.is_file():  # in a worktree or a submodule, `.git` is a file with the path
        git = git.parent / _first_line(git).removeprefix("gitdir: ")
    common = git / _first_line(git / "commondir")  # a worktree shares the branches of this folder
    text = _first_line(git / "HEAD")
    for _ in range(5):  # the depth of symbolic references that git follows
        if not text.startswith("ref: refs/") or ".." in text:
            break
        name = text.removeprefix("ref: ")
        text = _first_line(git / name) or _first_line(common / name)
        if not text and (common / "packed-refs").is_file():
            lines = (common / "packed-refs").read_text().splitlines()
            text = next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")
    return text if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _first_line(path: Path) -> str:
    """Return the first line of a regular file, "" without one. Reading a pipe would block."""
    return path.read_text().partition("\n")[0].strip() if path.is_file() else ""


def metrics_port() -> int:
    """Return the port of PTRAIN_METRICS_PORT, by default the one of OpenTelemetry's exporter.

    Raises:
        ValueError: The variable is no number.
    """
    text = os.environ.get("PTRAIN_METRICS_PORT", "9464")
    if not text.isdecimal():
        raise ValueError(f"PTRAIN_METRICS_PORT is {text!r}. Set it to the number of a free port")
    return int(text)
