"""A device's queue of work, as the host sees it: what it launches, and when that is over.

A CPU has done what was called when the call returns. CUDA has not: the host runs ahead of it, and
whoever reads a value off it waits until all is done that was launched before; with nothing launched
behind it the device then runs dry. So values travel to the host without anybody waiting, and are
read when a mark behind them has passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, Self

import torch


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
