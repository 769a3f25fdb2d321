"""A simulated accelerator on a CPU: its work completes only when the host waits for it, and reads
by the host are recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.models.ledger import has_tier, set_tier
from ptrain.runtime.queue import DeviceQueue
from ptrain.spec.placement import Tier
from ptrain.train import loop

READS = {
    "__bool__", "__complex__", "__float__", "__index__", "__int__", "cpu", "equal", "is_nonzero",
    "item", "nonzero", "numpy", "tolist",
}  # fmt: skip
OPERATORS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"}


@dataclass
class SimulatedEvent:
    """An event that completes when the host waits for it; earlier copies then arrive."""

    at: float
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    before: SimulatedEvent | None = None
    is_passed: bool = False

    def wait(self) -> None:
        """Complete this event and all earlier ones."""
        passed: SimulatedEvent | None = self
        while passed is not None and not passed.is_passed:
            passed.is_passed = True
            for held, value in passed.copies:
                held.copy_(value)
            passed = passed.before

    def seconds_since(self, earlier: SimulatedEvent) -> float:
        assert self.is_passed and earlier.is_passed, "an event's time is known when it is over"
        return self.at - earlier.at


@dataclass
class SimulatedQueue(DeviceQueue):
    """A queue whose copies to the host have no values until the host waits for a later event."""

    device: torch.device
    under_way: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    last: SimulatedEvent | None = None
    runs_ahead = True  # type: ignore[assignment]

    def mark(self) -> SimulatedEvent:
        copies, self.under_way = self.under_way, []
        self.last = SimulatedEvent(time.perf_counter(), copies, self.last)
        return self.last

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        held = torch.full_like(tensor, float("nan"))
        set_tier(held, Tier.HOST)
        self.under_way.append((held, tensor.clone()))
        return held


class OperatorReads(TorchDispatchMode):
    """A recorder of reads by torch operators."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name in OPERATORS and isinstance(args[0], torch.Tensor):
            self.reads.note(name, args[0])
        return function(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """A recorder of reads of device tensors by the host, by step (from 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, list[str]] = {}
        self.step = -1

    def note(self, name: str, tensor: torch.Tensor) -> None:
        if not has_tier(tensor.untyped_storage()):
            self.by_step.setdefault(self.step, []).append(name)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS and args and isinstance(args[0], torch.Tensor):
            self.note(name, args[0])
        return function(*args, **(kwargs or {}))


@contextmanager
def simulated_device(*, is_played: bool = True) -> Iterator[None]:
    """Temporarily treat the CPU as an asynchronous device."""
    with pytest.MonkeyPatch.context() as patch:
        if is_played:
            patch.setattr(loop, "DeviceQueue", SimulatedQueue)
        yield


@contextmanager
def record_reads() -> Iterator[HostReads]:
    """Record reads by step. A step begins when its batch is read."""
    reads, local_batch = HostReads(), loop.local_batch

    def noted(program: Any, source: Any, step: int, *split: Any) -> Any:
        reads.step = step
        return local_batch(program, source, step, *split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "local_batch", noted)
        with reads, OperatorReads(reads):
            yield reads
