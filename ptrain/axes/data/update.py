"""What the optimizer updates of one flat unit: a shard over the update's axes, or, where an update
needs whole tensors (Muon), each of them.

For whole tensors, what is gathered or moved is gathered or moved once for the unit: its gradient,
its value where Theta is not whole in place, and what is written back. Optimizer state is kept by
tensor.
"""

from __future__ import annotations

import math
from typing import Generic

from ptrain.axes.data.cuts import Cuts
from ptrain.axes.data.gradients import Gradients
from ptrain.axes.data.route import Route, RoutedSlot, TensorSlot
from ptrain.axes.data.theta import Parameters
from ptrain.cost import State
from ptrain.optimizers.update import Resident, Slot
from ptrain.rooms.room import Members, T
from ptrain.spec.placement import Tier, without
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits


class UnitState(Generic[T]):
    """Theta and G of one unit, and what is read of the next one while this one is updated."""

    def __init__(self, members: Members[T], cuts: Cuts[T], step: FlatUnits, layout: Layout) -> None:
        self.members, self.cuts, self.room, self.step = members, cuts, cuts.room, step
        self.parameters = Parameters(members, cuts, step, layout)
        self.gradients = Gradients(self.parameters, step)
        self.slots: list[T] = []  # on file, to be read ahead
        self.following: UnitState[T] | None = None

    def read_ahead(self) -> None:
        """Announce what the update of the following unit needs."""
        if self.following is not None:
            self.following.gradients.read_ahead()
            for tensor in (self.following.parameters.stored, *self.following.slots):
                self.room.ahead(tensor)

    def route(self, cuts: Cuts[T]) -> Route[T]:
        """Return the route of optimizer state that is cut as `cuts` says."""
        return Route(
            cuts=cuts,
            kept=self.step.optimizer,
            updated=self.step.updated,
            tier=self.step.optimizer_tier,
            update_tier=self.step.update_tier,
        )

    def value(self) -> T:
        """Theta's part over the update's axes on the update's tier: in place where it is that."""
        parameters, cut, room = self.parameters, self.step.updated, self.room
        held, tier, now = parameters.stored, parameters.tier, parameters.cut
        if parameters.is_materialized:
            return parameters.route.fetch(held)
        if tier is Tier.FILE:
            held, tier = room.move(held, Tier.HOST, State.PARAMETERS), Tier.HOST
        if missing := without(now, cut):
            if tier is Tier.HOST:
                held, tier = room.move(held, Tier.DEVICE, State.PARAMETERS), Tier.DEVICE
            held = self.cuts.gather(held, now, missing, State.PARAMETERS)
            now = without(now, missing)
        held = self.cuts.take(held, now, cut)
        if tier is not self.step.update_tier:
            held = room.move(held, self.step.update_tier, State.PARAMETERS)
        return held

    def store(self, value: T) -> None:
        """Write an updated shard back to where Theta lives, gathering it where Theta is wider."""
        parameters, step, cut, room = self.parameters, self.step, self.step.updated, self.room
        missing, extra = without(cut, parameters.cut), without(parameters.cut, cut)
        part, tier, place = value, step.update_tier, parameters.place(missing)
        if place is None or extra or tier is not Tier.DEVICE:
            part = room.cast(value, parameters.dtype)
        if parameters.is_materialized:
            parameters.route.put(parameters.stored, part)
            return
        if extra:
            part = self.cuts.take(part, cut, parameters.cut)
        if missing:
            if place is not None:
                part = self._placed(part, place)
            elif tier is not Tier.DEVICE:
                part = room.move(part, Tier.DEVICE, State.PARAMETERS)
            parameters.spread(part, (*cut, *extra), missing, step.gather_after_update)
        elif not room.same(part, parameters.stored):
            if parameters.tier is Tier.FILE and tier is Tier.DEVICE:
                part = room.move(part, Tier.HOST, State.PARAMETERS)
            room.copy(part, parameters.stored)

    def _placed(self, part: T, place: T) -> T:
        """Write a part to where it belongs: nothing beside it lives until it is gathered."""
        if not self.room.same(part, place):
            self.room.copy(part, place)
        return place


class ShardTarget(Generic[T]):
    """One unit: its shard over the axes of the update."""

    is_in_place = False
    is_frozen = False

    def __init__(self, unit: UnitState[T]) -> None:
        self.unit = unit
        self.owns_master = unit.parameters.is_materialized

    def lasting(self) -> T | None:
        """A shard's gradient comes to it."""

    def working_gradient(self) -> T | None:
        self.unit.read_ahead()
        return self.unit.gradients.working()

    def value(self) -> T:
        return self.unit.value()

    def store(self, value: T) -> None:
        self.unit.store(value)

    def slot(self, initial: T) -> Slot[T]:
        route = self.unit.route(self.unit.cuts)
        if route.is_in_place:
            return Resident(_tagged(self.unit, initial))
        slot = RoutedSlot(route, initial)
        self.unit.slots.append(slot.stored)
        return slot


class TensorsUpdate(Generic[T]):
    """One unit while its tensors are updated."""

    def __init__(self, unit: UnitState[T]) -> None:
        assert not unit.step.updated, "whole tensors are updated where the update is on no shard"
        self.unit, self.room = unit, unit.room
        self.shapes = unit.members.shapes
        self._whole = ShardTarget(unit)
        self._gradient: T | None = None
        self._value: T | None = None
        self._given = 0  # gradients, of the unit's tensors
        self._stored = 0

    def gradient(self, index: int) -> T | None:
        """One tensor's gradient; the unit's is forgotten here when all have theirs."""
        if self._given == 0:
            self._gradient = self._whole.working_gradient()
        held = self._gradient
        self._given = (self._given + 1) % len(self.shapes)
        if self._given == 0:
            self._gradient = None
        return None if held is None else self._piece(held, index)

    def value(self, index: int) -> T:
        """One tensor's value, of the unit's whole one."""
        if self._value is None:
            self._value = self.unit.value()
        return self._piece(self._value, index)

    def forget(self) -> None:
        """Values were looked at, not updated."""
        self._value = None

    def store(self, index: int, value: T) -> None:
        """Write one tensor back; the last one takes the unit to where Theta lives."""
        if self._value is None:
            self._value = self._place()
        place = self._piece(self._value, index)
        if not self.room.same(place, value):
            self.room.copy(value, place)
        self._stored = (self._stored + 1) % len(self.shapes)
        if self._stored == 0:
            whole, self._value = self._value, None
            self.unit.store(whole)

    def _place(self) -> T:
        """Of the unit's updated tensors: Theta itself where it is whole there."""
        parameters, step, cuts = self.unit.parameters, self.unit.step, self.unit.cuts
        if not parameters.cut and parameters.tier is step.update_tier:
            return parameters.stored
        place = self.room.new(cuts.padded, parameters.dtype, step.update_tier, State.PARAMETERS)
        self.room.clear(self.room.piece(place, cuts.numel, (cuts.padded - cuts.numel,)))
        return place

    def _piece(self, whole: T, index: int) -> T:
        start = sum(map(math.prod, self.shapes[:index]))
        return self.room.piece(whole, start, self.shapes[index])


class TensorTarget(Generic[T]):
    """One whole tensor of a unit."""

    is_in_place = False
    is_frozen = False

    def __init__(self, update: TensorsUpdate[T], index: int) -> None:
        self.update, self.unit, self.index = update, update.unit, index
        self.shape = update.shapes[index]
        self.owns_master = self.unit.parameters.is_materialized
        unit = self.unit.cuts
        self.cuts = Cuts(unit.room, math.prod(self.shape), self.unit.step.optimizer, unit.via)

    def lasting(self) -> T | None:
        """It is a piece of what is gathered."""

    def working_gradient(self) -> T | None:
        return self.update.gradient(self.index)

    def value(self) -> T:
        return self.update.value(self.index)

    def store(self, value: T) -> None:
        self.update.store(self.index, value)

    def slot(self, initial: T) -> Slot[T]:
        self.update.forget()
        if self.keeps_whole:
            return Resident(_tagged(self.unit, initial))
        slot = TensorSlot(self.route, initial)
        self.unit.slots.append(slot.stored)
        return slot

    @property
    def keeps_whole(self) -> bool:
        """Whether its state is kept as it is used, in the tensor's own shape."""
        route = self.route
        return not route.kept and route.is_in_place

    @property
    def route(self) -> Route[T]:
        return self.unit.route(self.cuts)


def _tagged(unit: UnitState[T], initial: T) -> T:
    return unit.room.cast(initial, unit.room.dtype(initial), State.OPTIMIZER)
