"""A step of flat units: who is gathered when, what is reduced beside the backward pass, and when a
unit's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from ptrain.axes.data.theta import Parameters, UnitTheta
from ptrain.axes.data.update import Gradients, UnitState
from ptrain.cost import State
from ptrain.rooms.room import T
from ptrain.spec.dials import GradientSync
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind

# Which flat units are one: as in DistributedDataParallel a bucket takes gradients as they come. It
# has no more than so many bytes, but for a unit that alone has more: DistributedDataParallel's,
# which is full once it has them, exceeds them by a tensor, where ours would by a block. On gloo
# that is dear: beyond 32 MiB, which a stock bucket stays below, its collectives' own copy of a
# buffer is memory that the kernel hands out anew, and clears, in every call.
#
# Units go into it whole: the last block first, the root at the end, whose embedding's gradient is
# the last of all. A bucket of many blocks is one collective where they were many; of blocks that
# fill one each, as those of large models do, nothing changes. The first is no smaller than the
# others, as DistributedDataParallel's is: what would begin a little earlier is one collective
# more.


Modules = tuple[str, ...]
_ROOT = ("",)


def buckets_of(plan: Plan, units: Sequence[tuple[Modules, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the places of the units that are one, in the order of wrapping; `units` are modules
    and trained elements of each on this rank. What is frozen altogether stays alone, and so does
    what two stages share: its gradient is summed over the two by itself."""
    step = plan.wrap
    assert isinstance(step, FlatUnits), "whose units have flat buffers"
    pairs = plan.pipeline.shared if plan.pipeline else ()
    shared = {(name.rpartition(".")[0],) for pair in pairs for name in pair}
    itemsize = plan.update.layout.reduced.itemsize
    buckets: list[list[int]] = []
    bucket: list[int] = []
    filled = 0
    for place in sorted(range(len(units)), key=lambda place: (units[place][0] == _ROOT, -place)):
        modules, numel = units[place]
        if not numel or modules in shared:
            buckets.append([place])
            continue
        if bucket and filled + numel * itemsize > step.bucket_bytes:
            buckets.append(bucket)
            bucket, filled = [], 0
        bucket.append(place)
        filled += numel * itemsize
    if bucket:
        buckets.append(bucket)
    return tuple(sorted((tuple(sorted(own)) for own in buckets), key=max))


U = TypeVar("U", bound="UnitUse[Any]")


class Order(Generic[T]):
    """The units in the order of their first use, known from the second forward pass on: what is
    brought to the device ahead of its use."""

    def __init__(self, step: FlatUnits) -> None:
        self.ahead = step.prefetch
        self.is_on_file = step.reads_files
        self.used: list[UnitTheta[T]] = []
        self.is_known = False

    def gather(self, unit: UnitTheta[T], *, is_forward: bool) -> None:
        """Gather a unit, and begin with those that follow in this direction."""
        if is_forward and not self.is_known:
            self._note(unit)
        unit.gather()
        if not self.is_known or not (self.ahead or self.is_on_file) or unit not in self.used:
            return
        place = self.used.index(unit)
        following = self.used[place + 1 :] if is_forward else self.used[:place][::-1]
        for other in following[: self.ahead]:
            other.prefetch()
        for other in following[self.ahead : self.ahead + 1]:
            other.read_ahead()

    def _note(self, unit: UnitTheta[T]) -> None:
        if self.used and unit is self.used[0]:
            self.is_known = True
        elif unit not in self.used:
            self.used.append(unit)


class OverlappedReduction(Generic[T]):
    """The one reduction that runs beside the backward pass."""

    def __init__(self) -> None:
        self._under_way: Gradients[T] | None = None

    @property
    def is_over(self) -> bool:
        return self._under_way is None

    def complete(self) -> None:
        """Wait for it."""
        if self._under_way is not None:
            self._under_way.complete()
        self._under_way = None

    def begin(self, gradients: Gradients[T]) -> None:
        self._under_way = gradients


class UnitParts(NamedTuple, Generic[T]):
    """What there is of a unit: Theta, Omega and G of what is trained, and Theta of what is frozen.
    One of the two there always is."""

    trained: UnitState[T] | None
    frozen: Parameters[T] | None
    step: FlatUnits
    is_root: bool

    @property
    def theta(self) -> UnitTheta[T]:
        """Return what is gathered together."""
        trained = None if self.trained is None else self.trained.parameters
        return UnitTheta([part for part in (trained, self.frozen) if part is not None])


class UnitUse(Generic[T]):
    """One unit where it is used: gathered before, and given back after. What is frozen of it may be
    used behind its last gradient, so it goes when backward has left the unit."""

    def __init__(self, parts: UnitParts[T], order: Order[T]) -> None:
        self.theta, self.frozen, self.order = parts.theta, parts.frozen, order
        self.sync = parts.step.sync
        self.is_released = bool(self.sync.after_forward(is_root=parts.is_root))  # after forward
        self.is_last = True

    def before_forward(self, *, is_again: bool = False) -> None:
        """`is_again`: backward computes forward again."""
        self.order.gather(self.theta, is_forward=not is_again)

    def after_forward(self) -> None:
        if self.is_released:
            self.theta.release()

    def before_backward(self) -> None:
        """The gradient of an output is there."""
        self.order.gather(self.theta, is_forward=False)

    def after_backward(self) -> None:
        """The gradients of the inputs are there (or the pass is over)."""
        if self.frozen is not None and self.is_given_back:
            self.frozen.release()

    @property
    def is_given_back(self) -> bool:
        """Whether it is not kept for the next micro-batch."""
        return self.is_last or self.sync.reshard_after_backward

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield what is kept of it, each tensor with its state."""
        if self.frozen is not None:
            yield self.frozen.state, self.frozen.stored

    def signature(self) -> Hashable:
        """Return what a pass depends on."""
        return self.theta.signature()


class UnitLife(UnitUse[T]):
    """One unit of which something is trained: reduced when its gradients are complete."""

    def __init__(
        self,
        parts: UnitParts[T],
        state: UnitState[T],
        order: Order[T],
        flight: OverlappedReduction[T],
        *,
        is_pipelined: bool,
    ) -> None:
        super().__init__(parts, order)
        self.state, self.parameters, self.gradients = state, state.parameters, state.gradients
        self.flight = flight
        self.consume: Callable[[], None] | None = None
        self.pending = 0  # gradients that this pass has yet to complete
        # Full gradients are reduced once, in the last pass, and no later pass needs their memory:
        # in a pipeline none of these reductions is awaited before all passes are over.
        self.is_deferred = is_pipelined and not self.gradients.cut

    def before_backward(self) -> None:
        super().before_backward()
        if self.pending == 0:
            self.pending = len(self.state.members.names)
            self.gradients.open()

    def accumulated(self, index: int) -> None:
        """Autograd has the gradient of a tensor."""
        self.gradients.accumulated(index)
        self.pending -= 1
        if self.pending == 0:
            self.finish()

    def begin_weights(self) -> None:
        """Gradients of weights alone are to come, which autograd gives to nobody's hook: they are
        added to zeros, as they would else all stand beside the buffer until the pass is over."""
        self.gradients.open()
        self.gradients.fill()

    def end_weights(self) -> None:
        """They are there."""
        for index in range(len(self.state.members.names)):
            self.gradients.accumulated(index)
        self.finish()

    def finish(self) -> None:
        """The unit's backward is complete (or the pass is over and some parameter had no part)."""
        self.pending = 0
        is_due = self.is_last or self.sync.gradients is GradientSync.EVERY
        if is_due and not self.is_deferred:
            self.flight.complete()
        self.gradients.finish(is_last=self.is_last, is_due=is_due)
        if not self.is_deferred:
            self.flight.begin(self.gradients)
        if self.consume is not None:
            self.gradients.for_update()
        if self.is_given_back:
            self.parameters.release()
        if self.consume is not None:
            self.consume()
            self.gradients.clear()

    def storages(self) -> Iterator[tuple[State, T]]:
        yield self.parameters.state, self.parameters.stored
        yield from ((State.GRADIENTS, held) for held in self.gradients.held())
        yield from super().storages()

    def signature(self) -> Hashable:
        return self.pending, super().signature(), self.gradients.signature()


class ModelLife(Generic[T]):
    """All units of one model under one plan step, in the order of wrapping; `trained` are those of
    which something is. In a pipeline the last reduction of a pass is awaited when the pass is over
    and its gradient is sent: another stage waits for that."""

    def __init__(
        self, units: Sequence[UnitParts[T]], step: FlatUnits, *, is_pipelined: bool
    ) -> None:
        self.step, self.is_pipelined = step, is_pipelined
        self.flight = OverlappedReduction[T]()
        order = Order[T](step)
        self.all: list[UnitUse[T]] = []
        self.trained: list[UnitLife[T]] = []
        for parts in units:
            if parts.trained is None:
                self.all.append(UnitUse(parts, order))
                continue
            life = UnitLife(parts, parts.trained, order, self.flight, is_pipelined=is_pipelined)
            self.trained.append(life)
            self.all.append(self.trained[-1])
        for unit, following in pairwise(self.trained):
            unit.state.following = following.state

    def do(self, units: Iterable[U], act: Callable[[U], None]) -> None:
        """Do the same to units, one after the other."""
        for unit in units:
            act(unit)

    def begin_pass(self, *, is_last: bool) -> None:
        """A backward pass is to come; the last one reduces and reshards whatever the policy."""
        for unit in self.all:
            unit.is_last = is_last

    def end_pass(self, *, is_last: bool) -> None:
        """It is over."""
        self.do((unit for unit in self.trained if unit.pending), UnitLife.finish)
        if not self.is_pipelined:
            self.flight.complete()
        self.do(self.all, UnitUse.after_backward)
        if is_last:
            self.release()

    def begin_half(self, kind: Kind, *, is_last: bool) -> None:
        """A half of a backward pass: of the gradients of inputs, or of weights."""
        self.begin_pass(is_last=is_last and kind is Kind.WEIGHT)
        if kind is Kind.WEIGHT:
            self.do(self.trained, UnitLife.begin_weights)

    def end_half(self, kind: Kind, *, is_last: bool) -> None:
        """It is over."""
        if kind is Kind.WEIGHT:
            self.do(self.trained[::-1], UnitLife.end_weights)
        if is_last:
            self.release()

    def begin_passes(self) -> None:
        """Before the passes of a step in a pipeline: begin the gathers that the update left to the
        next use, the root's first, whose embedding is used first. Stages wait for a message."""
        units = [*self.trained[-1:], *self.trained[:-1]]
        self.do(units, lambda unit: unit.parameters.begin_settling())

    def settle(self) -> None:
        """Before the next pass: wait for the reduction that this one left."""
        self.flight.complete()

    def end_passes(self) -> None:
        """After all of them: wait for the reductions that they left."""
        self.settle()
        self.do(self.trained[::-1], lambda unit: unit.gradients.complete())

    def release(self) -> None:
        """What was gathered and not used is stale after an update."""
        self.do(self.all, lambda unit: unit.theta.release())

    def for_update(self) -> None:
        """Gradients into the layout of the update."""
        self.end_passes()
        self.do(self.trained, lambda unit: unit.gradients.for_update())

    def consume_with(self, update: Callable[[int], None]) -> None:
        """G = M: `update(i)` updates the i-th unit as soon as its gradients are complete."""
        for unit in self.trained:
            unit.consume = _call(update, self.all.index(unit))

    def finish_update(self) -> None:
        """Complete the gathers that the update left running: they come in the order in which they
        were issued, so whoever waits for the last one waits once."""
        self.do(self.trained[::-1], lambda unit: unit.parameters.finish_update())

    def clear_gradients(self) -> None:
        self.do(self.trained, lambda unit: unit.gradients.clear())

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield what is kept of Theta, and all that there is of G, each tensor with its state."""
        for unit in self.all:
            yield from unit.storages()

    def signature(self) -> Hashable:
        """Return what a pass depends on: with equal ones it does the same."""
        return tuple(unit.signature() for unit in self.all), self.flight.is_over


def _call(update: Callable[[int], None], index: int) -> Callable[[], None]:
    return lambda: update(index)
