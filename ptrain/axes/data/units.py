"""A step of flat units: who is gathered when, what is reduced beside the backward pass, and when a
unit's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic

from ptrain.axes.data.gradients import Gradients
from ptrain.axes.data.theta import Parameters
from ptrain.axes.data.update import UnitState
from ptrain.costs import State
from ptrain.rooms.room import T
from ptrain.spec.dials import GradientSync
from ptrain.spec.placement import Tier
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind


class Order(Generic[T]):
    """The units in the order of their first use, known from the second forward pass on: what is
    brought to the device ahead of its use."""

    def __init__(self, step: FlatUnits) -> None:
        self.ahead = step.prefetch
        self.is_on_file = step.parameters_tier is Tier.FILE
        self.used: list[Parameters[T]] = []
        self.is_known = False

    def gather(self, unit: Parameters[T], *, is_forward: bool) -> None:
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
            if not other.is_gathered:
                other.room.ahead(other.stored)

    def _note(self, unit: Parameters[T]) -> None:
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


class UnitLife(Generic[T]):
    """One unit: gathered before use, reduced when its gradients are complete."""

    def __init__(
        self, state: UnitState[T], order: Order[T], flight: OverlappedReduction[T], *, is_root: bool
    ) -> None:
        self.state, self.parameters, self.gradients = state, state.parameters, state.gradients
        self.sync = state.step.sync
        self.is_released = bool(self.sync.after_forward(is_root=is_root))  # after forward
        self.order, self.flight = order, flight
        self.consume: Callable[[], None] | None = None
        self.is_last = True
        self.pending = 0  # gradients that this pass has yet to complete

    def before_forward(self, *, is_again: bool = False) -> None:
        """`is_again`: backward computes forward again."""
        self.order.gather(self.parameters, is_forward=not is_again)

    def after_forward(self) -> None:
        if self.is_released:
            self.parameters.release()

    def before_backward(self) -> None:
        """The gradient of an output is there."""
        self.order.gather(self.parameters, is_forward=False)
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
        if is_due:
            self.flight.complete()
        self.gradients.finish(is_last=self.is_last, is_due=is_due)
        self.flight.begin(self.gradients)
        if self.consume is not None:
            self.gradients.for_update()
        if self.is_last or self.sync.reshard_after_backward:
            self.parameters.release()
        if self.consume is not None:
            self.consume()
            self.gradients.clear()

    def signature(self) -> Hashable:
        """Return what a pass depends on."""
        return self.pending, self.parameters.signature(), self.gradients.signature()


class ModelLife(Generic[T]):
    """All units of one model under one plan step, in the order of wrapping. `is_root` says of each
    whether it is what no other unit has."""

    def __init__(
        self, states: Sequence[UnitState[T]], is_root: Sequence[bool], step: FlatUnits
    ) -> None:
        self.step = step
        self.flight = OverlappedReduction[T]()
        order = Order[T](step)
        self.all = [
            UnitLife(state, order, self.flight, is_root=root)
            for state, root in zip(states, is_root, strict=True)
        ]
        for state, following in pairwise(states):
            state.following = following

    def do(self, units: Iterable[UnitLife[T]], act: Callable[[UnitLife[T]], None]) -> None:
        """Do the same to units, one after the other."""
        for unit in units:
            act(unit)

    def begin_pass(self, *, is_last: bool) -> None:
        """A backward pass is to come; the last one reduces and reshards whatever the policy."""
        for unit in self.all:
            unit.is_last = is_last

    def end_pass(self, *, is_last: bool) -> None:
        """It is over."""
        self.do((unit for unit in self.all if unit.pending), UnitLife.finish)
        self.flight.complete()
        if is_last:
            self.release()

    def begin_half(self, kind: Kind, *, is_last: bool) -> None:
        """A half of a backward pass: of the gradients of inputs, or of weights."""
        if kind is Kind.WEIGHT:
            self.begin_pass(is_last=is_last)
            self.do(self.all, UnitLife.begin_weights)

    def end_half(self, kind: Kind, *, is_last: bool) -> None:
        """It is over."""
        if kind is Kind.WEIGHT:
            self.do(self.all[::-1], UnitLife.end_weights)
        self.flight.complete()
        if is_last:
            self.release()

    def release(self) -> None:
        """What was gathered and not used is stale after an update."""
        self.do(self.all, lambda unit: unit.parameters.release())

    def for_update(self) -> None:
        """Gradients into the layout of the update."""
        self.do(self.all, lambda unit: unit.gradients.for_update())

    def consume_with(self, update: Callable[[int], None]) -> None:
        """G = M: `update(i)` updates the i-th unit as soon as its gradients are complete."""
        for index, unit in enumerate(self.all):
            unit.consume = _call(update, index)

    def finish_update(self) -> None:
        """Complete the gathers that the update left running."""
        self.do(self.all, lambda unit: unit.parameters.finish_update())

    def clear_gradients(self) -> None:
        self.do(self.all, lambda unit: unit.gradients.clear())

    def storages(self) -> Iterator[tuple[State, T]]:
        """Yield what is kept of Theta, and all that there is of G, each tensor with its state."""
        for unit in self.all:
            yield unit.parameters.state, unit.parameters.stored
            for held in unit.gradients.held():
                yield State.GRADIENTS, held

    def signature(self) -> Hashable:
        """Return what a pass depends on: with equal ones it does the same."""
        return tuple(unit.signature() for unit in self.all), self.flight.is_over


def _call(update: Callable[[int], None], index: int) -> Callable[[], None]:
    return lambda: update(index)
