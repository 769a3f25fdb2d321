"""What a step's storages do, in order: which bytes come and go, of what, and when a phase begins.

One stream has several readers: the course of memory and what its peak is made of, and what an
allocator would see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ptrain.cost import Phase, State
from ptrain.derivation.allocator import COMPUTING, AllocatedStep, AllocatorEvent
from ptrain.report.composition import LiveStorages, MemoryHistory, MemorySample

_STATES = tuple(State)


@dataclass(frozen=True, slots=True)
class StorageKind:
    """What a storage is, in a few words, and of which state; `micro_batch`: of which it was born,
    `stream`: which one has its memory, `is_moment`: whether it is an optimizer's own state, which
    torch's make with their first update, `is_within`: whether a kernel takes it within itself,
    where an allocator alone sees it."""

    what: str
    state: State
    micro_batch: int = 0
    stream: str = COMPUTING
    is_moment: bool = False
    is_within: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """So many device bytes of a storage come, or go (negative). One storage has one `key`."""

    kind: StorageKind
    size: int
    key: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Begin:
    """A phase begins."""

    phase: Phase
    micro_batch: int


Event = Change | Begin


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """What lives before a step, and what happens in it."""

    resident: tuple[Change, ...]
    events: tuple[Event, ...]

    def peaks(self) -> dict[Phase, int]:
        """Return the most bytes that live at once in each phase."""
        live = sum(change.size for change in self.resident)
        phase: Phase | None = None
        most: dict[Phase, int] = {}
        for event in self.events:
            if isinstance(event, Begin):
                phase = event.phase
            elif not event.kind.is_within:
                live += event.size
            if phase is not None:
                most[phase] = max(live, most.get(phase, 0))
        return most

    def fullest(self) -> int:
        """Return at the begin of which backward pass, counted from 0, most activations live."""
        live = sum(change.size for change in self.resident if _is_activation(change))
        begun: list[int] = []
        for event in self.events:
            if isinstance(event, Change):
                live += event.size if _is_activation(event) else 0
            elif event.phase is Phase.BACKWARD:
                begun.append(live)
        return max(range(len(begun)), key=begun.__getitem__, default=0)

    def history(self, rank: int) -> MemoryHistory:
        """Return the course of memory over the step."""
        moments = tuple(self._moments())
        peak = max(moments, key=lambda moment: moment.total)
        return MemoryHistory(
            rank=rank, moments=moments, peak=peak, held=tuple(held(self._living(peak.event)))
        )

    def _moments(self) -> Iterator[MemorySample]:
        """One before all changes and one after each of them."""
        sizes = dict.fromkeys(_STATES, 0)
        for change in self.resident:
            sizes[change.kind.state] += change.size
        phase, micro_batch, number = Phase.FORWARD, 0, 0
        yield MemorySample(event=0, phase=phase, micro_batch=0, device_bytes=tuple(sizes.values()))
        for event in self.events:
            if isinstance(event, Begin):
                phase, micro_batch = event.phase, event.micro_batch
                continue
            if event.kind.is_within:
                continue
            number += 1
            sizes[event.kind.state] += event.size
            yield MemorySample(
                event=number,
                phase=phase,
                micro_batch=micro_batch,
                device_bytes=tuple(sizes.values()),
            )

    def _living(self, changes: int) -> Iterable[Change]:
        """Return every storage with its bytes after so many changes."""
        living: dict[int, Change] = {}
        seen = (event for event in self.events if isinstance(event, Change))
        counted = [change for change in seen if not change.kind.is_within]
        for change in (*self.resident, *counted[:changes]):
            before = living[change.key].size if change.key in living else 0
            living[change.key] = replace(change, size=before + change.size)
        return living.values()

    def allocated(self) -> AllocatedStep:
        """Return what an allocator would see."""
        step = AllocatedStep()
        for change in self.resident:
            older = step.moments if change.kind.is_moment else step.resident
            older.append(AllocatorEvent(change.key, change.size))
        for event in self.events:
            if isinstance(event, Change):
                stream = event.kind.stream
                step.events.append(AllocatorEvent(event.key, event.size, stream))
            elif event.phase is Phase.UPDATE:
                step.update = len(step.events)
        return step


def _is_activation(change: Change) -> bool:
    return change.kind.state is State.ACTIVATIONS


def held(living: Iterable[Change]) -> list[LiveStorages]:
    """Return one row per kind, the largest first."""
    sizes: defaultdict[tuple[str, State], list[int]] = defaultdict(list)
    for storage in living:
        if storage.size:
            sizes[storage.kind.what, storage.kind.state].append(storage.size)
    rows = [
        LiveStorages(what=what, state=state, device_bytes=sum(of_kind), tensors=len(of_kind))
        for (what, state), of_kind in sizes.items()
    ]
    return sorted(rows, key=lambda row: (-row.device_bytes, row.what))
