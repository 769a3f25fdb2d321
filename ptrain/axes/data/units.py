"""The runtime of flat units within a step: gathers, overlapped reductions, complete gradients.

Units can be joined to buckets like DistributedDataParallel's, which fill as gradients
arrive. DDP's bucket is full once it reaches its size, so it exceeds it by at most a tensor; a
bucket of units would exceed it by a block. A bucket here therefore has at most its size, unless a
single unit has more. Larger buckets are slow on gloo: above 32 MiB, which default buckets stay
below, the kernel has to map and clear new memory for gloo's copy of a buffer in every call.

Units are never split between buckets. The last block comes first and the root last, since the
gradient of its embedding is the last one. Joining many small blocks replaces many collectives by
one; for blocks that fill a bucket each, as in large models, nothing changes. The first bucket is as
large as the others, unlike DDP's: a smaller one would start a little earlier but add a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from ptrain.axes.data.theta import Parameters, UnitTheta
from ptrain.axes.data.update import Gradients, UnitState
from ptrain.cost import State
from ptrain.runtime.interface import T
from ptrain.spec.dials import GradientSync
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind

Modules = tuple[str, ...]
_ROOT = ("",)


def buckets_of(plan: Plan, units: Sequence[tuple[Modules, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the units in each bucket, in order of wrapping.

    Frozen units stay alone. So do units that two stages share, since their gradients are summed
    over the two stages separately.

    Args:
        plan: The plan, with flat units.
        units: Modules and number of trained elements on this rank of each unit.
    """
    step = plan.wrap
    assert isinstance(step, FlatUnits), "whose units have flat buffers"
    pairs = plan.pipeline.shared if plan.pipeline else ()
    shared = {(name.rpartition(".")[0],) for pair in pairs for name in pair}
    itemsize = plan.update.layout.reduced.itemsize
    buckets: list[list[int]] = []
    bucket: list[int] = []
    filled = 0
    # The order in which backward completes gradients: the last block first, the root last.
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


class UnitOrder(Generic[T]):
    """The order of the units' first use, known from the second forward pass on, for prefetching."""

    def __init__(self, step: FlatUnits) -> None:
        self.ahead = step.prefetch
        self.is_on_file = step.reads_files
        self.used: list[UnitTheta[T]] = []
        self.in_backward: set[UnitTheta[T]] = set()  # a gradient came to them in some pass
        self.is_known = False

    def gather(self, unit: UnitTheta[T], *, is_forward: bool) -> None:
        """Gather a unit, and start to gather the units that follow in this direction."""
        if is_forward and not self.is_known:
            self._record_use(unit)
        if not is_forward:
            self.in_backward.add(unit)
        unit.gather()
        if not self.is_known or not (self.ahead or self.is_on_file) or unit not in self.used:
            return
        place = self.used.index(unit)
        if is_forward:
            following = self.used[place + 1 :]
        else:  # before the first trained parameter nothing is computed
            following = [other for other in self.used[:place][::-1] if other in self.in_backward]
        # After the gather of the unit itself, which must not queue after prefetched ones.
        for other in following[: self.ahead]:
            other.prefetch()
        # one unit more: its file is read while the units before it are gathered
        for other in following[self.ahead : self.ahead + 1]:
            other.read_ahead()

    def _record_use(self, unit: UnitTheta[T]) -> None:
        """Record a unit's first use; the order is known when the first unit is used again."""
        if self.used and unit is self.used[0]:
            self.is_known = True
        elif unit not in self.used:
            self.used.append(unit)


class OverlappedReduction(Generic[T]):
    """The reduction that overlaps with backward; there is at most one at a time."""

    def __init__(self) -> None:
        self._running: Gradients[T] | None = None

    @property
    def is_over(self) -> bool:
        """True if no reduction is running."""
        return self._running is None

    def wait(self) -> None:
        """Wait for the running reduction, if any."""
        if self._running is not None:
            self._running.wait()
        self._running = None

    def begin(self, gradients: Gradients[T]) -> None:
        """Remember a reduction that was started."""
        self._running = gradients


class UnitParts(NamedTuple, Generic[T]):
    """The state of one unit: trained parameters with their state, and frozen parameters.

    At least one of the two is present.
    """

    trained: UnitState[T] | None
    frozen: Parameters[T] | None
    step: FlatUnits
    is_root: bool

    @property
    def theta(self) -> UnitTheta[T]:
        """The parameters that are gathered together."""
        trained = None if self.trained is None else self.trained.parameters
        return UnitTheta([part for part in (trained, self.frozen) if part is not None])


class UnitUse(Generic[T]):
    """A unit in use: gathered before, and freed afterwards.

    Frozen parameters may be needed after the unit's last gradient, so they are freed when backward
    has left the unit.
    """

    def __init__(self, parts: UnitParts[T], order: UnitOrder[T]) -> None:
        self.theta, self.frozen, self.order = parts.theta, parts.frozen, order
        self.sync = parts.step.sync
        # resharded after forward
        self.is_released = bool(self.sync.after_forward(is_root=parts.is_root))
        self.is_last = True

    def before_forward(self, *, is_again: bool = False) -> None:
        """Gather the unit; `is_again`: backward recomputes this forward."""
        self.order.gather(self.theta, is_forward=not is_again)

    def after_forward(self) -> None:
        """Free the unit if it is resharded after forward."""
        if self.is_released:
            self.theta.release()

    def before_backward(self) -> None:
        """Gather the unit when the gradient of an output has arrived."""
        self.order.gather(self.theta, is_forward=False)

    def after_backward(self) -> None:
        """Free frozen parameters when backward has left the unit, or the pass has ended."""
        if self.frozen is not None and self.is_given_back:
            self.frozen.release()

    @property
    def is_given_back(self) -> bool:
        """True if the unit is freed after this micro-batch's backward."""
        return self.is_last or self.sync.reshard_after_backward

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield the unit's stored tensors with their states."""
        if self.frozen is not None:
            yield self.frozen.state, self.frozen.stored

    def signature(self) -> Hashable:
        """Return a key of the state that a pass depends on."""
        return self.theta.signature()


class UnitRuntime(UnitUse[T]):
    """The runtime of a unit with trained parameters, which reduces its gradients once complete."""

    def __init__(
        self,
        parts: UnitParts[T],
        state: UnitState[T],
        order: UnitOrder[T],
        flight: OverlappedReduction[T],
        *,
        is_pipelined: bool,
    ) -> None:
        super().__init__(parts, order)
        self.state, self.parameters, self.gradients = state, state.parameters, state.gradients
        self.flight = flight
        self.consume: Callable[[], None] | None = None
        self.pending = 0  # gradients that are still missing in this pass
        # Full gradients are reduced once, in the last pass, and no later pass needs their memory.
        # In a pipeline, none of these reductions is waited for before all passes have ended.
        self.is_deferred = is_pipelined and not self.gradients.cut

    def before_backward(self) -> None:
        """Gather the unit and allocate its gradients."""
        super().before_backward()
        # A unit has several outputs, whose gradients arrive one by one. Only the first of them
        # starts the count.
        if self.pending == 0:
            self.pending = len(self.state.members.names)
            self.gradients.allocate_buffer()

    def handle_gradient(self, index: int) -> None:
        """Handle the gradient that autograd has accumulated for one tensor."""
        self.gradients.take_gradient(index)
        self.pending -= 1
        if self.pending == 0:
            self.finish()

    def begin_weights(self) -> None:
        """Allocate zeros for gradients of a pass that computes weight gradients only.

        Autograd calls no hook in such a pass. Without zeros to add to, all its gradients would be
        live together with the buffer until the end of the pass.
        """
        self.gradients.allocate_buffer()
        self.gradients.zero_missing()

    def end_weights(self) -> None:
        """Complete the gradients of a pass that computes weight gradients only."""
        for index in range(len(self.state.members.names)):
            self.gradients.take_gradient(index)
        self.finish()

    def finish(self) -> None:
        """Complete the unit's backward: reduce if due, free parameters, update if consumed.

        It is also called at the end of a pass in which some parameter got no gradient.
        """
        self.pending = 0
        is_due = self.is_last or self.sync.gradients is GradientSync.EVERY
        # at most one reduction runs at a time, so wait for the previous unit's
        if is_due and not self.is_deferred:
            self.flight.wait()
        self.gradients.finish(is_last=self.is_last, is_due=is_due)
        if not self.is_deferred:
            self.flight.begin(self.gradients)
        if self.consume is not None:
            self.gradients.for_update()
        if self.is_given_back:
            self.parameters.release()
        if self.consume is not None:
            # After the release: the update works on stored parameters, so the full ones need not be
            # live.
            self.consume()
            self.gradients.clear()

    def storages(self) -> Iterator[tuple[State, T]]:
        yield self.parameters.state, self.parameters.stored
        yield from ((State.GRADIENTS, held) for held in self.gradients.live_tensors())
        yield from super().storages()

    def signature(self) -> Hashable:
        return self.pending, super().signature(), self.gradients.signature()


class ModelRuntime(Generic[T]):
    """The runtime of all units of a model, in order of wrapping.

    In a pipeline, the last reduction of a pass is waited for after the pass has ended and its
    gradient is sent, because another stage waits for that gradient.

    Attributes:
        all: All units.
        trained: The units with trained parameters.
    """

    def __init__(
        self, units: Sequence[UnitParts[T]], step: FlatUnits, *, is_pipelined: bool
    ) -> None:
        self.step, self.is_pipelined = step, is_pipelined
        self.flight = OverlappedReduction[T]()
        order = UnitOrder[T](step)
        self.all: list[UnitUse[T]] = []
        self.trained: list[UnitRuntime[T]] = []
        for parts in units:
            if parts.trained is None:
                self.all.append(UnitUse(parts, order))
                continue
            life = UnitRuntime(parts, parts.trained, order, self.flight, is_pipelined=is_pipelined)
            self.trained.append(life)
            self.all.append(self.trained[-1])
        for unit, following in pairwise(self.trained):
            unit.state.following = following.state

    def for_each(self, units: Iterable[U], act: Callable[[U], None]) -> None:
        """Call `act` with each unit, in order."""
        for unit in units:
            act(unit)

    def begin_pass(self, *, is_last: bool) -> None:
        """Begin a backward pass; the last one reduces and reshards whatever the sync policy is."""
        for unit in self.all:
            unit.is_last = is_last

    def end_pass(self, *, is_last: bool) -> None:
        """End a backward pass."""
        # Ranks must issue the same collectives, also for a unit in which some parameter got no
        # gradient on this rank.
        self.for_each((unit for unit in self.trained if unit.pending), UnitRuntime.finish)
        if not self.is_pipelined:
            self.flight.wait()
        self.for_each(self.all, UnitUse.after_backward)
        if is_last:
            self.release()

    def begin_half(self, kind: Kind, *, is_last: bool) -> None:
        """Begin a half of a backward pass: the gradients of inputs, or of weights."""
        self.begin_pass(is_last=is_last and kind is Kind.WEIGHT)
        if kind is Kind.WEIGHT:
            self.for_each(self.trained, UnitRuntime.begin_weights)

    def end_half(self, kind: Kind, *, is_last: bool) -> None:
        """End a half of a backward pass."""
        if kind is Kind.WEIGHT:
            # Last unit first, in the order of a full backward pass.
            self.for_each(self.trained[::-1], UnitRuntime.end_weights)
        if is_last:
            self.release()

    def begin_passes(self) -> None:
        """Start the gathers that the last update left to a step's passes in a pipeline.

        The root's comes first, since its embedding is used first. They run while stages wait for
        messages.
        """
        units = [*self.trained[-1:], *self.trained[:-1]]
        self.for_each(units, lambda unit: unit.parameters.begin_settling())

    def finish_reduction(self) -> None:
        """Wait for the reduction that the last pass left running, before the next pass."""
        self.flight.wait()

    def end_passes(self) -> None:
        """Wait for the reductions that all passes left running."""
        self.finish_reduction()
        self.for_each(self.trained[::-1], lambda unit: unit.gradients.wait())

    def release(self) -> None:
        """Free all gathered parameters, since unused ones would be stale after an update."""
        self.for_each(self.all, lambda unit: unit.theta.release())

    def for_update(self) -> None:
        """Bring gradients into the layout of the update."""
        self.end_passes()
        self.for_each(self.trained, lambda unit: unit.gradients.for_update())

    def consume_with(self, update: Callable[[int], None]) -> None:
        """Call `update(i)` as soon as the gradients of the i-th unit are complete (G = M)."""
        for unit in self.trained:
            unit.consume = _bind_update(update, self.all.index(unit))

    def finish_update(self) -> None:
        """Complete the gathers that the update left running.

        They finish in the order in which they were issued, so waiting for the last one first waits
        once.
        """
        self.for_each(self.trained[::-1], lambda unit: unit.parameters.finish_update())

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self.for_each(self.trained, lambda unit: unit.gradients.clear())

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield stored parameters and all live gradients with their states."""
        for unit in self.all:
            yield from unit.storages()

    def signature(self) -> Hashable:
        """Return a key of the state that a pass depends on: passes with equal keys do the same."""
        return tuple(unit.signature() for unit in self.all), self.flight.is_over


def _bind_update(update: Callable[[int], None], index: int) -> Callable[[], None]:
    """Bind the index of a unit to an update function."""
    return lambda: update(index)
