"""What the data axes cost: shards with their padding, gathers and reductions per step, buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, product
from typing import NamedTuple

from ptrain.spec.dials import STOCK_BUCKET_BYTES, GradientSync, SyncPolicy
from ptrain.spec.placement import REDUCED_AXES, Axis, without
from ptrain.units import ceil_div, row_major

FIRST_BUCKET_BYTES = 2**20  # of the stock buckets: small, so that the first reduction starts early

Run = tuple[int, int, bool]  # start, end, flag: elements of a buffer


def row_numel(shape: tuple[int, ...]) -> int:
    """Elements in one row of dim 0."""
    return math.prod(shape[1:])


def padded_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of one shard over dim 0, padding included: ceil(d0 / N) rows on every rank."""
    return ceil_div(shape[0] if shape else 1, ranks) * row_numel(shape)


def local_rows(shape: tuple[int, ...], ranks: int, index: int) -> int:
    """Elements that shard `index` really holds: rows [i*c, (i+1)*c) of d0, c = ceil(d0 / N)."""
    rows = shape[0] if shape else 1
    chunk = ceil_div(rows, ranks)
    return (min(rows, (index + 1) * chunk) - min(rows, index * chunk)) * row_numel(shape)


def padded_flat(numel: int, ranks: int) -> int:
    """Elements of a flat buffer that `ranks` shards divide."""
    return ceil_div(numel, ranks) * ranks


def in_memory(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes that cut a flat buffer, as it lies in memory: replicas, which stand outermost
    in a mesh, last. So a shard over all others lies in group order."""
    there = {*axes}
    return tuple(axis for axis in (*REDUCED_AXES[1:], REDUCED_AXES[0]) if axis in there)


def lies_in_group_order(memory: Sequence[Axis], cut: Sequence[Axis], over: Sequence[Axis]) -> bool:
    """Return whether the parts of a group along `over` lie one after the other in a shard over
    `cut` of a buffer that all of `memory` cut. A group counts its ranks in mesh order."""
    parts = without(memory, cut)
    group = tuple(axis for axis in REDUCED_AXES if axis in over)
    return parts[: len(group)] == group


def stretches(
    padded: int, degrees: Sequence[int], places: Sequence[int | None]
) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each stretch of a shard in a whole flat buffer, viewed as
    [*degrees, c]. The shard has one place along a dimension, or (None) all."""
    size = padded // math.prod(degrees)
    own = (
        range(degree) if place is None else (place,)
        for degree, place in zip(degrees, places, strict=True)
    )
    for coordinates in product(*own):
        index = row_major(zip(coordinates, degrees, strict=True))
        yield index * size, (index + 1) * size


def runs(
    tensors: Sequence[tuple[int, bool]], padded: int, within: Iterable[tuple[int, int]]
) -> Iterator[Run]:
    """Yield the runs of elements of equal flags in a shard made of the stretches `within`;
    `tensors` are elements and flag of each in the whole buffer. Padding belongs to the last of
    them."""
    return _merged(_overlaps(whole_runs(tuple(tensors), padded), within))


@lru_cache(maxsize=2**10)
def whole_runs(tensors: tuple[tuple[int, bool], ...], padded: int) -> tuple[Run, ...]:
    """Return the runs of elements of equal flags in the whole buffer."""
    ends = list(accumulate(numel for numel, _ in tensors))
    ends[-1] = padded
    flags = (flag for _, flag in tensors)
    return tuple(_merged(zip([0, *ends], ends, flags, strict=False)))


@lru_cache(maxsize=2**16)
def shard_runs(
    tensors: tuple[tuple[int, bool], ...],
    padded: int,
    degrees: tuple[int, ...],
    places: tuple[int | None, ...],
) -> tuple[Run, ...]:
    """Return the runs of elements of equal flags in one shard of a buffer. A search asks of the
    same units thousands of times."""
    return tuple(runs(tensors, padded, stretches(padded, degrees, places)))


def _overlaps(whole: Sequence[Run], within: Iterable[tuple[int, int]]) -> Iterator[Run]:
    start = 0
    for first, last in within:
        for begin, end, flag in whole:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield start + low - first, start + high - first, flag
        start += last - first


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Join runs that follow one another and have equal flags, and leave out empty ones."""
    for flag, group in groupby((run for run in runs if run[0] < run[1]), key=lambda run: run[2]):
        members = list(group)
        yield members[0][0], members[-1][1], flag


class GatherCounts(NamedTuple):
    """How often one unit is gathered in a step."""

    forward: int
    backward: int


def gathers(sync: SyncPolicy, micro_batches: int, *, is_root: bool = False) -> GatherCounts:
    """A unit is gathered where a pass finds it sharded: at first, and after every reshard."""
    forward = backward = 0
    sharded = True
    for _ in range(micro_batches):
        forward += sharded
        sharded = bool(sync.after_forward(is_root=is_root))
        backward += sharded
        sharded = sync.reshard_after_backward
    return GatherCounts(forward, backward)


def kept_ranks(sync: SyncPolicy, ranks: int, *, is_root: bool = False) -> int:
    """Over how many ranks a unit is spread between its forward and its backward: all of `ranks`, a
    smaller group of them, or 1 where it stays gathered."""
    after_forward = sync.after_forward(is_root=is_root)
    if isinstance(after_forward, bool):
        return ranks if after_forward else 1
    return after_forward


def spread(numels: Sequence[int], ranks: int) -> list[int]:
    """Return which rank owns each of these tensors: the largest first, each goes to the rank that
    has least so far (the partition of torch's ZeroRedundancyOptimizer)."""
    owners, held = [0] * len(numels), [0] * ranks
    for index in sorted(range(len(numels)), key=numels.__getitem__, reverse=True):
        owner = held.index(min(held))
        owners[index] = owner
        held[owner] += numels[index]
    return owners


def reductions(sync: SyncPolicy, micro_batches: int) -> int:
    """Return how often a unit's gradients are reduced in a step."""
    return 1 if sync.gradients is GradientSync.LAST else micro_batches


def bucket_caps(bucket_bytes: int) -> tuple[int, ...]:
    """DDP's caps in the order of its buckets; a size of the user's own holds for the first too."""
    if bucket_bytes == STOCK_BUCKET_BYTES:
        return (FIRST_BUCKET_BYTES, STOCK_BUCKET_BYTES)
    return (bucket_bytes,)


def bucket_sizes(tensor_bytes: Iterable[int], caps: Sequence[int]) -> list[int]:
    """Bytes of DDP's buckets when tensors arrive in this order.

    A bucket closes as soon as it reaches its cap; the last cap holds for all that follow.
    """
    buckets: list[int] = []
    filled = 0
    for size in tensor_bytes:
        filled += size
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets
