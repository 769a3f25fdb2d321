"""What a life happens in: somewhere to keep tensors, to bring them elsewhere and to send them.

A life (`axes.data`, `optimizers.update`) is written once, for any kind of tensor. On torch's it
trains (`rooms.torch`), on ghosts it predicts (`rooms.ghost`). A tensor is given back when nobody
names it any longer, in both.
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
    """A collective that was issued and not waited for."""

    def wait(self) -> object: ...


class Move(Generic[T]):
    """A collective under way, or one that is over: `wait` gives what it makes. Its buffer lives
    until then."""

    def __init__(
        self,
        result: T,
        buffer: object,
        work: Work | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._result = result
        self._buffer: object = buffer
        self._work = work
        self._finish = finish

    def wait(self) -> T:
        """The result, when it is there. Once."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = self._buffer = None
        return self._result


class OptimizerLeaf(Protocol[T]):
    """What an optimizer knows a tensor by: its value and gradient while it is updated, and the
    state that the optimizer keeps for it."""

    value: T
    gradient: T | None

    @property
    def state(self) -> dict[str, T]: ...


class Optimizer(Protocol[T_contra]):
    """A rule at work on its leaves."""

    def step(self, lr: float, scalars: tuple[T_contra | None, T_contra] | None) -> None:
        """Updates every leaf that has a gradient. `scalars`: of a scaled loss its scale, and
        whether the update is left out: 1 where a gradient overflowed, or the training stops."""


class Room(Protocol[T]):
    """Sizes are elements. A tensor's `state` and `name` say what its bytes and moves count as."""

    def degree(self, axis: Axis) -> int:
        """Return how many ranks there are along an axis."""
        ...

    def coordinate(self, axis: Axis) -> int:
        """Return the rank's place along an axis."""
        ...

    def ordered(self, axes: Axes) -> tuple[Axis, ...]:
        """Axes in the mesh's order, which is the order of ranks in a group over them."""
        ...

    def new(self, numel: int | None, dtype: DType, tier: Tier, state: State, name: str = "") -> T:
        """Somewhere for `numel` elements (None: a scalar) on a tier, with any values."""
        ...

    def zeros(self, numel: int, dtype: DType, tier: Tier, state: State, name: str = "") -> T:
        """The same with zeros."""
        ...

    def like(self, tensor: T, numel: int) -> T:
        """Somewhere for `numel` elements of what is computed from `tensor`, where it is; in memory
        where that is a mapped file."""
        ...

    def zeros_like(self, tensor: T, dtype: DType) -> T:
        """Zeros of its shape on its device, in another dtype."""
        ...

    def scalar_like(self, tensor: T, dtype: DType, initial: float = 0.0) -> T:
        """A number on its device."""
        ...

    def numel(self, tensor: T) -> int: ...

    def dtype(self, tensor: T) -> DType: ...

    def shape(self, tensor: T) -> Shape:
        """() of a scalar."""
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
        """Return the tensor in another dtype, where it is; itself if it is that, unless `copy`."""
        ...

    def move(self, tensor: T, tier: Tier, state: State) -> T:
        """Return a copy on another tier."""
        ...

    def copy(self, source: T, into: T) -> None:
        """Writes all elements of `source` to `into`, which has as many."""

    def add(self, tensor: T, part: T) -> None:
        """Adds `part` in place."""

    def clear(self, tensor: T) -> None:
        """Zeros, in place."""

    def piece(self, tensor: T, start: int, shape: Shape) -> T:
        """A view of contiguous elements from `start` on."""
        ...

    def window(self, tensor: T, shape: Shape, places: Mapping[int, int]) -> T:
        """A view of it, seen as `shape`, at one place of some of its dimensions."""
        ...

    def flat(self, tensor: T) -> T:
        """A contiguous tensor in one dimension; a view."""
        ...

    def permuted(self, tensor: T, shape: Shape, order: Sequence[int]) -> T:
        """A copy in one dimension, seen as `shape` with its dimensions in another order."""
        ...

    def unpermute(self, tensor: T, shape: Shape, order: Sequence[int], into: T) -> None:
        """Writes to `into`, seen as `shape`, what lies in `tensor` with dimensions in that
        order."""

    def same(self, tensor: T, other: T) -> bool:
        """Return whether two tensors of one size begin at the same byte of the same storage."""
        ...

    def empty(self, tensor: T) -> None:
        """Gives its bytes back; the tensor stays."""

    def refill(self, tensor: T) -> None:
        """Somewhere for its bytes again."""

    def ahead(self, tensor: T) -> None:
        """Says that it is needed next: a file is read from now on."""

    def all_gather(self, shard: T, into: T, axes: Axes, *, is_awaited: bool) -> Work | None:
        """`into` (1-d, ranks x shard) becomes the ranks' shards in group order."""
        ...

    def reduce_scatter(
        self, whole: T, into: T, axes: Axes, via: ReduceScatterVia, *, is_awaited: bool
    ) -> Move[T]:
        """`into` becomes this rank's part of the ranks' summed `whole` (1-d, ranks x shard), which
        is used up; by exchange through one more buffer of its size."""
        ...

    def all_reduce(self, tensor: T, axes: Axes, *, is_awaited: bool) -> Move[T]:
        """The tensor becomes the sum of the ranks'."""
        ...


class Rules(Protocol[T]):
    """The optimizers of a room, by the name of a rule."""

    def leaf(self, like: T, dtype: DType) -> OptimizerLeaf[T]:
        """Return an empty leaf in a dtype, on the device of a tensor."""
        ...

    def leaf_of(self, tensor: T) -> OptimizerLeaf[T]:
        """Return the leaf that a tensor is itself, with its own gradient."""
        ...

    def optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[T]], spec: OptimizerSpec
    ) -> Optimizer[T]:
        """A rule at work on leaves of one device."""
        ...


class Members(Protocol[T_contra]):
    """The tensors of one unit, in order, as a model has them."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shapes(self) -> Sequence[Shape]:
        """Of what this rank stores of each."""
        ...

    @property
    def are_cut(self) -> Sequence[bool]:
        """Whether their operators are cut over ranks."""
        ...

    @property
    def cutting_axes(self) -> tuple[Axis, ...]:
        """Over which axes, of those that are."""
        ...

    def adopt(self, whole: T_contra) -> None:
        """Moves their values to a flat tensor, of which they are views from then on."""

    def write(self, index: int, whole: T_contra, *, is_bound: bool) -> None:
        """Writes one's gradient, or zeros where it has none, to its place in a flat tensor, and
        forgets it; if `is_bound`, autograd adds later ones to it there."""

    def collect(self, index: int, whole: T_contra) -> None:
        """Adds one's gradient, if it has one, to its place in a flat tensor, and forgets it."""

    def unbind(self) -> None:
        """Forgets their gradients."""
