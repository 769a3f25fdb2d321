"""Costs of the data axes: padded shards, all-gathers and reductions per step, and buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, product
from typing import NamedTuple

from ptrain.spec.dials import STOCK_BUCKET_BYTES, GradientSync, SyncPolicy
from ptrain.spec.placement import REDUCED_AXES, Axis, exclude_axes
from ptrain.units import ceil_div, row_major

# DDP's first default bucket: small, so that the first reduction starts early
FIRST_BUCKET_BYTES = 2**20

Run = tuple[int, int, bool]  # start and end (elements of a buffer), flag


def row_numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements in one row of dim 0."""
    return math.prod(shape[1:])


def padded_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of one shard over dim 0, padding included.

    Args:
        shape: The shape of the full tensor; () counts as one row.
        ranks: The number N of shards.

    Returns:
        The elements of ceil(d0 / N) rows.
    """
    return ceil_div(shape[0] if shape else 1, ranks) * row_numel(shape)


def local_rows(shape: tuple[int, ...], ranks: int, index: int) -> int:
    """Return the elements of shard `index` without padding.

    The shard has rows [i*c, (i+1)*c) of d0, with c = ceil(d0 / N).

    Args:
        shape: Shape of the full tensor.
        ranks: Number of shards.
        index: Index of the shard.
    """
    rows = shape[0] if shape else 1
    chunk = ceil_div(rows, ranks)
    return (min(rows, (index + 1) * chunk) - min(rows, index * chunk)) * row_numel(shape)


def padded_flat(numel: int, ranks: int) -> int:
    """Return the elements of a flat buffer, padded so that `ranks` shards divide it.

    Args:
        numel: The elements of the buffer without padding.
        ranks: The number of shards.

    Returns:
        The elements of the full buffer, not of one shard.
    """
    return ceil_div(numel, ranks) * ranks


def in_memory(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes that shard a flat buffer in memory order.

    Replicas, which are outermost in a mesh, come last, so that a shard over all other axes is in
    group order.
    """
    there = {*axes}
    return tuple(axis for axis in (*REDUCED_AXES[1:], REDUCED_AXES[0]) if axis in there)


def lies_in_group_order(memory: Sequence[Axis], cut: Sequence[Axis], over: Sequence[Axis]) -> bool:
    """Return True if a group's parts along `over` are contiguous and in rank order.

    Args:
        memory: All axes that shard the buffer, in memory order.
        cut: Axes of the shard that contains the parts.
        over: Axes of the group, whose ranks are in mesh order.
    """
    parts = exclude_axes(memory, cut)
    group = tuple(axis for axis in REDUCED_AXES if axis in over)
    return parts[: len(group)] == group


def shard_ranges(
    padded: int, degrees: Sequence[int], places: Sequence[int | None]
) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each contiguous range of a shard within the full flat buffer.

    Args:
        padded: Elements of the buffer, which is viewed as [*degrees, c].
        degrees: Ranks along each dimension.
        places: The shard's index along each dimension, None for all indices.
    """
    size = padded // math.prod(degrees)
    own = (
        range(degree) if place is None else (place,)
        for degree, place in zip(degrees, places, strict=True)
    )
    for coordinates in product(*own):
        index = row_major(zip(coordinates, degrees, strict=True))
        yield index * size, (index + 1) * size


def iter_runs(
    tensors: Sequence[tuple[int, bool]], padded: int, within: Iterable[tuple[int, int]]
) -> Iterator[Run]:
    """Yield the runs of elements with equal flags in a shard.

    Args:
        tensors: Elements and flag of each tensor of the full buffer. Padding counts to the last.
        padded: Elements of the buffer.
        within: The ranges (start, end) of the buffer that the shard consists of.
    """
    return _merge_runs(_runs_within(whole_runs(tuple(tensors), padded), within))


@lru_cache(maxsize=2**10)
def whole_runs(tensors: tuple[tuple[int, bool], ...], padded: int) -> tuple[Run, ...]:
    """Return the runs of elements with equal flags in the full buffer.

    Args:
        tensors: Elements and flag of each tensor in order, at least one.
        padded: The elements of the buffer. Padding counts to the last tensor.
    """
    ends = list(accumulate(numel for numel, _ in tensors))
    ends[-1] = padded
    flags = (flag for _, flag in tensors)
    return tuple(_merge_runs(zip([0, *ends], ends, flags, strict=False)))


@lru_cache(maxsize=2**16)
def shard_runs(
    tensors: tuple[tuple[int, bool], ...],
    padded: int,
    degrees: tuple[int, ...],
    places: tuple[int | None, ...],
) -> tuple[Run, ...]:
    """Return the runs of elements with equal flags in one shard, cached.

    A search needs the runs of the same units thousands of times.

    Args:
        tensors: Elements and flag of each tensor of the full buffer.
        padded: Elements of the buffer.
        degrees: Ranks along each dimension.
        places: The shard's index along each dimension, None for all indices.
    """
    return tuple(iter_runs(tensors, padded, shard_ranges(padded, degrees, places)))


def _runs_within(whole: Sequence[Run], within: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """Yield the parts of runs that lie within the ranges, as positions in the shard."""
    start = 0
    for first, last in within:
        for begin, end, flag in whole:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield start + low - first, start + high - first, flag
        start += last - first


def _merge_runs(runs: Iterable[Run]) -> Iterator[Run]:
    """Join consecutive runs with equal flags, and drop empty ones."""
    for flag, group in groupby((run for run in runs if run[0] < run[1]), key=lambda run: run[2]):
        members = list(group)
        yield members[0][0], members[-1][1], flag


class GatherCounts(NamedTuple):
    """The numbers of all-gathers of one unit in a step."""

    forward: int
    backward: int


def count_gathers(sync: SyncPolicy, micro_batches: int, *, is_root: bool = False) -> GatherCounts:
    """Return the numbers of all-gathers of a unit: one per pass that finds it sharded.

    It is sharded at the start of a step and after every reshard.

    Args:
        sync: When units are resharded.
        micro_batches: Micro-batches per step.
        is_root: The unit is the root, which `non-root` keeps gathered.
    """
    forward = backward = 0
    sharded = True
    for _ in range(micro_batches):
        forward += sharded
        sharded = bool(sync.after_forward(is_root=is_root))
        backward += sharded
        sharded = sync.reshard_after_backward
    return GatherCounts(forward, backward)


def kept_ranks(sync: SyncPolicy, ranks: int, *, is_root: bool = False) -> int:
    """Return the number of ranks that shard a unit between its forward and its backward.

    Args:
        sync: When units are resharded.
        ranks: The ranks that shard it otherwise.
        is_root: The unit is the root, which `non-root` keeps gathered.

    Returns:
        `ranks`, the size of a smaller group, or 1 if the unit stays gathered.
    """
    after_forward = sync.after_forward(is_root=is_root)
    if isinstance(after_forward, bool):
        return ranks if after_forward else 1
    return after_forward


def assign_owners(numels: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each tensor, like torch's ZeroRedundancyOptimizer.

    The largest tensor goes first; each goes to the rank with the fewest elements so far.

    Args:
        numels: The elements of each tensor.
        ranks: The number of ranks.

    Returns:
        The owner of each tensor, in the order of `numels`.
    """
    owners, held = [0] * len(numels), [0] * ranks
    # torch's `_partition_parameters` sorts in this way too
    # (torch/distributed/optim/zero_redundancy_optimizer.py, 2.13).
    for index in sorted(range(len(numels)), key=numels.__getitem__, reverse=True):
        owner = held.index(min(held))
        owners[index] = owner
        held[owner] += numels[index]
    return owners


def count_reductions(sync: SyncPolicy, micro_batches: int) -> int:
    """Return the number of reductions of a unit's gradients in a step.

    Args:
        sync: The policy: reduce after the last micro-batch only, or after each.
        micro_batches: The micro-batches of a rank in one step.
    """
    return 1 if sync.gradients is GradientSync.LAST else micro_batches


def bucket_caps(bucket_bytes: int) -> tuple[int, ...]:
    """Return DDP's bucket caps in bytes, in order; the last cap applies to all further buckets.

    DDP's smaller first bucket exists with the default size only.
    """
    if bucket_bytes == STOCK_BUCKET_BYTES:
        return (FIRST_BUCKET_BYTES, STOCK_BUCKET_BYTES)
    return (bucket_bytes,)


def bucket_sizes(tensor_bytes: Iterable[int], caps: Sequence[int]) -> list[int]:
    """Return the bytes of DDP's buckets for tensors that arrive in this order.

    A bucket closes as soon as it reaches its cap. The last cap applies to all further buckets.
    """
    buckets: list[int] = []
    filled = 0
    for size in tensor_bytes:
        filled += size
        # Checked after the tensor is added, as in `compute_bucket_assignment_by_size`
        # (reducer.cpp).
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets
