"""The host that this process runs on: its cores, memory and GPUs."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container, below which the kernel ends processes


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int:
    """Return the bytes of memory that the processes of this host, or container, may use."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _LIMIT.read_text(encoding="ascii").strip() if _LIMIT.is_file() else ""
    return min(here, int(limit)) if limit.isdigit() else here


def gpus() -> int:
    """Return how many GPUs NVIDIA's driver lists here."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def shares_gpus() -> bool:
    """Return whether ranks may share a GPU (`PTRAIN_SHARE_GPUS=1`), to try NCCL on one card."""
    return os.environ.get("PTRAIN_SHARE_GPUS") == "1"
