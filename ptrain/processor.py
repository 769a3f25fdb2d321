"""The host of this process: its cores, memory and GPUs."""

from __future__ import annotations

import os
from pathlib import Path

# The cgroup v2 limit of a container, at which the kernel kills processes; "max" if unlimited.
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int:
    """Return the memory of this host or container, in bytes."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _LIMIT.read_text(encoding="ascii").strip() if _LIMIT.is_file() else ""
    return min(here, int(limit)) if limit.isdigit() else here


def gpus() -> int:
    """Return the number of GPUs that the NVIDIA driver lists."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def shares_gpus() -> bool:
    """Return True if ranks may share a GPU (`PTRAIN_SHARE_GPUS=1`), to try NCCL on one card."""
    return os.environ.get("PTRAIN_SHARE_GPUS") == "1"
