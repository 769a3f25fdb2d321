"""The rules of the CUDA caching allocator, computed by hand: rounding, splitting, merging,
caching."""

from __future__ import annotations

import pytest

from ptrain.derivation.allocator import (
    COMPUTING,
    MIB,
    AllocatedStep,
    AllocatorEvent,
    CachingAllocator,
    steady_reserved,
)
from ptrain.report.simulation import reserved_lines

OTHER = "reduce_scatter_stream"


def reserved_mib(*events: tuple[int, float], expands: bool = False, stream: str = COMPUTING) -> int:
    """Return the MiB that are reserved after allocations (a key and its MiB) and frees (minus the
    key)."""
    allocator = CachingAllocator(expands=expands)
    sizes: dict[int, int] = {}
    for key, mib in events:
        if mib:
            sizes[key] = int(mib * MIB)
            allocator.run(AllocatorEvent(key, sizes[key], stream))
        else:
            allocator.run(AllocatorEvent(key, -sizes[key], stream))
    return allocator.reserved_by_stream.total() // MIB


@pytest.mark.parametrize(
    ("mib", "segment"),
    [(0.001, 2), (1, 2), (1.001, 20), (9.99, 20), (10, 10), (10.5, 12), (21, 22), (100, 100)],
)
def test_a_block_takes_a_segment_of_its_size(mib: float, segment: int) -> None:
    assert reserved_mib((1, mib)) == segment


@pytest.mark.parametrize(
    ("mib", "segment"), [(0.5, 2), (5, 20), (10, 20), (19.9, 20), (20.1, 40), (100, 100)]
)
def test_a_segment_that_expands_grows_by_pages(mib: float, segment: int) -> None:
    assert reserved_mib((1, mib), expands=True) == segment


def test_the_rest_of_a_packed_segment_is_used_before_another_segment() -> None:
    assert reserved_mib((1, 5), (2, 5), (3, 5), (4, 5)) == 20
    assert reserved_mib((1, 5), (2, 5), (3, 5), (4, 5), (5, 5)) == 40


def test_a_large_block_is_split_only_where_more_than_a_mib_is_left() -> None:
    """30 MiB are freed; 29 take all of them, so that 1 more needs a segment of its own."""
    assert reserved_mib((1, 30), (1, 0), (2, 29), (3, 1.5)) == 30 + 20
    assert reserved_mib((1, 30), (1, 0), (2, 28), (3, 1.5)) == 30


def test_neighbours_that_are_free_are_one_block_again() -> None:
    blocks = [(key, 5) for key in range(4)]
    freed = [(key, 0) for key in (1, 2)]
    assert reserved_mib(*blocks, *freed, (9, 9.5)) == 20  # 10 MiB in one piece
    assert reserved_mib(*blocks, (0, 0), (2, 0), (9, 9.5)) == 40  # 5 and 5 that are apart


def test_segments_that_do_not_expand_are_never_merged() -> None:
    assert reserved_mib((1, 30), (2, 30), (1, 0), (2, 0), (3, 60)) == 120
    assert reserved_mib((1, 30), (2, 30), (1, 0), (2, 0), (3, 60), expands=True) == 60


def test_small_and_large_blocks_have_separate_pools() -> None:
    assert reserved_mib((1, 5), (1, 0), (2, 0.5)) == 20 + 2


def test_streams_have_separate_pools() -> None:
    allocator = CachingAllocator(expands=False)
    allocator.run(AllocatorEvent(1, 30 * MIB))
    allocator.run(AllocatorEvent(1, -30 * MIB))
    allocator.run(AllocatorEvent(2, 30 * MIB, OTHER))
    assert allocator.reserved_by_stream == {COMPUTING: 30 * MIB, OTHER: 30 * MIB}


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    """2 MiB hold 4,096 blocks of 512 bytes, whatever is asked of them."""
    allocator = CachingAllocator(expands=False)
    for key in range(4096):
        allocator.run(AllocatorEvent(key, 1 + key % 512))
    assert allocator.reserved_by_stream.total() == 2 * MIB
    allocator.run(AllocatorEvent(-1, 1))
    assert allocator.reserved_by_stream.total() == 4 * MIB


def test_the_best_fit_is_taken() -> None:
    """12 MiB go where 12 were and leave the 30 whole."""
    assert reserved_mib((1, 30), (2, 12), (1, 0), (2, 0), (3, 12), (4, 30)) == 42


def step_of(*events: tuple[int, int], resident: int = 0, moments: int = 0) -> AllocatedStep:
    return AllocatedStep(
        resident=[AllocatorEvent(-1, resident * MIB)] if resident else [],
        moments=[AllocatorEvent(-2, moments * MIB)] if moments else [],
        events=[AllocatorEvent(key, size * MIB) for key, size in events],
        update=len(events),
    )


def test_a_step_reserves_live_memory_and_gaps() -> None:
    step = step_of((1, 40), (2, 30), (1, -40), (3, 20), (3, -20), (2, -30), resident=100)
    amount = steady_reserved(step, expands=False)
    assert amount is not None
    assert amount.device_bytes == 170 * MIB  # the 20 go where the 40 were
    assert amount.living == 170 * MIB
    assert amount.beyond == {COMPUTING: 0}


def test_moments_are_allocated_in_the_first_update_from_freed_memory() -> None:
    """After the first step 60 MiB are free and the moments take 50 of them: the second step has to
    reserve again."""
    step = step_of((1, 60), (1, -60), moments=50)
    amount = steady_reserved(step, expands=False)
    assert amount is not None
    assert amount.device_bytes == (60 + 60) * MIB
    assert amount.living == (60 + 50) * MIB
    assert amount.beyond == {COMPUTING: 10 * MIB}


def test_the_gap_is_the_largest_free_block_at_the_highest_live_memory() -> None:
    step = step_of((1, 30), (2, 30), (1, -30), (3, 40), (3, -40), (2, -30))
    amount = steady_reserved(step, expands=False)
    assert amount is not None
    assert (amount.living, amount.gap) == (70 * MIB, 30 * MIB)
    assert amount.device_bytes == 100 * MIB


def test_a_report_shows_reserved_memory_without_a_claim() -> None:
    step = step_of((1, 30), (1, -30), resident=100)
    kinds = {"default segments": steady_reserved(step, expands=False), "a kind that grows": None}
    _, table, why = reserved_lines(kinds)
    assert "reserved by CUDA's allocator" in table and "130 MiB" in table and "grows on" in table
    assert why.startswith("not claimed: ")
    assert reserved_lines({}) == []
