"""Programs for both runtimes: every primitive in isolation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ptrain.cost import State
from ptrain.runtime.interface import PendingResult
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from tests.unit.both_runtimes import WatchedRuntime

DEVICE = Tier.DEVICE
THETA, OMEGA, G = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
OUTER, INNER = Axis.DP_REPLICATE, Axis.DP_SHARD
BOTH = (OUTER, INNER)
SHAPE = (3, 2, 4)
Statements = Iterator[Sequence[Any]]


def make_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Make tensors of every tier and dtype, a scalar and None, and free them."""
    room = on.room
    for tier in Tier:
        for dtype in (DType.FP32, DType.BF16, DType.FP64):
            tensor = room.new_empty(7, dtype, tier, OMEGA, "a")
            yield (tensor,)
            zeros = room.zeros(5, dtype, tier, G)
            scalar = room.new_empty(None, dtype, tier, THETA)
            yield tensor, zeros, scalar
            del tensor
            yield zeros, scalar
            del zeros, scalar
            yield ()
    nothing = room.new_empty(0, DType.FP32, DEVICE, OMEGA)
    yield (nothing,)


def make_results(on: WatchedRuntime[Any]) -> Statements:
    """Compute tensors: a result is in memory on its input's device, with its state if requested."""
    room = on.room
    for tier in Tier:
        source = room.new_empty(24, DType.FP32, tier, OMEGA, "source")
        yield (source, room.empty_like(source, 5))
        yield (source, room.zeros_like(source, DType.BF16))
        yield (source, room.scalar_like(source, DType.FP64))
        cube = room.view_range(source, 0, SHAPE)
        yield (cube, room.zeros_like(cube, DType.FP32))
        yield (cube, room.zeros_like(cube, DType.FP32, SHAPE[:-1]))
        del source
        yield (cube,)


def cast_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Cast to another dtype, to the same, and to a copy; with and without a state and a name."""
    room = on.room
    for tier in Tier:
        source = room.new_empty(6, DType.FP32, tier, OMEGA, "source")
        view = room.view_range(source, 2, (2, 2))
        for dtype in (DType.FP32, DType.BF16, DType.FP64):
            for copy in (False, True):
                yield source, view, room.cast(source, dtype, copy=copy)
                yield source, view, room.cast(view, dtype, G, copy=copy)
                yield source, view, room.cast(source, dtype, THETA, "other", copy=copy)
                yield source, view, room.cast(source, dtype, None, "nameless", copy=copy)
        other = room.cast(source, DType.BF16)
        del source, view
        yield (other,)


def move_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Move a vector, a view of it, a matrix and a scalar between all tiers."""
    room = on.room
    for source_tier in Tier:
        source = room.new_empty(24, DType.FP32, source_tier, OMEGA, "source")
        scalar = room.new_empty(None, DType.FP32, source_tier, THETA)
        untagged = room.cast(source, DType.BF16)
        for tier in Tier:
            yield source, room.copy_to_tier(source, tier, G)
            yield source, room.copy_to_tier(room.view_range(source, 4, (3, 2)), tier, G)
            yield source, room.copy_to_tier(room.view_window(source, SHAPE, {1: 1}), tier, G)
            yield scalar, room.copy_to_tier(scalar, tier, THETA)
            yield source, room.copy_to_tier(untagged, tier, OMEGA)


def copy_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Copy between tiers: the state is the target's, or otherwise the source's."""
    room = on.room
    for source_tier in Tier:
        source = room.new_empty(6, DType.FP32, source_tier, OMEGA, "source")
        untagged = room.cast(source, DType.BF16)
        for tier in Tier:
            into = room.new_empty(6, DType.FP32, tier, G, "into")
            room.copy(source, into)
            yield source, into
            room.copy(room.view_range(source, 2, (2, 2)), room.view_range(into, 0, (4,)))
            yield source, into
            room.copy(source, room.cast(into, DType.BF16))
            room.copy(untagged, into)
            yield source, into


def copy_tensor_lists(on: WatchedRuntime[Any]) -> Statements:
    """Cast and copy several tensors with one operator each."""
    room = on.room
    for tier in Tier:
        sources = [room.new_empty(size, DType.FP32, tier, OMEGA, "source") for size in (6, 4)]
        for dtype in (DType.FP32, DType.BF16, DType.FP64):
            yield *sources, *room.cast_all(sources, dtype)
        places = [room.new_empty(size, DType.BF16, tier, G, "place") for size in (6, 4)]
        room.copy_all([*zip(sources, places, strict=True)])
        yield *sources, *places


def add_in_place(on: WatchedRuntime[Any]) -> Statements:
    """Add in place, in memory and in a file."""
    room = on.room
    for tier in Tier:
        total = room.zeros(6, DType.FP32, tier, G)
        room.add(total, room.new_empty(6, DType.FP32, tier, G))
        yield (total,)
        room.add(total, room.cast(total, DType.BF16))
        yield (total,)
        room.fill_zeros(total)
        yield (total,)


def view_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Make views: they have an offset, share the storage, and keep it alive."""
    room = on.room
    for tier in Tier:
        whole = room.new_empty(24, DType.FP32, tier, THETA, "whole")
        piece = room.view_range(whole, 4, (5, 2))
        inner = room.view_range(piece, 2, (3,))
        row = room.view_window(whole, SHAPE, {0: 2})
        column = room.view_window(whole, SHAPE, {1: 1, 2: 3})
        all_of_it = room.view_window(whole, SHAPE, {})
        flat, flat_row = room.flatten(all_of_it), room.flatten(row)
        yield whole, piece, inner, row, column, all_of_it, flat, flat_row
        for left, right in ((whole, flat), (whole, piece), (row, flat_row), (piece, inner)):
            yield (left, right) if room.is_same_memory(left, right) else ()
        copy = room.cast(whole, DType.FP32, copy=True)
        yield (copy,) if room.is_same_memory(whole, copy) else ()
        del whole, piece, row, column, all_of_it, flat, flat_row, left, right, copy
        yield (inner,)
        del inner
        yield ()


def permute_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Permute into a copy in any order, and back into an existing tensor."""
    room = on.room
    for tier in Tier:
        tensor = room.new_empty(24, DType.FP32, tier, G, "g")
        for order in ((1, 0, 2), (2, 1, 0), (0, 1, 2)):
            lying = room.permute(tensor, SHAPE, order)
            yield tensor, lying
            room.unpermute(lying, SHAPE, order, tensor)
            del lying
            yield (tensor,)


def resize_storages(on: WatchedRuntime[Any]) -> Statements:
    """Free and allocate the bytes of a tensor that stays, and of its views."""
    room = on.room
    tensor = room.zeros(24, DType.FP32, DEVICE, THETA, "unit")
    view = room.view_range(tensor, 3, (2, 2))
    room.free_storage(tensor)
    yield ()
    room.free_storage(tensor)
    yield tensor, view
    room.allocate_storage(tensor)
    yield tensor, view
    room.allocate_storage(tensor)
    yield tensor, view
    room.free_storage(tensor)
    del tensor
    yield (view,)


def advise_files(on: WatchedRuntime[Any]) -> Statements:
    """Advise a file: it allocates nothing and moves nothing."""
    room = on.room
    for tier in Tier:
        tensor = room.new_empty(24, DType.FP32, tier, OMEGA)
        room.prefetch(tensor)
        room.prefetch(room.view_range(tensor, 4, (4,)))
        yield (tensor,)


def gather_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Gather along one axis, the other, and both; synchronously or not."""
    room = on.room
    for axes in ((OUTER,), (INNER,), BOTH, (INNER, OUTER)):
        ranks = math.prod(room.degree(axis) for axis in axes)
        for is_awaited in (True, False):
            shard = room.zeros(3, DType.FP32, DEVICE, OMEGA, "shard")
            into = room.new_empty(3 * ranks, DType.FP32, DEVICE, THETA, "whole")
            work = room.all_gather(shard, into, axes, is_awaited=is_awaited)
            move = PendingResult(into, shard, work)
            del work, shard
            yield (into,)
            del into
            yield ()
            yield (move.wait(),)
            del move
            yield ()
            untagged = room.cast(room.zeros(3, DType.BF16, DEVICE, G), DType.FP32)
            into = room.cast(room.zeros(3 * ranks, DType.BF16, DEVICE, G), DType.FP32)
            PendingResult(
                into, untagged, room.all_gather(untagged, into, axes, is_awaited=True)
            ).wait()
            yield untagged, into
            into = room.new_empty(3 * ranks, DType.FP32, DEVICE, THETA, "whole")
            room.all_gather(room.view_range(into, 3, (3,)), into, axes, is_awaited=True)
            yield (into,)


def reduce_scatter_tensors(on: WatchedRuntime[Any]) -> Statements:
    """Reduce-scatter directly and by exchange. A reduced tensor counts as its former state
    afterwards."""
    room = on.room
    for axes in ((OUTER,), (INNER,), BOTH):
        ranks = math.prod(room.degree(axis) for axis in axes)
        for via in ReduceScatterVia:
            for is_awaited in (True, False):
                whole = room.zeros(3 * ranks, DType.FP32, DEVICE, G, "whole")
                into = room.empty_like(whole, 3)
                move = room.reduce_scatter(whole, into, axes, via, is_awaited=is_awaited)
                yield whole, into
                del into
                yield (whole,)
                kept = move.wait()
                yield whole, kept
                room.all_reduce(whole, (OUTER,), is_awaited=True).wait()
                yield whole, kept
                del move
                whole = room.zeros(3 * ranks, DType.FP32, DEVICE, OMEGA, "other")
                move = room.reduce_scatter(whole, kept, axes, via, is_awaited=is_awaited)
                del whole, kept
                yield ()
                yield (move.wait(),)
                del move
                yield ()


def all_reduce_tensors(on: WatchedRuntime[Any]) -> Statements:
    """All-reduce in place."""
    room = on.room
    for axes in ((OUTER,), (INNER,), BOTH):
        for is_awaited in (True, False):
            tensor = room.zeros(6, DType.FP32, DEVICE, G)
            move = room.all_reduce(room.view_range(tensor, 2, (3,)), axes, is_awaited=is_awaited)
            yield (tensor,)
            del tensor
            yield ()
            yield (move.wait(),)
            move = room.all_reduce(
                room.cast(room.zeros(2, DType.BF16, DEVICE, G), DType.FP32),
                axes,
                is_awaited=is_awaited,
            )
            yield (move.wait(),)


def wait_for_moves(on: WatchedRuntime[Any]) -> Statements:
    """Wait for a move: its buffer lives until the wait and its result as long as it is referenced;
    the finishing function runs before the buffer is freed."""
    room = on.room
    result = room.new_empty(4, DType.FP32, DEVICE, THETA)
    buffer = room.new_empty(8, DType.FP32, DEVICE, THETA)
    spare = room.new_empty(16, DType.FP32, DEVICE, THETA)
    move = PendingResult(result, buffer, None, _finishing(room, result, spare))
    del result, buffer, spare
    yield ()
    kept = move.wait()
    yield (kept,)
    del kept
    yield (move.wait(),)


def _finishing(room: Any, result: Any, spare: Any) -> Callable[[], object]:
    return lambda: room.copy(room.view_range(spare, 0, (4,)), result)


def read_coordinates(on: WatchedRuntime[Any]) -> Statements:
    """Make tensors whose sizes are the rank's coordinates."""
    room = on.room
    for axis in BOTH:
        yield (
            room.new_empty(10 * room.degree(axis) + room.coordinate(axis), DType.FP32, DEVICE, G),
        )
    for axes in ((INNER, OUTER), BOTH, (INNER,)):
        order = [BOTH.index(axis) + 1 for axis in room.sort_axes(axes)]
        yield (room.new_empty(int("".join(map(str, order))), DType.FP32, DEVICE, G),)


ALONE = {
    program.__name__: program
    for program in (
        make_tensors, make_results, cast_tensors, move_tensors, copy_tensors, copy_tensor_lists,
        add_in_place, view_tensors, permute_tensors, resize_storages, advise_files, wait_for_moves,
        read_coordinates,
    )
}  # fmt: skip
TOGETHER = {
    program.__name__: program
    for program in (gather_tensors, reduce_scatter_tensors, all_reduce_tensors)
}
