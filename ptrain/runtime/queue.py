"""The work queue of a device, and the process's policy for freed host memory.

A call on a CPU has finished when it returns. On CUDA the host runs ahead. Reading a value waits for
all earlier work, and the device idles afterwards until the host launches more. So values are copied
to the host without a wait, and read when a later mark in the queue has passed.

On a CPU, freed memory is kept for the next step, like CUDA's caching allocator does. A step frees
and requests the same sizes as the previous one: gradients, gloo's copies of them, activations. By
default, glibc returns the end of its heap to the system once more than 64 MiB of it are free, and
every new page costs a fault: the first write to 43 MB took 40 ms, later ones 5 ms (two cores of an
AMD EPYC, virtual machine). Blocks above 32 MiB, the largest threshold that glibc accepts, are still
mapped and returned one by one.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Protocol, Self

import torch

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1  # bytes: mallopt takes an int
_LARGEST = 32 * 2**20  # bytes: HEAP_MAX_SIZE / 2, the limit of glibc's dynamic threshold


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees.

    Does nothing if its C library is not glibc.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # Setting one threshold turns off glibc's dynamic adjustment of both, so the other one is
        # set too.
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)


class Milestone(Protocol):
    """A mark in the queue of a device."""

    @property
    def is_passed(self) -> bool:
        """True if all work launched before the mark has finished; reading it never waits."""
        ...

    def wait(self) -> None:
        """Wait until the mark has passed."""

    def seconds_since(self, earlier: Self) -> float:
        """Return the seconds on the device between two passed marks.

        Args:
            earlier: A mark of the same queue that was set before this one.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostTime:
    """A mark in a queue that runs synchronously: a time of the host's clock, in seconds."""

    seconds: float
    is_passed = True

    def wait(self) -> None:
        """Return at once: the mark has passed."""

    def seconds_since(self, earlier: HostTime) -> float:
        return self.seconds - earlier.seconds


class DeviceEvent:
    """A mark in CUDA's current stream: an event with the device's clock."""

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
    """The work queue of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def runs_ahead(self) -> bool:
        """True if the host launches work that the device executes later."""
        return self.device.type == "cuda"

    def mark(self) -> Milestone:
        """Return a mark after all work launched so far."""
        if self.device.type == "cuda":
            return DeviceEvent(self.device)
        return HostTime(time.perf_counter())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, whose values are valid when a later mark has passed.

        Args:
            tensor: A tensor on the queue's device.
        """
        pinned = self.device.type == "cuda"  # a copy to pageable memory blocks the host
        held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return held.copy_(tensor, non_blocking=True)
