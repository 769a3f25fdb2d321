"""A device's queue of work as the host sees it: launched operators, and when they are complete.

A CPU has finished a call when it returns. CUDA has not: the host runs ahead of it. A read of a
value waits until everything launched before it is done, and if nothing is launched after it the
device then runs dry. So values travel to the host without a wait, and are read when a mark after
them has passed.

On a CPU, freed memory is kept for the next step, as CUDA's caching allocator does. glibc gives the
end of its heap back to the system once more than 64 MiB of it are free, and every new page costs a
fault: to write 43 MB for the first time took 40 ms, and 5 ms again (two cores of an AMD EPYC, in a
virtual machine). A step frees and requests the same sizes as the one before: gradients, gloo's
copies of them, activations. Blocks above 32 MiB, the largest threshold that glibc takes, are mapped
one by one and still given back.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Protocol, Self

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_NEVER = 2**31 - 1  # bytes: mallopt takes an int
_LARGEST = 32 * 2**20  # bytes: HEAP_MAX_SIZE / 2, where glibc comes by itself as blocks are freed


def keep_freed_memory() -> None:
    """From here on this process keeps what it frees. Nothing happens where its C library is not
    glibc."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)


class Milestone(Protocol):
    """A place in the queue."""

    @property
    def is_passed(self) -> bool:
        """Whether all that was launched before it is done; nobody waits to know."""
        ...

    def wait(self) -> None:
        """Return when it is passed."""

    def seconds_since(self, earlier: Self) -> float:
        """Return the device's seconds between two marks that are passed."""
        ...


@dataclass(frozen=True, slots=True)
class HostTime:
    """Of a queue in which nothing waits: seconds of the host's clock."""

    at: float
    is_passed = True

    def wait(self) -> None:
        """It is passed."""

    def seconds_since(self, earlier: HostTime) -> float:
        return self.at - earlier.at


class DeviceEvent:
    """Of CUDA: an event in the stream that computes, with the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    @property
    def is_passed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3  # milliseconds


class DeviceQueue:
    """The queue of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def runs_ahead(self) -> bool:
        """Whether the host launches work that the device does later."""
        return self.device.type == "cuda"

    def mark(self) -> Milestone:
        """Return a mark behind all that was launched so far."""
        if self.device.type == "cuda":
            return DeviceEvent(self.device)
        return HostTime(time.perf_counter())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, whose values are there when a later mark has passed."""
        pinned = self.device.type == "cuda"  # else the host would wait for the copy
        held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return held.copy_(tensor, non_blocking=True)
