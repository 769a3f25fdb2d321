"""The fake runtime: tensors with a size, a dtype and a tier, but no data.

A fake tensor's bytes are freed when its last reference goes, as with a torch tensor. All
allocations, frees, copies, operators and collectives are reported to a reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from ptrain.cost import Collective, State
from ptrain.runtime.interface import Axes, PendingResult, Shape, Work
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType


class EventReceiver(Protocol):
    """The receiver of a step's events. Sizes are in bytes."""

    def record_allocation(self, size: int, tier: Tier) -> None:
        """Note that bytes were allocated or freed.

        Args:
            size: Allocated bytes; negative for freed bytes.
            tier: The tier that holds them.
        """

    def record_collective(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        state: State,
        payload: int,
        via: str,
        *,
        is_awaited: bool,
    ) -> Work | None:
        """Note a collective and return the work to wait for, if any.

        Args:
            collective: The intended collective.
            axes: The axes of its group.
            state: The state that it moves.
            payload: Bytes of its full tensor.
            via: Name of the collective that implements it, "" if native.
            is_awaited: The caller waits for it at once.
        """

    def record_copy(self, source: Tier, target: Tier, state: State, size: int) -> None:
        """Note a copy between two tiers.

        Args:
            source: The tier that is read.
            target: The tier that is written.
            state: The state that the bytes are counted under.
            size: Bytes read from `source`.
        """

    def record_operator(self, kind: OperatorKind, dtype: DType, size: int) -> None:
        """Note an operator that reads and writes memory.

        Args:
            kind: The kind, which decides how its time is predicted.
            dtype: The dtype of its result.
            size: Bytes read and written, in total.
        """

    def record_update(self, rule: str, dtype: DType, tier: Tier, shapes: Sequence[Shape]) -> None:
        """Note an optimizer step of one optimizer.

        Args:
            rule: The name of the rule, for example `adamw`.
            dtype: The dtype of the updated tensors.
            tier: The tier on which all of them are.
            shapes: The shapes of the tensors that have a gradient.
        """


class Storage:
    """Bytes on a tier, freed with the last fake tensor that refers to them.

    Attributes:
        size: Bytes.
        tier: The tier that holds them.
        state: The state that they count as, None if unknown.
        name: The unit that they belong to, "" if unknown.
    """

    __slots__ = ("_reader", "name", "size", "state", "tier")

    def __init__(
        self, size: int, tier: Tier, state: State | None, name: str, reader: EventReceiver
    ) -> None:
        self.size, self.tier, self.state, self.name = size, tier, state, name
        self._reader = reader
        reader.record_allocation(size, tier)

    # Reference counting frees a fake tensor at the statement at which it would free a torch
    # tensor, so peaks agree.
    def __del__(self) -> None:
        if self.size:
            self._reader.record_allocation(-self.size, self.tier)

    def resize(self, size: int) -> None:
        """Set the size and report the difference.

        Args:
            size: The new size in bytes; 0 frees the storage.
        """
        self._reader.record_allocation(size - self.size, self.tier)
        self.size = size


class Ghost:
    """A tensor without data: shape, dtype, and its first element in a storage."""

    __slots__ = ("dtype", "numel", "shape", "start", "storage")

    def __init__(self, storage: Storage, dtype: DType, shape: Shape, start: int = 0) -> None:
        self.storage, self.dtype, self.shape, self.start = storage, dtype, shape, start
        # Most fake tensors are flat, and a search creates many.
        self.numel = shape[0] if len(shape) == 1 else math.prod(shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor; its storage may have more."""
        return self.numel * self.dtype.itemsize

    @property
    def tier(self) -> Tier:
        return self.storage.tier


class GhostRuntime:
    """The runtime of one rank, given by its coordinates along the axes, on fake tensors."""

    def __init__(
        self,
        reader: EventReceiver,
        degrees: Mapping[Axis, int],
        places: Mapping[Axis, int],
    ) -> None:
        """Create the runtime of one rank.

        Args:
            reader: Receives all events.
            degrees: Ranks along each axis, in mesh order.
            places: This rank's coordinates; missing axes are at 0.
        """
        self.reader = reader
        self._degrees, self._places = degrees, places

    def degree(self, axis: Axis) -> int:
        return self._degrees[axis]

    def coordinate(self, axis: Axis) -> int:
        return self._places.get(axis, 0)

    def sort_axes(self, axes: Axes) -> tuple[Axis, ...]:
        return tuple(axis for axis in self._degrees if axis in axes)

    def new_empty(
        self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> Ghost:
        shape = () if numel is None else (numel,)
        size = (1 if numel is None else numel) * dtype.itemsize
        return Ghost(Storage(size, tier, state, name, self.reader), dtype, shape)

    def zeros(
        self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> Ghost:
        tensor = self.new_empty(numel, dtype, tier, state, name)
        self.reader.record_operator(OperatorKind.POINTWISE, dtype, tensor.nbytes)
        return tensor

    def empty_like(self, tensor: Ghost, numel: int) -> Ghost:
        size, of = numel * tensor.dtype.itemsize, tensor.storage
        storage = Storage(size, _in_memory(of.tier), of.state, of.name, self.reader)
        return Ghost(storage, tensor.dtype, (numel,))

    def zeros_like(self, tensor: Ghost, dtype: DType, shape: Shape | None = None) -> Ghost:
        like = tensor if shape is None else self.view_range(tensor, 0, shape)
        return self._empty_in_memory(like, dtype, None, "")

    def scalar_like(self, tensor: Ghost, dtype: DType, initial: float = 0.0) -> Ghost:
        storage = Storage(dtype.itemsize, _in_memory(tensor.tier), None, "", self.reader)
        return Ghost(storage, dtype, ())

    def numel(self, tensor: Ghost) -> int:
        return tensor.numel

    def dtype(self, tensor: Ghost) -> DType:
        return tensor.dtype

    def shape(self, tensor: Ghost) -> Shape:
        return tensor.shape

    def cast(
        self,
        tensor: Ghost,
        dtype: DType,
        state: State | None = None,
        name: str = "",
        *,
        copy: bool = False,
    ) -> Ghost:
        if tensor.dtype is not dtype or copy:
            copied = self._empty_in_memory(tensor, dtype, state, name if state else "")
            if copied.tier is not tensor.tier:
                self.reader.record_copy(tensor.tier, copied.tier, _state_of(tensor), tensor.nbytes)
            self.reader.record_operator(OperatorKind.COPY, dtype, tensor.nbytes + copied.nbytes)
            return copied
        if state is not None:
            tensor.storage.state, tensor.storage.name = state, name or tensor.storage.name
        return tensor

    def _empty_in_memory(
        self, tensor: Ghost, dtype: DType, state: State | None, name: str
    ) -> Ghost:
        """Return a fake tensor of the same shape in another dtype and in memory."""
        tier = _in_memory(tensor.tier)
        storage = Storage(tensor.numel * dtype.itemsize, tier, state, name, self.reader)
        return Ghost(storage, dtype, tensor.shape)

    def copy_to_tier(self, tensor: Ghost, tier: Tier, state: State) -> Ghost:
        storage = Storage(tensor.nbytes, tier, state, "", self.reader)
        moved = Ghost(storage, tensor.dtype, tensor.shape)
        self.copy(tensor, moved)
        return moved

    def cast_all(self, tensors: Sequence[Ghost], dtype: DType) -> Sequence[Ghost]:
        return [self.cast(tensor, dtype) for tensor in tensors]

    def copy_all(self, pairs: Sequence[tuple[Ghost, Ghost]]) -> None:
        for source, into in pairs:
            self.copy(source, into)

    def copy(self, source: Ghost, into: Ghost) -> None:
        assert source.numel == into.numel, f"{source.numel} elements to {into.numel}"
        if source.tier is not into.tier:
            state = _state_of(into, source)
            self.reader.record_copy(source.tier, into.tier, state, source.nbytes)
        else:
            self.reader.record_operator(OperatorKind.COPY, into.dtype, source.nbytes + into.nbytes)

    def add(self, tensor: Ghost, part: Ghost) -> None:
        assert tensor.numel == part.numel, f"{part.numel} elements to {tensor.numel}"
        # Both operands are read, and one is written.
        size = 2 * tensor.nbytes + part.nbytes
        self.reader.record_operator(OperatorKind.POINTWISE, tensor.dtype, size)

    def fill_zeros(self, tensor: Ghost) -> None:
        """Report the operator; zeros need no other memory."""
        self.reader.record_operator(OperatorKind.POINTWISE, tensor.dtype, tensor.nbytes)

    def view_range(self, tensor: Ghost, start: int, shape: Shape) -> Ghost:
        return Ghost(tensor.storage, tensor.dtype, shape, tensor.start + start)

    def view_window(self, tensor: Ghost, shape: Shape, places: Mapping[int, int]) -> Ghost:
        assert math.prod(shape) == tensor.numel, f"{tensor.numel} elements as {shape}"
        start, stride = tensor.start, 1
        for dim in reversed(range(len(shape))):
            start += stride * places.get(dim, 0)
            stride *= shape[dim]
        narrowed = tuple(1 if dim in places else size for dim, size in enumerate(shape))
        return Ghost(tensor.storage, tensor.dtype, narrowed, start)

    def flatten(self, tensor: Ghost) -> Ghost:
        return Ghost(tensor.storage, tensor.dtype, (tensor.numel,), tensor.start)

    def permute(self, tensor: Ghost, shape: Shape, order: Sequence[int]) -> Ghost:
        self.reader.record_operator(OperatorKind.COPY, tensor.dtype, 2 * tensor.nbytes)
        return self.empty_like(tensor, tensor.numel)

    def unpermute(self, tensor: Ghost, shape: Shape, order: Sequence[int], into: Ghost) -> None:
        self.copy(tensor, into)

    def is_same_memory(self, tensor: Ghost, other: Ghost) -> bool:
        return tensor.storage is other.storage and tensor.start == other.start

    def free_storage(self, tensor: Ghost) -> None:
        tensor.storage.resize(0)

    def allocate_storage(self, tensor: Ghost) -> None:
        tensor.storage.resize(tensor.nbytes)

    def prefetch(self, tensor: Ghost) -> None:
        """Do nothing: pages that are read ahead are in the kernel's page cache."""

    def all_gather(self, shard: Ghost, into: Ghost, axes: Axes, *, is_awaited: bool) -> Work | None:
        self._require_matching(Collective.ALL_GATHER, axes, into, shard)
        state, gather = _state_of(into, shard), Collective.ALL_GATHER
        return self.reader.record_collective(
            gather, axes, state, into.nbytes, "", is_awaited=is_awaited
        )

    def reduce_scatter(
        self, whole: Ghost, into: Ghost, axes: Axes, via: ReduceScatterVia, *, is_awaited: bool
    ) -> PendingResult[Ghost]:
        self._require_matching(Collective.REDUCE_SCATTER, axes, whole, into)
        is_native = via is ReduceScatterVia.NATIVE
        received = None if is_native else self.empty_like(whole, whole.numel)
        named = "" if is_native else via.value
        state = _state_of(*((into, whole) if is_native else (whole,)))
        reduce, size = Collective.REDUCE_SCATTER, whole.nbytes
        work = self.reader.record_collective(
            reduce, axes, state, size, named, is_awaited=is_awaited
        )
        return PendingResult(into, (whole, received), work)

    def all_reduce(self, tensor: Ghost, axes: Axes, *, is_awaited: bool) -> PendingResult[Ghost]:
        assert tensor.tier is Tier.DEVICE, "collectives need device tensors"
        state, reduce = _state_of(tensor), Collective.ALL_REDUCE
        work = self.reader.record_collective(
            reduce, axes, state, tensor.nbytes, "", is_awaited=is_awaited
        )
        return PendingResult(tensor, tensor, work)

    def _require_matching(
        self, collective: Collective, axes: Axes, whole: Ghost, shard: Ghost
    ) -> None:
        """Check sizes, dtypes and tiers of a collective."""
        ranks = math.prod(self._degrees[axis] for axis in axes)
        sizes = f"{collective} over {ranks}: {whole.numel} of {shard.numel}"
        assert whole.numel == ranks * shard.numel and whole.dtype is shard.dtype, sizes
        assert whole.tier is shard.tier is Tier.DEVICE, "collectives need device tensors"


def _state_of(*tensors: Ghost) -> State:
    """Return the state that a call or copy counts as: the first known state of its tensors."""
    states = (tensor.storage.state for tensor in tensors)
    return next((state for state in states if state is not None), State.OTHER)


def _in_memory(tier: Tier) -> Tier:
    """Return the tier of a result computed from a tier: host memory for mapped files."""
    return Tier.HOST if tier is Tier.FILE else tier
