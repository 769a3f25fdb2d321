"""What torch's caching allocator of CUDA would reserve for the births and deaths of a step.

Reserved is not what lives: the allocator keeps what was freed, stream by stream, and the gaps
between. Its rules (c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13): sizes are rounded up to
512 bytes; blocks of at most 1 MiB and larger ones have pools of their own, as has each stream; the
best fit is taken, split where enough is left, and merged with its free neighbours when it is given
back; a segment is 2 MiB for small blocks, 20 MiB for those below 10 MiB, else a multiple of 2 MiB.
Segments that expand (`expandable_segments:True`) grow by such pages in place. Nothing is fitted.

Note: NCCL's buffers, and what nobody knows that operators take, are not among a step's events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 2**20
COMPUTING = "computing"  # the stream that everything is in which is in no other
_ROUNDED = 512
_SMALL = MIB  # the largest block of a small pool
_PACKED = 10 * MIB  # from here on a segment has one block
_SMALL_PAGE, _LARGE_PAGE = 2 * MIB, 20 * MIB
_MOST_STEPS = 32  # until nothing grows


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """`size` bytes are allocated under `key`, or freed (negative), with `stream` current."""

    key: int
    size: int
    stream: str = COMPUTING


@dataclass(slots=True)
class AllocatedStep:
    """What lived before a step, what an optimizer's first update adds to it if it does, every
    change within it, and with which change the update begins."""

    resident: list[AllocatorEvent] = field(default_factory=list)
    moments: list[AllocatorEvent] = field(default_factory=list)
    events: list[AllocatorEvent] = field(default_factory=list)
    update: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Bytes that stay reserved once nothing grows; `living` at most at once, with what kernels
    take, `gap` the largest free block where all is computed at that moment, and by stream what is
    reserved beyond what lived."""

    device_bytes: int
    living: int
    gap: int
    beyond: dict[str, int]


def reserved(step: AllocatedStep, *, expands: bool) -> Reserved | None:
    """Return what is reserved after the first step, which makes the moments, and as many more as it
    takes until nothing grows; None where something still does after 32. `expands`: with segments
    that do."""
    allocator = CachingAllocator(expands=expands)
    forward, update = step.events[: step.update], step.events[step.update :]
    for event in (*step.resident, *forward, *step.moments, *update):
        allocator.run(event)
    for _ in range(_MOST_STEPS):
        before = allocator.reserved.total()
        allocator.settle((*step.resident, *step.moments))
        for event in step.events:
            allocator.run(event)
        if allocator.reserved.total() == before:
            living = allocator.at_peak.total()
            beyond = Counter(allocator.reserved)
            beyond.subtract(allocator.at_peak)
            return Reserved(
                device_bytes=before, living=living, gap=allocator.gap, beyond=dict(beyond)
            )
    return None


class CachingAllocator:
    """Pools by stream and kind. When most lived in all of them: what lived in each stream, and the
    largest gap where all is computed."""

    def __init__(self, *, expands: bool) -> None:
        self.expands = expands
        self.at_peak: Counter[str] = Counter()
        self.gap = 0
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._live: Counter[str] = Counter()
        self._held: dict[int, tuple[AllocatorEvent, int, int]] = {}

    def run(self, event: AllocatorEvent) -> None:
        """Allocate or free."""
        if event.size > 0:
            self._held[event.key] = event, *self._pool(event).allocate(event.size)
            self._live[event.stream] += event.size
        else:
            birth, address, size = self._held.pop(event.key)
            self._pool(birth).release(address, size)
            self._live[birth.stream] -= birth.size
        if self._live.total() > self.at_peak.total():
            self.at_peak = self._live.copy()
            where = self._pools.get((COMPUTING, False))
            self.gap = max(where.free, default=(0, 0))[0] if where else 0

    def settle(self, resident: Sequence[AllocatorEvent]) -> None:
        """After a step: what outlives it takes the place of what it replaced."""
        there = {event.key for event in resident}
        for key in [key for key in self._held if key not in there]:
            self.run(AllocatorEvent(key, -1))
        for event in resident:
            if event.key not in self._held:
                self.run(event)

    @property
    def reserved(self) -> Counter[str]:
        """By stream."""
        sums: Counter[str] = Counter()
        for (stream, _), pool in self._pools.items():
            sums[stream] += pool.reserved
        return sums

    def _pool(self, event: AllocatorEvent) -> Pool:
        is_small = event.size <= _SMALL
        key = event.stream, is_small
        if key not in self._pools:
            self._pools[key] = Pool(is_small=is_small, expands=self.expands)
        return self._pools[key]


class Pool:
    """Small or large blocks of one stream: best fit, split, merged with free neighbours, never
    given back. A segment that expands grows by pages, and its end is taken last."""

    def __init__(self, *, is_small: bool, expands: bool) -> None:
        self.is_small, self.expands = is_small, expands
        self.reserved = self._top = 0
        self.free: list[tuple[int, int]] = []  # size, address
        self._starts: dict[int, int] = {}  # address to size
        self._ends: dict[int, int] = {}  # end to address

    def allocate(self, requested: int) -> tuple[int, int]:
        """Return the address and the size of a block for so many bytes."""
        size = -(-requested // _ROUNDED) * _ROUNDED
        address, block = self._fitting(size) or self._grown(size)
        if block - size >= (_ROUNDED if self.is_small or self.expands else MIB + 1):
            self._insert(address + size, block - size)
            block = size
        return address, block

    def release(self, address: int, size: int) -> None:
        """Take a block back."""
        if address in self._ends:
            address = self._ends[address]
            size += self._remove(address)
        if address + size in self._starts:
            size += self._remove(address + size)
        self._insert(address, size)

    def _fitting(self, size: int) -> tuple[int, int] | None:
        best = self.free[(place := bisect_left(self.free, (size, 0))) : place + 2]
        if self.expands and len(best) == 2 and sum(best[0]) == self._top:
            del best[0]
        return (best[0][1], self._remove(best[0][1])) if best else None

    def _grown(self, size: int) -> tuple[int, int]:
        address, there = self._top, 0
        if not self.expands:
            address += 1  # apart from the segment before: never merged
        elif self._top in self._ends:
            address = self._ends[self._top]
            there = self._remove(address)
        is_packed = not self.is_small and (self.expands or size < _PACKED)
        page = _LARGE_PAGE if is_packed else _SMALL_PAGE
        more = -(-(size - there) // page) * page
        self._top = address + there + more
        self.reserved += more
        return address, there + more

    def _insert(self, address: int, size: int) -> None:
        insort(self.free, (size, address))
        self._starts[address], self._ends[address + size] = size, address

    def _remove(self, address: int) -> int:
        size = self._starts.pop(address)
        del self._ends[address + size]
        self.free.pop(bisect_left(self.free, (size, address)))
        return size
