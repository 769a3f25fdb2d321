"""The machine that is measured: what is known of it, and whether somebody else is using it.
Torch-free."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptrain.processor import cores

_LOOK = 0.5  # seconds
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """What `ranks` ranks of a node measured at once, on so many nodes: rows of each table, without
    a figure for others. `spread` is the median of all measurements', `spreads` those of each table;
    `left_out`: how often the largest points of a table were, for want of time."""

    ranks: int
    nodes: int
    kind: str
    spread: float
    tables: dict[str, list[list[Any]]]
    device_memory: int | None = None
    sm: int | None = None
    name: str = ""
    spreads: dict[str, float] = field(default_factory=dict)
    left_out: int = 0


def busy_cores() -> float:
    """Return how many of the cores are busy now; by the load of the last minute where the system
    does not say it."""
    if not _STAT.exists():
        return os.getloadavg()[0]
    before = _ticks()
    time.sleep(_LOOK)
    busy, idle = (after - first for after, first in zip(_ticks(), before, strict=True))
    return cores() * busy / max(1, busy + idle)


def _ticks() -> tuple[int, int]:
    """Of all cores together, busy and idle, waiting for a disk included."""
    first = _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]
    numbers = list(map(int, first))
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, idle


def machine_name(part: MeasuredPart) -> str:
    """Return what a reader should know of it: devices, processor and cores."""
    processor = f"{_processor()}, {cores()} cores"
    return f"{part.name}, {processor}" if part.name else processor


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
