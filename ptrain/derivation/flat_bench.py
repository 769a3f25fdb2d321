"""Where the life of a flat unit is played without a tensor: what it allocates goes to a tape, what
it sends or copies to an account."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import padded_flat, stretches
from ptrain.axes.ring import Calls
from ptrain.costs import Collective, State, Traffic, TrafficKey
from ptrain.derivation.calls import group_over, reduce_scatter_calls
from ptrain.derivation.tape import Tape
from ptrain.plan.step import FlatUnits, Plan
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.batch import ReduceScatterVia
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import OptimizerSpec, Spec

Axes = tuple[Axis, ...]

_MOVES = {
    (Tier.HOST, Tier.DEVICE): Collective.HOST_TO_DEVICE,
    (Tier.DEVICE, Tier.HOST): Collective.DEVICE_TO_HOST,
    (Tier.FILE, Tier.HOST): Collective.FILE_READ,
    (Tier.HOST, Tier.FILE): Collective.FILE_WRITE,
}


@dataclass(slots=True)
class Storage:
    """Bytes on a tier. What is kept for good is no work of a unit's, and is never given back; what
    is in flight waits for its collective."""

    size: int
    tier: Tier
    is_kept: bool = False
    in_flight: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A one-dimensional tensor: all of a storage, or a view of some of it."""

    numel: int
    dtype: DType
    storage: Storage

    @property
    def size(self) -> int:
        """Bytes of the piece itself."""
        return self.numel * self.dtype.itemsize

    @property
    def tier(self) -> Tier:
        return self.storage.tier


def kept(numel: int, dtype: DType, tier: Tier) -> Piece:
    """A piece that lives from step to step."""
    return Piece(numel, dtype, Storage(numel * dtype.itemsize, tier, is_kept=True))


@dataclass(slots=True, kw_only=True)
class Bench:
    """The plan at work on its units. Calls count for `times` equal units, and only where there is
    an `account`."""

    tape: Tape
    spec: Spec
    plan: Plan
    step: FlatUnits
    times: int = 1
    account: list[Traffic] | None = None

    @property
    def layout(self) -> Layout:
        return self.plan.update.layout

    @property
    def optimizer(self) -> OptimizerSpec:
        return self.spec.optimizer

    @property
    def stored(self) -> DType:
        """In which Theta is kept: where it is materialized, the master copy is all there is."""
        return self.layout.updated if self.step.materialized else self.layout.parameters

    def new(self, numel: int, dtype: DType, tier: Tier = Tier.DEVICE) -> Piece:
        """Allocates."""
        piece = Piece(numel, dtype, Storage(numel * dtype.itemsize, tier))
        if tier is Tier.DEVICE:
            self.tape.add(piece.size)
        return piece

    def drop(self, *pieces: Piece | None) -> None:
        """Frees what was allocated, once; what is kept or in flight stays."""
        for piece in pieces:
            if piece is None or piece.storage.is_kept or piece.storage.in_flight:
                continue
            if piece.tier is Tier.DEVICE:
                self.tape.add(-piece.storage.size)
            piece.storage.size = 0

    def instead(self, old: Piece, new: Piece) -> Piece:
        """A name that meant `old` now means `new`."""
        if new.storage is not old.storage:
            self.drop(old)
        return new

    def cast(self, piece: Piece, dtype: DType) -> Piece:
        """In another dtype, where it is; itself if it is that already. What is computed from a
        mapped file is in memory."""
        if piece.dtype is dtype:
            return piece
        return self.new(piece.numel, dtype, _in_memory(piece.tier))

    def move(self, piece: Piece, tier: Tier, state: State) -> Piece:
        """A copy on another tier."""
        made = self.new(piece.numel, piece.dtype, tier)
        self.copied(piece, made, state)
        return made

    def copied(self, source: Piece, target: Piece, state: State) -> None:
        """Bytes between tiers, if these are two."""
        if source.tier is not target.tier:
            self.moved(source.tier, target.tier, source.size, state)

    def moved(self, source: Tier, target: Tier, size: int, state: State) -> None:
        """One copy of `size` bytes between two tiers."""
        if self.account is not None:
            key = TrafficKey(
                axes=(), collective=_MOVES[source, target], state=state, phase=self.tape.phase
            )
            self.account.append(
                Traffic(key=key, calls=self.times, payload_bytes=self.times * size, sent_bytes=0)
            )

    def send(self, kind: Collective, axes: Axes, state: State, payload: int) -> None:
        """One collective over the group along `axes`, of a full tensor of `payload` bytes."""
        if self.account is not None:
            via = None
            if kind is Collective.REDUCE_SCATTER:
                via = reduce_scatter_calls(self.step.reduce_scatter, self.tape.phase, 1).via
            calls = Calls(kind, state, self.tape.phase, self.times, via)
            wanted = [axis for axis in self.step.axes if axis in axes]
            self.account.append(calls.over(group_over(self.spec, wanted), payload))


def _in_memory(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.FILE else tier


@dataclass(frozen=True, slots=True)
class Started:
    """A collective under way: what it makes, and the buffers that live until it is there."""

    result: Piece
    buffers: tuple[Piece, ...] = ()


class Buffer:
    """The shape [|dp_shard|, |dp_replicate|, c] of one unit's buffer, the moves between its cuts,
    and which of them need a copy."""

    def __init__(self, bench: Bench, numel: int, cut: Axes | None = None) -> None:
        step = bench.step
        both = {*step.parameters, *step.optimizer, *step.gradients} if cut is None else {*cut}
        self.bench = bench
        self.axes = tuple(axis for axis in reversed(DATA_AXES) if axis in both)
        self.degrees = {axis: bench.spec.degree(axis) for axis in step.axes}
        self.mesh_order = step.axes
        self.padded = padded_flat(numel, ranks_over(bench.spec, self.axes))

    def numel(self, cut: Axes) -> int:
        """Elements of a shard over `cut`."""
        return self.padded // math.prod(self.degrees[axis] for axis in cut)

    def stretches(self, cut: Axes, place: Mapping[Axis, int]) -> Iterator[tuple[int, int]]:
        """(start, end) in the whole buffer of what a shard over `cut` is made of, at this place."""
        degrees = [self.degrees[axis] for axis in self.axes]
        places = [place[axis] if axis in cut else None for axis in self.axes]
        return stretches(self.padded, degrees, places)

    def take(self, piece: Piece, had: Axes, wanted: Axes) -> Piece:
        """Of a shard over `had` the part along what `wanted` adds: a view where it can be one."""
        both = (*had, *without(wanted, had))
        if self.is_view(had, wanted):
            return Piece(self.numel(both), piece.dtype, piece.storage)
        return self.bench.new(self.numel(both), piece.dtype, _in_memory(piece.tier))

    def gather(
        self, piece: Piece, cut: Axes, over: Axes, state: State, into: Piece | None = None
    ) -> Piece:
        """All-gather along `over`; awaited."""
        return self.wait(self.start_gather(piece, cut, over, state, into))

    def start_gather(
        self, piece: Piece, cut: Axes, over: Axes, state: State, into: Piece | None = None
    ) -> Started:
        """From a shard over `cut` to one over `cut` without `over`, through a buffer of its size
        where the parts do not lie in it in group order."""
        left = without(cut, over)
        numel = self.numel(left)
        result = self.bench.new(numel, piece.dtype) if into is None else into
        is_direct = self._in_place(left, over)
        received = () if is_direct else (self.bench.new(numel, piece.dtype),)
        self.bench.send(Collective.ALL_GATHER, over, state, numel * piece.dtype.itemsize)
        return Started(result, received)

    def reduce_scatter(self, piece: Piece, cut: Axes, over: Axes) -> Piece:
        """Sum along `over`, keep this rank's part; awaited."""
        return self.wait(self.start_reduce_scatter(piece, cut, over))

    def start_reduce_scatter(self, piece: Piece, cut: Axes, over: Axes) -> Started:
        """Of a permuted copy where the parts do not lie in group order; through one more buffer if
        an exchange stands in for it."""
        new, numel = self.bench.new, self.numel(cut)
        result = new(self.numel((*cut, *over)), piece.dtype)
        copies = not self._in_place(cut, over)
        exchanges = self.bench.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL
        buffers = tuple(new(numel, piece.dtype) for _ in range(copies + exchanges))
        payload = numel * piece.dtype.itemsize
        self.bench.send(Collective.REDUCE_SCATTER, over, State.GRADIENTS, payload)
        return Started(result, buffers)

    def all_reduce(self, piece: Piece, over: Axes) -> None:
        """In place."""
        self.bench.send(Collective.ALL_REDUCE, over, State.GRADIENTS, piece.size)

    def wait(self, started: Started) -> Piece:
        """What a collective made, when it is there."""
        self.bench.drop(*started.buffers)
        return started.result

    def is_view(self, had: Axes, wanted: Axes) -> bool:
        """Whether the part of a shard over `had` along what `wanted` adds is contiguous in it."""
        dims = list(self._dims(had))
        narrowed = [
            dim
            for dim, axis in enumerate(self.axes)
            if axis in wanted and axis not in had and dims[dim] > 1
        ]
        for dim in narrowed:
            dims[dim] = 1
        return all(size == 1 for dim in narrowed for size in dims[:dim])

    def _dims(self, cut: Axes) -> tuple[int, ...]:
        dims = tuple(1 if axis in cut else self.degrees[axis] for axis in self.axes)
        return (*dims, self.numel(self.axes))

    def _in_place(self, left: Axes, over: Axes) -> bool:
        """Whether the parts along `over` of a shard over `left` lie in the order of the group."""
        first = [self.axes.index(axis) for axis in self.mesh_order if axis in over]
        rest = [dim for dim in range(len(self.axes) + 1) if dim not in first]
        dims = self._dims(left)
        significant = [dim for dim in (*first, *rest) if dims[dim] > 1]
        return significant == sorted(significant)


def without(axes: Axes, others: Axes) -> Axes:
    """These axes but for those."""
    return tuple(axis for axis in axes if axis not in others)
