"""What lives on a device while a step runs: bytes by state from event to event, and what the peak
is made of. Plain data, which a simulation gives and a page or a picture shows."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.cost import Phase, State


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorages:
    """Storages of one kind that live at the peak: `tensors` of them, in bytes together."""

    what: str
    state: State
    device_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Live device bytes by state, in the order of `State`, after `event` births and deaths."""

    event: int
    phase: Phase
    micro_batch: int
    device_bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """One rank's memory over a steady step: its moments, and of the highest what lives then, the
    largest first."""

    rank: int
    moments: tuple[MemorySample, ...]
    peak: MemorySample
    held: tuple[LiveStorages, ...]

    def by_phase(self) -> dict[Phase, MemorySample]:
        """Return the highest moment of each phase."""
        peaks: dict[Phase, MemorySample] = {}
        for moment in self.moments:
            known = peaks.setdefault(moment.phase, moment)
            peaks[moment.phase] = max(known, moment, key=lambda sample: sample.total)
        return peaks
