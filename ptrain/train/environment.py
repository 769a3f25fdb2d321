"""What a launcher puts into a rank's environment, and what a run may record of it. Torch-free.

The twin of `rooms.world`, which reads on the rank's side what is written here.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ptrain
from ptrain.processor import cores

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
)
_OF_A_RANK = RECORDED[:6]
RECORDED_PREFIXES = ("TORCH_", "TORCHELASTIC_", "NCCL_", "GLOO_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks meet: a listening socket of the parent, handed to rank 0 by number."""

    address: str
    port: int
    descriptor: int


def launched() -> bool:
    """Return whether a launcher (torchrun, Slurm's task, ours) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Return how many ranks the launcher started; 1 where none did."""
    text = os.environ.get("WORLD_SIZE", "") if launched() else ""
    return int(text) if text.isdigit() else 1


def ranks_of_node() -> int:
    """Return how many ranks the launcher started on this node; 0 where it does not say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "") if launched() else ""
    return int(text) if text.isdigit() else 0


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank at all: the one that prints. One that
    cannot know its number says so itself."""
    return _is_zero("RANK")


def is_first_of_node() -> bool:
    """Return whether this process is the first rank of its node; of all where the launcher does not
    say which that is."""
    return _is_zero("LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK")


def _is_zero(variable: str) -> bool:
    number = os.environ.get(variable, "0") if launched() else "0"
    return number == "0" or not number.isdigit()


def agent() -> str:
    """Return which of torch's agents started this rank: its job's id, its host, its process, and
    since when that runs (in ticks of Linux's clock, so that no later process of that number is
    taken for it); "" where none did."""
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return ""
    stat = Path(f"/proc/{os.getppid()}/stat")
    since = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else "?"
    return f"{run_id} {platform.node()} {os.getppid()} {since}"


def recorded() -> dict[str, str]:
    """Return what is on the allow-list: never the whole environment, which may hold secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in RECORDED or name.startswith(RECORDED_PREFIXES)
    }


def threads_per_rank(world_size: int) -> str:
    """Return the number of threads that the user has set, else an equal share of the cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // world_size))


def rank_environment(
    rank: int, world_size: int, meeting: Meeting, error_file: Path
) -> dict[str, str]:
    """The environment of one of our ranks; what the user has set stays."""
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
        PYTHONUNBUFFERED="1",
    )
    if rank == 0:
        environment["PTRAIN_STORE_FD"] = str(meeting.descriptor)
    environment.setdefault("OMP_NUM_THREADS", threads_per_rank(world_size))
    environment.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's USDT lines
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in [name for name in ("lo", "lo0") if name in interfaces][:1]:
        # gloo does not look up this machine's name then
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
    return environment


def alone(folders: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is no rank, with these folders on its import path."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return environment


def of_ptrain() -> dict[str, str]:
    """The environment of a process that is ptrain, started with `-P`: it imports this very ptrain,
    and nothing from the current folder."""
    return {**os.environ, "PYTHONPATH": _python_path(os.environ)}


def become(module: str, argv: Sequence[str]) -> NoReturn:
    """Become a process that runs a module of this very ptrain."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *argv], of_ptrain())


def let_agents_restart() -> None:
    """torch's agent otherwise hands each attempt the store of the dead one: 0 of 5 recovered."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _python_path(environment: Mapping[str, str]) -> str:
    """The ranks import the very ptrain that started them. An empty segment would be the current
    folder."""
    root = str(Path(ptrain.__file__).resolve().parent.parent)
    segments = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join((root, *filter(None, segments)))
