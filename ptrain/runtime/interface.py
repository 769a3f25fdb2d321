"""The runtime interface `TensorRuntime`: allocation, copies between memory tiers, collectives.

The code that updates parameters and shards units (`axes.data`, `optimizers.update`) is generic in
the type of tensor. On torch tensors it trains (`runtime.torch`); on fake tensors it predicts
(`runtime.ghost`). In both, a tensor's memory is freed when its last reference goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ptrain.cost import State
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Axes = Sequence[Axis]
Shape = tuple[int, ...]


class Work(Protocol):
    """A collective that was issued and may still be running."""

    def wait(self) -> object: ...


class PendingResult(Generic[T]):
    """A collective that is running or finished. Its buffer is kept alive until `wait`."""

    def __init__(
        self,
        result: T,
        buffer: object,
        work: Work | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Keep a collective until it is waited for.

        Args:
            result: The tensor that the collective produces.
            buffer: Tensors that must stay alive while it runs.
            work: The issued call, None if it has finished.
            finish: Called after the wait, to complete the result.
        """
        self._result = result
        self._buffer: object = buffer
        self._work = work
        self._finish = finish

    def wait(self) -> T:
        """Wait for the collective, complete and return its result. Call it once."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        # The buffer is freed here, also if the caller keeps this object.
        self._work = self._finish = self._buffer = None
        return self._result


class OptimizerLeaf(Protocol[T]):
    """A parameter of an optimizer with its value, its gradient and the optimizer's state.

    Value and gradient may be set during the update only.
    """

    value: T
    gradient: T | None

    @property
    def state(self) -> dict[str, T]: ...


class Optimizer(Protocol[T_contra]):
    """An update rule that is bound to its leaves."""

    def step(self, lr: float, scalars: tuple[T_contra | None, T_contra] | None) -> None:
        """Update every leaf that has a gradient.

        Args:
            lr: The learning rate.
            scalars: The scale of the loss (None: unscaled), and 1 if the update is skipped because
                a gradient overflowed or the training stops, else 0. None: the update always
                happens.
        """


class TensorRuntime(Protocol[T]):
    """The tensor operations of one rank.

    Sizes are in elements. `state` and `name` of a tensor are the state and unit that its bytes and
    moves are counted under.
    """

    def degree(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        ...

    def coordinate(self, axis: Axis) -> int:
        """Return this rank's coordinate along an axis."""
        ...

    def sort_axes(self, axes: Axes) -> tuple[Axis, ...]:
        """Return axes in mesh order, the order of ranks in a group over them."""
        ...

    def new_empty(
        self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = ""
    ) -> T:
        """Return an uninitialized tensor.

        Args:
            numel: Number of elements of a 1-d tensor, None for a 0-d tensor.
            dtype: Its dtype.
            tier: Its tier.
            state: The state that it counts as.
            name: The unit that it belongs to.
        """
        ...

    def zeros(self, numel: int, dtype: DType, tier: Tier, state: State, name: str = "") -> T:
        """Return a 1-d tensor of zeros.

        Args:
            numel: Number of elements.
            dtype: Its dtype.
            tier: Its tier.
            state: The state that it counts as.
            name: The unit that it belongs to, "" if none.
        """
        ...

    def empty_like(self, tensor: T, numel: int) -> T:
        """Return an uninitialized 1-d tensor with the dtype and the state of another tensor.

        Args:
            tensor: The other tensor. The result is on its tier, or in host memory if it is in a
                mapped file.
            numel: Number of elements.
        """
        ...

    def zeros_like(self, tensor: T, dtype: DType, shape: Shape | None = None) -> T:
        """Return zeros of the same or of a smaller shape on the same device, in another dtype."""
        ...

    def scalar_like(self, tensor: T, dtype: DType, initial: float = 0.0) -> T:
        """Return a 0-d tensor with the value `initial` on the same device.

        Args:
            tensor: Decides the device. The result is in host memory if it is in a mapped file.
            dtype: The dtype of the result.
            initial: The value.
        """
        ...

    def numel(self, tensor: T) -> int: ...

    def dtype(self, tensor: T) -> DType: ...

    def shape(self, tensor: T) -> Shape:
        """Return the shape, () for a 0-d tensor."""
        ...

    def cast(
        self,
        tensor: T,
        dtype: DType,
        state: State | None = None,
        name: str = "",
        *,
        copy: bool = False,
    ) -> T:
        """Return the tensor in another dtype, on its tier.

        A tensor that already has the dtype is returned itself, unless `copy`.

        Args:
            tensor: A tensor of any shape.
            dtype: The dtype of the result.
            state: The state that the result counts as, also if it is `tensor` itself. None: a copy
                has no state, and `tensor` keeps its state.
            name: The unit that the result belongs to; ignored without a state.
            copy: Copy even if the dtype is equal.
        """
        ...

    def cast_all(self, tensors: Sequence[T], dtype: DType) -> Sequence[T]:
        """Return tensors of one dtype in another dtype, each on its tier, by one operator."""
        ...

    def copy_to_tier(self, tensor: T, tier: Tier, state: State) -> T:
        """Return a copy on another tier.

        Args:
            tensor: A tensor of any shape; it stays on its tier.
            tier: The tier of the copy.
            state: The state that the copy counts as.

        Returns:
            The copy, in the shape and dtype of `tensor`.
        """
        ...

    def copy(self, source: T, into: T) -> None:
        """Copy all elements of `source` to `into`, which has as many elements."""

    def copy_all(self, pairs: Sequence[tuple[T, T]]) -> None:
        """Copy the first tensor of each pair to the second of equal shape, by one operator."""

    def add(self, tensor: T, part: T) -> None:
        """Add `part` to `tensor` in place."""

    def fill_zeros(self, tensor: T) -> None:
        """Set all elements to zero in place."""

    def view_range(self, tensor: T, start: int, shape: Shape) -> T:
        """Return a view of contiguous elements.

        Args:
            tensor: A contiguous tensor.
            start: The first element.
            shape: The shape of the view.
        """
        ...

    def view_window(self, tensor: T, shape: Shape, places: Mapping[int, int]) -> T:
        """Return a view with size 1 in some dimensions.

        Args:
            tensor: A contiguous tensor.
            shape: The shape to view it as.
            places: The index to keep, by dimension.
        """
        ...

    def flatten(self, tensor: T) -> T:
        """Return a 1-d view of a contiguous tensor."""
        ...

    def permute(self, tensor: T, shape: Shape, order: Sequence[int]) -> T:
        """Return a contiguous 1-d copy with permuted dimensions.

        Args:
            tensor: A contiguous tensor.
            shape: The shape to view it as.
            order: The dimensions of `shape` in their order in the copy.
        """
        ...

    def unpermute(self, tensor: T, shape: Shape, order: Sequence[int], into: T) -> None:
        """Undo `permute`.

        Args:
            tensor: The 1-d permuted tensor.
            shape: The shape of the result.
            order: As in `permute`.
            into: Receives the elements, viewed as `shape`.
        """

    def is_same_memory(self, tensor: T, other: T) -> bool:
        """Return True if two tensors of equal size begin at the same byte of the same storage."""
        ...

    def free_storage(self, tensor: T) -> None:
        """Free a tensor's bytes; the tensor object stays valid for `allocate_storage`."""

    def allocate_storage(self, tensor: T) -> None:
        """Allocate the bytes of an emptied tensor again, uninitialized."""

    def prefetch(self, tensor: T) -> None:
        """Announce that a tensor is needed next, so that reading its file starts now."""

    def all_gather(self, shard: T, into: T, axes: Axes, *, is_awaited: bool) -> Work | None:
        """All-gather a shard, in group order.

        Args:
            shard: This rank's shard.
            into: Receives all shards (1-d, ranks x shard).
            axes: The axes of the group.
            is_awaited: Wait for the result.

        Returns:
            The work to wait for, None if awaited.
        """
        ...

    def reduce_scatter(
        self, whole: T, into: T, axes: Axes, via: ReduceScatterVia, *, is_awaited: bool
    ) -> PendingResult[T]:
        """Sum a tensor over the ranks, and keep this rank's part.

        Args:
            whole: This rank's summand (1-d, ranks x shard), which is overwritten.
            into: Receives this rank's part of the sum.
            axes: The axes of the group.
            via: The native collective, or an all-to-all with a buffer of the size of `whole`.
            is_awaited: Wait for the communication.

        Returns:
            The move; its `wait` returns `into` with the sum.
        """
        ...

    def all_reduce(self, tensor: T, axes: Axes, *, is_awaited: bool) -> PendingResult[T]:
        """Sum a tensor over the ranks in place.

        Args:
            tensor: This rank's summand, which is overwritten with the sum.
            axes: The axes of the group.
            is_awaited: Wait for the communication.

        Returns:
            The move; its `wait` returns `tensor` with the sum.
        """
        ...


class OptimizerFactory(Protocol[T]):
    """The optimizer factory of a runtime, by the name of a rule."""

    def create_leaf(self, like: T, dtype: DType) -> OptimizerLeaf[T]:
        """Return a leaf without elements, whose value is set before each update.

        Args:
            like: A tensor on the device of the update.
            dtype: The dtype of the leaf.
        """
        ...

    def wrap_leaf(self, tensor: T) -> OptimizerLeaf[T]:
        """Return a leaf that uses the tensor, with its gradient, as the parameter."""
        ...

    def create_optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[T]], spec: OptimizerSpec
    ) -> Optimizer[T]:
        """Return an optimizer of a rule for leaves on one device.

        Args:
            rule: The name of the rule, for example `adamw`.
            leaves: The leaves that every step updates; their gradients may be None.
            spec: The hyperparameters. The learning rate is passed to each step instead.
        """
        ...


class UnitParameters(Protocol[T_contra]):
    """The parameters of one unit as the model holds them, in order."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shapes of the local parameters."""
        ...

    @property
    def are_cut(self) -> Sequence[bool]:
        """True for each parameter whose operators are sharded over ranks."""
        ...

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """The axes over which these operators are sharded."""
        ...

    def bind_views(self, whole: T_contra) -> None:
        """Copy the parameters to a flat tensor and make them views of it.

        Args:
            whole: The flat tensor (1-d), large enough for all parameters of the unit.
        """

    def write_gradient(self, index: int, whole: T_contra, *, is_bound: bool) -> None:
        """Write one parameter's gradient to its place in a flat tensor, and drop it.

        Args:
            index: The parameter.
            whole: The flat tensor. A missing gradient is written as zeros.
            is_bound: Make the place the parameter's gradient, so that autograd adds later ones to
                it.
        """

    def add_gradient(self, index: int, whole: T_contra) -> None:
        """Add one parameter's gradient to its place in a flat tensor, and drop it.

        Does nothing if the parameter has no gradient.

        Args:
            index: The parameter's index in the unit.
            whole: The flat tensor of the unit (1-d), in which gradients are summed.
        """

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters."""
