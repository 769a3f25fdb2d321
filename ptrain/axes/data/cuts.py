"""The layout of a flat buffer over the data axes: shards, and moves between them.

The buffer is viewed as [|dp_shard|, ..., |dp_replicate|, c], with the axes that shard any state. A
shard over a set of axes is an index along each of its dimensions. `S over a, then over b` is
therefore `S over a x b`, and every change of layout is one collective along some dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic

from ptrain.axes.data.cost import Run, in_memory, padded_flat, shard_ranges, shard_runs
from ptrain.cost import State
from ptrain.runtime.interface import PendingResult, T, TensorRuntime
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier, exclude_axes

Axes = tuple[Axis, ...]


class ShardLayout(Generic[T]):
    """The shards of a flat buffer over the axes along which any state is sharded.

    Attributes:
        numel: Elements of the buffer without padding.
        padded: Elements with padding.
        axes: The axes, in memory order.
        degrees: Their degrees.
        via: The collective that implements a reduce-scatter.
    """

    def __init__(
        self, room: TensorRuntime[T], numel: int, axes: Sequence[Axis], via: ReduceScatterVia
    ) -> None:
        self.room, self.numel, self.via = room, numel, via
        self.axes = in_memory(axes)
        self.degrees = tuple(room.degree(axis) for axis in self.axes)
        ranks = math.prod(self.degrees)
        self.padded = padded_flat(numel, ranks)
        self._smallest_numel = self.padded // ranks
        self._orders: dict[tuple[Axes, Axes], tuple[int, ...] | None] = {}

    def shard_numel(self, cut: Sequence[Axis]) -> int:
        """Return the elements of a shard over the axes `cut`."""
        return self.padded // math.prod(self.room.degree(axis) for axis in cut)

    def shape(self, cut: Sequence[Axis]) -> tuple[int, ...]:
        """Return the dimensions of a shard: 1 for the axes `cut`, the degree for all others."""
        dims = zip(self.axes, self.degrees, strict=True)
        return (*(1 if axis in cut else degree for axis, degree in dims), self._smallest_numel)

    def shard_ranges(self, cut: Sequence[Axis]) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) ranges of this rank's shard over `cut` in the full buffer."""
        return shard_ranges(self.padded, self.degrees, self._coordinates(cut, self.room.coordinate))

    def shard_runs(
        self,
        tensors: tuple[tuple[int, bool], ...],
        cut: Sequence[Axis],
        coordinate: Callable[[Axis], int],
    ) -> tuple[Run, ...]:
        """Return the runs of elements with equal flags in the shard over `cut` of one rank.

        Args:
            tensors: Elements and flag of each tensor in the full buffer. Padding counts to the
                last.
            cut: The axes of the shard.
            coordinate: Returns the rank's coordinate along an axis.
        """
        return shard_runs(tensors, self.padded, self.degrees, self._coordinates(cut, coordinate))

    def _coordinates(
        self, cut: Sequence[Axis], coordinate: Callable[[Axis], int]
    ) -> tuple[int | None, ...]:
        """Return the coordinate along each sharded axis, None for all others."""
        return tuple([coordinate(axis) if axis in cut else None for axis in self.axes])

    def take_part(self, local: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> T:
        """Return this rank's part of a shard.

        Args:
            local: The shard over `had` (1-d).
            had: The axes that shard `local`.
            wanted: The axes that shard the result, including `had`.

        Returns:
            The part (1-d); a view of `local` if it is contiguous there, else a copy.
        """
        room, window = self.room, self._narrowed_view(local, had, wanted)
        if self._is_contiguous(had, wanted):
            return room.flatten(window)
        part = room.empty_like(local, room.numel(window))
        room.copy(window, room.view_range(part, 0, room.shape(window)))
        return part

    def put_part(self, local: T, part: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> None:
        """Write a part to its place in a shard, from which `take_part` got it.

        A view needs no copy.

        Args:
            local: The shard over `had` (1-d), which is written.
            part: The part (1-d).
            had: The axes that shard `local`.
            wanted: The axes that shard `part`, including `had`.
        """
        window = self._narrowed_view(local, had, wanted)
        if not self.room.is_same_memory(window, part):
            self.room.copy(part, window)

    def _narrowed_view(self, local: T, had: Sequence[Axis], wanted: Sequence[Axis]) -> T:
        """Return a view at this rank's coordinates along the axes that `wanted` adds."""
        places = {
            dim: self.room.coordinate(axis)
            for dim, axis in enumerate(self.axes)
            if axis in wanted and axis not in had
        }
        return self.room.view_window(local, self.shape(had), places)

    def _is_contiguous(self, had: Sequence[Axis], wanted: Sequence[Axis]) -> bool:
        """Return True if the part along the axes that `wanted` adds is contiguous.

        This holds if all dimensions before a narrowed one have size 1.
        """
        dims, narrowed = list(self.shape(had)), []
        for dim, axis in enumerate(self.axes):
            if axis in wanted and axis not in had and dims[dim] > 1:
                narrowed.append(dim)
                dims[dim] = 1
        return all(size == 1 for dim in narrowed for size in dims[:dim])

    def gather_part(
        self,
        part: T,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        state: State,
        into: T | None = None,
    ) -> T:
        """All-gather a shard along some axes.

        It writes to `into` directly if the ranks' parts are in group order there, otherwise through
        a buffer of the same size.

        Args:
            part: The shard over `cut`.
            cut: The axes that shard `part`.
            over: The axes to gather along.
            state: The state that the move counts as.
            into: Receives the result; None for a new tensor.

        Returns:
            The shard over `cut` without `over`.
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
    ) -> PendingResult[T]:
        """Start a `gather_part` without waiting.

        Args:
            part: The shard over `cut` (1-d). It must not change before the `wait`.
            cut: The axes that shard `part`.
            over: The axes to gather along.
            state: The state that the move counts as.
            into: Receives the result; None for a new tensor.
            is_awaited: True if the caller waits at once.

        Returns:
            The pending result: the shard over `cut` without `over`.
        """
        room, left = self.room, exclude_axes(cut, over)
        numel, dtype = self.shard_numel(left), room.dtype(part)
        result = room.new_empty(numel, dtype, Tier.DEVICE, state) if into is None else into
        if (order := self._leading_order(left, over)) is None:
            return PendingResult(
                result, part, room.all_gather(part, result, over, is_awaited=is_awaited)
            )
        # Ranks arrive in group order, which is not the order of the buffer here, so a second buffer
        # is permuted into the result.
        received = room.new_empty(numel, dtype, Tier.DEVICE, state)
        work = room.all_gather(part, received, over, is_awaited=is_awaited)
        finish = partial(room.unpermute, received, self.shape(left), order, result)
        return PendingResult(result, part, work, finish)

    def reduce_scatter(self, part: T, cut: Sequence[Axis], over: Sequence[Axis]) -> T:
        """Sum a shard along some axes, and keep this rank's part.

        Args:
            part: The shard over `cut`, which is overwritten.
            cut: The axes that shard `part`.
            over: The axes to sum along.

        Returns:
            The shard of the sum over `cut` and `over`.
        """
        return self.start_reduce_scatter(part, cut, over, is_awaited=True).wait()

    def start_reduce_scatter(
        self, part: T, cut: Sequence[Axis], over: Sequence[Axis], *, is_awaited: bool = False
    ) -> PendingResult[T]:
        """Start a `reduce_scatter` without waiting.

        Args:
            part: The shard over `cut` (1-d). Use it only after `PendingResult.wait`.
            cut: The axes that shard `part`.
            over: The axes to reduce and scatter along.
            is_awaited: True if the caller waits at once.

        Returns:
            The pending result: the shard over `cut` and `over`.
        """
        room = self.room
        result = room.empty_like(part, self.shard_numel((*cut, *over)))
        if (order := self._leading_order(cut, over)) is not None:
            # A reduce-scatter gives rank r the r-th part, so parts are brought into group order
            # first.
            part = room.permute(part, self.shape(cut), order)
        return room.reduce_scatter(part, result, over, self.via, is_awaited=is_awaited)

    def is_led_by(self, cut: Sequence[Axis], over: Sequence[Axis]) -> bool:
        """Return True if the parts along `over` are in group order within a shard over `cut`."""
        return self._leading_order(cut, over) is None

    def _leading_order(self, cut: Sequence[Axis], over: Sequence[Axis]) -> tuple[int, ...] | None:
        """Return the order of dimensions that puts `over` first and in mesh order, cached.

        Mesh order is the order of ranks in the group. None if the buffer is in this order already.
        """
        key = tuple(cut), tuple(over)
        if key not in self._orders:
            self._orders[key] = self._compute_order(*key)
        return self._orders[key]

    def _compute_order(self, cut: Axes, over: Axes) -> tuple[int, ...] | None:
        """Compute the order of `_leading_order`; dimensions of size 1 may be anywhere."""
        first = [self.axes.index(axis) for axis in self.room.sort_axes(over)]
        rest = [dim for dim in range(len(self.axes) + 1) if dim not in first]
        order = (*first, *rest)
        shape = self.shape(cut)
        significant = [dim for dim in order if shape[dim] > 1]
        return None if significant == sorted(significant) else order
