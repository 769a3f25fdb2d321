"""How one flat buffer is cut over the data axes: the shard of any set of axes, and the moves
between them.

The buffer is seen as [|dp_shard|, ..., |dp_replicate|, c], with the axes that cut anything; a shard
over a set of axes is an index along each of its dimensions. `S over a, then over b` is therefore
`S over a x b`, and every change of layout is one collective along some dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic

from ptrain.axes.data.cost import Run, in_memory, padded_flat, shard_runs, stretches
from ptrain.cost import State
from ptrain.rooms.room import Move, Room, T
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier, without

Axes = tuple[Axis, ...]


class Cuts(Generic[T]):
    """The cuts of a buffer of `numel` elements, padded to `padded`, over those `axes` that any
    state is cut along."""

    def __init__(
        self, room: Room[T], numel: int, axes: Sequence[Axis], via: ReduceScatterVia
    ) -> None:
        self.room, self.numel, self.via = room, numel, via
        self.axes = in_memory(axes)
        self.degrees = tuple(room.degree(axis) for axis in self.axes)
        ranks = math.prod(self.degrees)
        self.padded = padded_flat(numel, ranks)
        self._least = self.padded // ranks
        self._orders: dict[tuple[Axes, Axes], tuple[int, ...] | None] = {}

    def shard_numel(self, cut: Sequence[Axis]) -> int:
        """Elements of a shard over the axes `cut`."""
        return self.padded // math.prod(self.room.degree(axis) for axis in cut)

    def shape(self, cut: Sequence[Axis]) -> tuple[int, ...]:
        """The dimensions of a shard over `cut`: 1 where it is cut, the degree elsewhere."""
        dims = zip(self.axes, self.degrees, strict=True)
        return (*(1 if axis in cut else degree for axis, degree in dims), self._least)

    def stretches(self, cut: Sequence[Axis]) -> Iterator[tuple[int, int]]:
        """(start, end) in the whole buffer of what this rank's shard over `cut` is made of."""
        return stretches(self.padded, self.degrees, self._places(cut, self.room.coordinate))

    def runs(
        self,
        tensors: tuple[tuple[int, bool], ...],
        cut: Sequence[Axis],
        coordinate: Callable[[Axis], int],
    ) -> tuple[Run, ...]:
        """Return the runs of elements of equal flags in the shard over `cut` of the rank with these
        coordinates; `tensors` are elements and flag of each in the whole buffer. Padding belongs to
        the last of them."""
        return shard_runs(tensors, self.padded, self.degrees, self._places(cut, coordinate))

    def _places(
        self, cut: Sequence[Axis], coordinate: Callable[[Axis], int]
    ) -> tuple[int | None, ...]:
        return tuple([coordinate(axis) if axis in cut else None for axis in self.axes])

    def take(self, local: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> T:
        """Return this rank's part of a shard over `had` (1-d), along the axes that `wanted` adds:
        1-d, and a view where it is contiguous."""
        room, window = self.room, self._window(local, had, wanted)
        if self._is_contiguous(had, wanted):
            return room.flat(window)
        part = room.like(local, room.numel(window))
        room.copy(window, room.piece(part, 0, room.shape(window)))
        return part

    def put(self, local: T, part: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> None:
        """Write `part` to its place in `local`, from which `take` gave it. Nothing is copied where
        it is a view."""
        window = self._window(local, had, wanted)
        if not self.room.same(window, part):
            self.room.copy(part, window)

    def _window(self, local: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> T:
        places = {
            dim: self.room.coordinate(axis)
            for dim, axis in enumerate(self.axes)
            if axis in wanted and axis not in had
        }
        return self.room.window(local, self.shape(had), places)

    def _is_contiguous(self, had: Sequence[Axis], wanted: Sequence[Axis]) -> bool:
        """Whether the part along what `wanted` adds lies in one piece: nothing before a dimension
        that is narrowed has more than one place."""
        dims, narrowed = list(self.shape(had)), []
        for dim, axis in enumerate(self.axes):
            if axis in wanted and axis not in had and dims[dim] > 1:
                narrowed.append(dim)
                dims[dim] = 1
        return all(size == 1 for dim in narrowed for size in dims[:dim])

    def gather(
        self,
        part: T,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        state: State,
        into: T | None = None,
    ) -> T:
        """All-gather along `over`: from a shard over `cut` to one over `cut` without `over`.

        In place into `into` where the ranks' parts lie in it in group order; otherwise through
        one buffer of its size. It counts as a move of `state`.
        """
        return self.start_gather(part, cut, over, state, into, is_awaited=True).wait()

    def start_gather(
        self,
        part: T,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        state: State,
        into: T | None = None,
        *,
        is_awaited: bool = False,
    ) -> Move[T]:
        """`gather`, awaited later; `part` must not change until then."""
        room, left = self.room, without(cut, over)
        numel, dtype = self.shard_numel(left), room.dtype(part)
        result = room.new(numel, dtype, Tier.DEVICE, state) if into is None else into
        if (order := self._leading(left, over)) is None:
            return Move(result, part, room.all_gather(part, result, over, is_awaited=is_awaited))
        received = room.new(numel, dtype, Tier.DEVICE, state)
        work = room.all_gather(part, received, over, is_awaited=is_awaited)
        finish = partial(room.unpermute, received, self.shape(left), order, result)
        return Move(result, part, work, finish)

    def reduce_scatter(self, part: T, cut: Sequence[Axis], over: Sequence[Axis]) -> T:
        """Sum along `over` and keep this rank's part: from a shard over `cut` to one over both.
        `part` is used up."""
        return self.start_reduce_scatter(part, cut, over, is_awaited=True).wait()

    def start_reduce_scatter(
        self, part: T, cut: Sequence[Axis], over: Sequence[Axis], *, is_awaited: bool = False
    ) -> Move[T]:
        """`reduce_scatter`, awaited later; nobody but it may change `part` until then."""
        room = self.room
        result = room.like(part, self.shard_numel((*cut, *over)))
        if (order := self._leading(cut, over)) is not None:
            part = room.permuted(part, self.shape(cut), order)
        return room.reduce_scatter(part, result, over, self.via, is_awaited=is_awaited)

    def is_led_by(self, cut: Sequence[Axis], over: Sequence[Axis]) -> bool:
        """Return whether the parts along `over` lie in a shard over `cut` as their group has them,
        one after the other."""
        return self._leading(cut, over) is None

    def _leading(self, cut: Sequence[Axis], over: Sequence[Axis]) -> tuple[int, ...] | None:
        """The order of dimensions that puts `over` first and in mesh order, which is the order of
        ranks in its group; None where the buffer already lies so."""
        key = tuple(cut), tuple(over)
        if key not in self._orders:
            self._orders[key] = self._order_of(*key)
        return self._orders[key]

    def _order_of(self, cut: Axes, over: Axes) -> tuple[int, ...] | None:
        first = [self.axes.index(axis) for axis in self.room.ordered(over)]
        rest = [dim for dim in range(len(self.axes) + 1) if dim not in first]
        order = (*first, *rest)
        shape = self.shape(cut)
        significant = [dim for dim in order if shape[dim] > 1]
        return None if significant == sorted(significant) else order
