"""The host's queries of a device queue with simulated torch events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptrain.models.objective import sent_to
from ptrain.runtime.queue import DeviceQueue

GPU, PROCESSOR = torch.device("cuda", 0), torch.device("cpu")


class PlayedEvent:
    """A moment of a device's clock, which shows 250 ms more with each event."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "else it has no time"
        self.calls: list[str] = []

    def record(self, stream: object) -> None:
        PlayedEvent.clock += 250.0
        self.at, self.stream = PlayedEvent.clock, stream

    def query(self) -> bool:
        return "synchronize" in self.calls

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def elapsed_time(self, end: PlayedEvent) -> float:
        return end.at - self.at


def test_a_gpu_s_marks_are_events_of_its_stream_and_its_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    queue = DeviceQueue(GPU)
    began, ended = queue.mark(), queue.mark()
    assert queue.runs_ahead and not ended.is_passed
    ended.wait()
    assert ended.is_passed and not began.is_passed
    assert ended.seconds_since(began) == 0.25
    assert ended.event.stream == "stream of cuda:0"  # type: ignore[attr-defined]


def test_a_processor_is_done_when_the_call_returns() -> None:
    queue = DeviceQueue(PROCESSOR)
    began, ended = queue.mark(), queue.mark()
    ended.wait()
    assert ended.is_passed and not queue.runs_ahead
    assert 0 <= ended.seconds_since(began) < 1


def test_values_reach_the_host_in_memory_that_the_device_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    empty, copied = torch.empty, torch.Tensor.copy_

    def noted(*shape: Any, **options: Any) -> torch.Tensor:
        calls.append({"pinned": options.pop("pin_memory", False)})
        return empty(*shape, **options)

    def copying(held: torch.Tensor, value: torch.Tensor, **options: bool) -> torch.Tensor:
        calls[-1] |= options
        return copied(held, value, **options)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.Tensor, "copy_", copying)
    values = torch.tensor([1.0, 2.0])
    for device in (GPU, PROCESSOR):
        assert DeviceQueue(device).to_host(values).tolist() == [1.0, 2.0]
    assert calls == [
        {"pinned": True, "non_blocking": True},
        {"pinned": False, "non_blocking": True},
    ]


def test_samples_are_copied_to_a_gpu_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> tuple[torch.device, bool]:
            return device, non_blocking

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned())
    tokens = torch.arange(3)
    assert sent_to(GPU, tokens) == (GPU, True)
    assert sent_to(PROCESSOR, tokens) is tokens
