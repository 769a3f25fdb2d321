"""Simulates the CUDA caching allocator of PyTorch on the allocations and frees of a step.

Reserved memory exceeds live memory: the allocator caches freed blocks by stream, and leaves gaps
between blocks. Rules (c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13):

- Sizes are rounded up to 512 bytes.
- Blocks up to 1 MiB and larger blocks come from separate pools. Each stream has its pools.
- The best fit is taken, split if enough remains, and merged with free neighbours when freed.
- A segment is 2 MiB for small blocks, 20 MiB for blocks below 10 MiB, else a multiple of 2 MiB.
- Segments with `expandable_segments:True` grow in place by such pages.

No constant is fitted to measurements.

Note:
    A step's events contain neither the buffers of NCCL nor unknown workspaces of operators.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 2**20
COMPUTING = "computing"  # the default stream
# c10/core/AllocatorConfig.h, torch 2.13, has these constants. `large_segment_size_mb` can change
# the page of large blocks. It is assumed to be unset.
_ROUNDED = 512  # kMinBlockSize
_SMALL = MIB  # kSmallSize: the largest block of a small pool
_PACKED = 10 * MIB  # kMinLargeAlloc: larger segments hold one block
_SMALL_PAGE, _LARGE_PAGE = 2 * MIB, 20 * MIB
# Best fit can settle late, because each step starts from the free blocks of the previous one. After
# so many steps without a fixed point, no figure is better than one that still grows.
_MOST_STEPS = 32


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """An allocation of `size` bytes under `key` on `stream`, or the free of `key` (negative
    `size`)."""

    key: int
    size: int
    stream: str = COMPUTING


@dataclass(slots=True)
class AllocatedStep:
    """The allocations of one training step.

    Attributes:
        resident: Allocations that exist before the step.
        moments: Allocations that the optimizer's first update makes and keeps.
        events: Allocations and frees within the step, in order.
        update: Index in `events` at which the update begins.
    """

    resident: list[AllocatorEvent] = field(default_factory=list)
    moments: list[AllocatorEvent] = field(default_factory=list)
    events: list[AllocatorEvent] = field(default_factory=list)
    update: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The memory that the allocator reserves in steady state.

    Attributes:
        device_bytes: Reserved bytes once they no longer grow from step to step.
        living: Peak of live bytes, including workspaces of kernels.
        gap: Bytes of the largest free large block of the computing stream at that peak.
        beyond: By stream, reserved bytes minus the bytes that were live at the peak.
    """

    device_bytes: int
    living: int
    gap: int
    beyond: dict[str, int]


def steady_reserved(step: AllocatedStep, *, expands: bool) -> Reserved | None:
    """Return the memory that the allocator reserves after repeated steps.

    The first step allocates the moments. Steps are repeated until the reserved bytes stay equal.

    Args:
        step: The allocations of the step.
        expands: True for `expandable_segments:True`.

    Returns:
        The steady state, or None if the reserved bytes still grow after 32 repeated steps.
    """
    allocator = CachingAllocator(expands=expands)
    # torch's optimizers allocate their state in the first update. The moments of the first step
    # therefore lie after the activations' segments, not next to the parameters. All later steps see
    # these addresses.
    forward, update = step.events[: step.update], step.events[step.update :]
    for event in (*step.resident, *forward, *step.moments, *update):
        allocator.run(event)
    for _ in range(_MOST_STEPS):
        before = allocator.reserved_by_stream.total()
        allocator.end_step((*step.resident, *step.moments))
        for event in step.events:
            allocator.run(event)
        if allocator.reserved_by_stream.total() == before:
            living = allocator.at_peak.total()
            beyond = Counter(allocator.reserved_by_stream)
            beyond.subtract(allocator.at_peak)
            return Reserved(
                device_bytes=before, living=living, gap=allocator.gap, beyond=dict(beyond)
            )
    return None


class CachingAllocator:
    """The allocator of one device, with a pool for each stream and block size class.

    `at_peak` has the live bytes by stream when the total was highest. `gap` is the size of the
    largest free large block of the computing stream at that moment.
    """

    def __init__(self, *, expands: bool) -> None:
        self.expands = expands
        self.at_peak: Counter[str] = Counter()
        self.gap = 0
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._live: Counter[str] = Counter()
        self._held: dict[int, tuple[AllocatorEvent, int, int]] = {}

    def run(self, event: AllocatorEvent) -> None:
        """Execute an event: allocate, or free the block of its key.

        Args:
            event: An allocation if its size in bytes is positive, else the free of its key.

        Raises:
            KeyError: The event frees a key without a block.
        """
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

    def end_step(self, resident: Sequence[AllocatorEvent]) -> None:
        """End a step: free all blocks except `resident`, then allocate the missing `resident`
        blocks."""
        # A stream of a step may end with storages that the next step frees. Freeing them here makes
        # every repetition start from equal live bytes. Otherwise the reserved bytes would never be
        # steady.
        there = {event.key for event in resident}
        for key in [key for key in self._held if key not in there]:
            self.run(AllocatorEvent(key, -1))
        for event in resident:
            if event.key not in self._held:
                self.run(event)

    @property
    def reserved_by_stream(self) -> Counter[str]:
        """Reserved bytes by stream."""
        sums: Counter[str] = Counter()
        for (stream, _), pool in self._pools.items():
            sums[stream] += pool.reserved
        return sums

    def _pool(self, event: AllocatorEvent) -> Pool:
        # `get_pool` selects the pool by the rounded size. Rounding to 512 bytes moves no size over
        # 1 MiB, so the size as requested gives the same pool.
        is_small = event.size <= _SMALL
        key = event.stream, is_small
        if key not in self._pools:
            self._pools[key] = Pool(is_small=is_small, expands=self.expands)
        return self._pools[key]


class Pool:
    """The small or the large blocks of one stream.

    Blocks are taken by best fit, split, and merged with free neighbours. Segments are never
    returned to the device. An expandable segment grows by pages, and the free block at its end is
    used last.
    """

    def __init__(self, *, is_small: bool, expands: bool) -> None:
        self.is_small, self.expands = is_small, expands
        self.reserved = self._top = 0
        self.free: list[tuple[int, int]] = []  # size, address
        self._starts: dict[int, int] = {}  # address to size
        self._ends: dict[int, int] = {}  # end to address

    def allocate(self, requested: int) -> tuple[int, int]:
        """Return the address and the size of a block of at least `requested` bytes.

        Args:
            requested: Bytes of the allocation, before the allocator rounds them.
        """
        size = -(-requested // _ROUNDED) * _ROUNDED
        address, block = self._take_fitting(size) or self._grow(size)
        # `should_split`: a remainder of a large block that is no larger than kSmallSize would fit
        # no request to the large pool. It stays with its block. Expandable segments split at any
        # remainder, as small pools do.
        if block - size >= (_ROUNDED if self.is_small or self.expands else MIB + 1):
            self._insert(address + size, block - size)
            block = size
        return address, block

    def release(self, address: int, size: int) -> None:
        """Free a block and merge it with the free blocks next to it.

        Args:
            address: Address of the block, as `allocate` returned it.
            size: Bytes of the block, as `allocate` returned them, not the requested bytes.
        """
        if address in self._ends:
            address = self._ends[address]
            size += self._remove(address)
        if address + size in self._starts:
            size += self._remove(address + size)
        self._insert(address, size)

    def _take_fitting(self, size: int) -> tuple[int, int] | None:
        """Remove and return the (address, size) of the smallest free block that fits, or None."""
        best = self.free[(place := bisect_left(self.free, (size, 0))) : place + 2]
        # `get_free_block` ranks the block at the end of an expandable segment by the size to which
        # it can grow. Any other block that fits is therefore preferred.
        if self.expands and len(best) == 2 and sum(best[0]) == self._top:
            del best[0]
        return (best[0][1], self._remove(best[0][1])) if best else None

    def _grow(self, size: int) -> tuple[int, int]:
        """Reserve more memory and return the (address, size) of a new free block."""
        address, there = self._top, 0
        if not self.expands:
            address += 1  # a gap after the previous segment: blocks of two segments never merge
        elif self._top in self._ends:
            address = self._ends[self._top]
            there = self._remove(address)
        # `get_allocation_size`: blocks below kMinLargeAlloc share a segment of 20 MiB. With
        # expandable segments this is the page of the large pool for all sizes.
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
