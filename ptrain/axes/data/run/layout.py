"""How one flat buffer is cut over the data axes: the shard of any set of axes, and the moves
between them.

The buffer is viewed as [|dp_shard|, |dp_replicate|, c], with the axes that cut anything; a shard
over a set of axes is an index along each of its dimensions. `S over a, then over b` is therefore
`S over a x b`, and every change of layout is one collective along some dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ptrain.axes.data.costs import stretches
from ptrain.costs import State
from ptrain.rooms.comm import Move, all_gather, reduce_scatter
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import alike
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.batch import ReduceScatterVia
from ptrain.units import ceil_div

_MAJOR_FIRST = tuple(reversed(DATA_AXES))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """The cuts of a buffer of `numel` elements, padded to `padded`."""

    mesh: Mesh
    numel: int
    axes: tuple[Axis, ...]  # all that cut anything, major first
    registry: Registry
    via: ReduceScatterVia

    @classmethod
    def over(
        cls,
        mesh: Mesh,
        numel: int,
        axes: Sequence[Axis],
        registry: Registry,
        via: ReduceScatterVia,
    ) -> FlatLayout:
        """The layout of `numel` elements over those `axes` that any state is cut along."""
        major_first = tuple(axis for axis in _MAJOR_FIRST if axis in axes)
        return cls(mesh=mesh, numel=numel, axes=major_first, registry=registry, via=via)

    @property
    def padded(self) -> int:
        """Elements of the whole buffer: a multiple of the ranks that share it."""
        ranks = self.mesh.size(self.axes)
        return ceil_div(self.numel, ranks) * ranks

    def shard_numel(self, cut: Sequence[Axis]) -> int:
        """Elements of a shard over the axes `cut`."""
        return self.padded // self.mesh.size(cut)

    def shape(self, cut: Sequence[Axis]) -> tuple[int, ...]:
        """The dimensions of a shard over `cut`: 1 where it is cut, the degree elsewhere."""
        dims = tuple(1 if axis in cut else self.mesh.degrees[axis] for axis in self.axes)
        return (*dims, self.padded // self.mesh.size(self.axes))

    def stretches(self, cut: Sequence[Axis]) -> Iterator[tuple[int, int]]:
        """(start, end) in the whole buffer of what this rank's shard over `cut` is made of."""
        degrees = [self.mesh.degrees[axis] for axis in self.axes]
        places = [self.mesh.coordinate(axis) if axis in cut else None for axis in self.axes]
        return stretches(self.padded, degrees, places)

    def take(
        self, local: torch.Tensor, had: Sequence[Axis], wanted: Sequence[Axis]
    ) -> torch.Tensor:
        """From a shard over `had` (1-d) this rank's part along the axes that `wanted` adds; 1-d, a
        view where it is contiguous."""
        view = self._narrowed(local, had, wanted)
        if view.is_contiguous():
            return view.view(-1)
        part = alike(local.new_empty(view.numel()), local)
        tag = self.registry.of(local)
        if tag is not None:
            self.registry.tag(part, tag.state, name=tag.name)
        part.view(view.shape).copy_(view)
        return part

    def put(
        self, local: torch.Tensor, part: torch.Tensor, had: Sequence[Axis], wanted: Sequence[Axis]
    ) -> None:
        """The inverse of `take`: write `part` to its place in `local`. Free where it is a view."""
        view = self._narrowed(local, had, wanted)
        if not same_memory(view, part):
            view.copy_(part.view(view.shape))

    def _narrowed(
        self, local: torch.Tensor, had: Sequence[Axis], wanted: Sequence[Axis]
    ) -> torch.Tensor:
        view = local.view(self.shape(had))
        for dim, axis in enumerate(self.axes):
            if axis in wanted and axis not in had:
                view = view.narrow(dim, self.mesh.coordinate(axis), 1)
        return view

    def gather(
        self,
        part: torch.Tensor,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        state: State,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All-gather along `over`: from a shard over `cut` to one over `cut` without `over`.

        In place into `into` where the ranks' parts lie in it in group order; otherwise through
        one buffer of its size. It counts as a move of `state`.
        """
        return self._gather(part, cut, over, (state, into), is_awaited=True).wait()

    def start_gather(
        self,
        part: torch.Tensor,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        state: State,
        into: torch.Tensor | None = None,
    ) -> Move:
        """`gather`, awaited later; `part` must not change until then."""
        return self._gather(part, cut, over, (state, into), is_awaited=False)

    def _gather(
        self,
        part: torch.Tensor,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        target: tuple[State, torch.Tensor | None],
        *,
        is_awaited: bool,
    ) -> Move:
        state, into = target
        kept = tuple(axis for axis in cut if axis not in over)
        numel = self.shard_numel(kept)
        result = part.new_empty(numel) if into is None else into
        self.registry.tag(result, state)
        group, order = self.mesh.group(over), self._leading(kept, over)
        if order is None:
            return Move(result, part, all_gather(result, part, group, is_awaited=is_awaited))
        received = self.registry.tag(part.new_empty(numel), state)
        work = all_gather(received, part, group, is_awaited=is_awaited)
        moved = received.view([self.shape(kept)[dim] for dim in order])
        inverse = [order.index(dim) for dim in range(len(order))]
        target_view = result.view(self.shape(kept))
        return Move(result, part, work, lambda: target_view.copy_(moved.permute(inverse)))

    def reduce_scatter(
        self, part: torch.Tensor, cut: Sequence[Axis], over: Sequence[Axis]
    ) -> torch.Tensor:
        """Sum along `over` and keep this rank's part: from a shard over `cut` to one over both."""
        return self._reduce_scatter(part, cut, over, is_awaited=True).wait()

    def start_reduce_scatter(
        self, part: torch.Tensor, cut: Sequence[Axis], over: Sequence[Axis]
    ) -> Move:
        """`reduce_scatter`, awaited later; `part` must not change until then."""
        return self._reduce_scatter(part, cut, over, is_awaited=False)

    def _reduce_scatter(
        self,
        part: torch.Tensor,
        cut: Sequence[Axis],
        over: Sequence[Axis],
        *,
        is_awaited: bool,
    ) -> Move:
        wanted = (*cut, *over)
        result = part.new_empty(self.shard_numel(wanted))
        tag = self.registry.of(part)
        assert tag is not None, "only tagged buffers are reduced"
        self.registry.tag(result, tag.state, name=tag.name)
        order = self._leading(cut, over)
        if order is not None:
            part = part.view(self.shape(cut)).permute(order).reshape(-1)
            self.registry.tag(part, tag.state, name=tag.name)
        return reduce_scatter(
            result, part, self.mesh.group(over), self.via, self.registry, is_awaited=is_awaited
        )

    def _leading(self, cut: Sequence[Axis], over: Sequence[Axis]) -> tuple[int, ...] | None:
        """The order of dimensions that puts `over` first and in mesh order, which is the order of
        ranks in its group; None where the buffer already lies so."""
        first = [self.axes.index(axis) for axis in self.mesh.ordered(over)]
        rest = [dim for dim in range(len(self.axes) + 1) if dim not in first]
        order = (*first, *rest)
        shape = self.shape(cut)
        significant = [dim for dim in order if shape[dim] > 1]
        return None if significant == sorted(significant) else order


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one size begin at the same byte of the same storage."""
    here, there = one.untyped_storage()._cdata, other.untyped_storage()._cdata
    return bool(here == there and one.storage_offset() == other.storage_offset())
