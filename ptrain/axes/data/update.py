"""G and Omega of one flat unit. G is a full buffer while a backward pass fills it, then what is
kept of it until the update, in full or as a shard, on any tier. The optimizer updates a shard over
the update's axes, or, where an update needs full tensors (Muon), each of them.

For full tensors, what is gathered or moved is gathered or moved once for the unit: its gradient,
its value where Theta is not full in place, and what is written back. Optimizer state is kept by
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic

from ptrain.axes.data.cuts import Axes, Cuts
from ptrain.axes.data.theta import Parameters, Route, RoutedSlot, TensorSlot
from ptrain.cost import State
from ptrain.optimizers.update import Resident, Slot
from ptrain.rooms.room import Members, Move, T
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
        else:
            parameters.keep(part, tier)

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


class Gradients(Generic[T]):
    """`whole` collects a micro-batch's gradients in the dtype in which they travel; `kept` is what
    there is of their sum, in the dtype in which it is kept, cut along `now`; `raw` a layout's
    second copy: the last micro-batch's own shard."""

    def __init__(self, parameters: Parameters[T], step: FlatUnits) -> None:
        self.members, self.label = parameters.members, parameters.label
        self.cuts, self.room, self.layout = parameters.cuts, parameters.room, parameters.layout
        self.step = step
        self.cut, self.tier = step.gradients, step.gradients_tier
        self.whole: T | None = None
        self._unwritten: set[int] = set()  # tensors of which `whole` has no gradient yet
        self.raw: T | None = None
        self.kept: T | None = None
        self.now: Axes = self.cut
        self.partial = without(step.axes, (*step.updated, *self.cut))
        self._mapped: T | None = None
        self._move: Move[T] | None = None
        self._is_in_place = self.layout.parameters is self.layout.reduced

    @property
    def adds_up(self) -> bool:
        """Whether whole gradients are added to a sum of their own after every micro-batch."""
        return not self.cut and (self.layout.keeps_both or self.tier is not Tier.DEVICE)

    def signature(self) -> Hashable:
        """Return what their next use depends on."""
        held = (self.whole, self.raw, self.kept)
        sizes = tuple(None if tensor is None else self.room.numel(tensor) for tensor in held)
        return sizes, len(self._unwritten), self.now, self.partial, self._move is None

    def open(self) -> None:
        """Before the unit's backward: somewhere for gradients. The first of a tensor is written
        there and not added to zeros: half of the bytes pass through the memory."""
        if self.whole is not None:
            return
        self.whole = self.room.new(
            self.cuts.padded, self.layout.reduced, Tier.DEVICE, State.GRADIENTS, self.label
        )
        if padding := self.cuts.padded - self.cuts.numel:
            self.room.clear(self.room.piece(self.whole, self.cuts.numel, (padding,)))
        self._write_anew()

    def _write_anew(self) -> None:
        self.members.unbind()
        self._unwritten = set(range(len(self.members.names)))

    def fill(self) -> None:
        """Of tensors that have no gradient yet it is zero: of those that had no part in the loss,
        or before a pass in which nobody says when one is there."""
        for index in sorted(self._unwritten):
            self._write(index)

    def accumulated(self, index: int) -> None:
        """Autograd has a tensor's gradient. If one was written before, it added the new one to it
        in place, unless it is of another dtype."""
        if self.whole is None:
            return
        if index in self._unwritten:
            self._write(index)
        elif not self._is_in_place:
            self.members.collect(index, self.whole)

    def _write(self, index: int) -> None:
        assert self.whole is not None, "there is somewhere to write to"
        self.members.write(index, self.whole, is_bound=self._is_in_place)
        self._unwritten.discard(index)

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        """After the unit's backward: sums over the ranks along `cut` where that is due, and keeps
        this rank's part. With overlap the first collective is only begun; `complete` does the
        rest."""
        if self.whole is None:
            return
        self.fill()
        overlaps = self.step.overlaps and not self.step.consumed
        if self.cut and is_due and overlaps:
            self._move = self.cuts.start_reduce_scatter(self.whole, (), self.cut)
        elif self.cut and is_due:
            self._reduced(self.cuts.reduce_scatter(self.whole, (), self.cut))
        elif self.adds_up:
            self._keep(self.whole)
            if self.layout.keeps_both:
                self._write_anew()
            else:
                self._close()
        if overlaps and is_last and not self.cut and self.tier is Tier.DEVICE:
            self._start_update()

    def _reduced(self, shard: T) -> None:
        self._close()
        self._keep(shard)
        if self.layout.keeps_both:
            self.raw = shard

    def _start_update(self) -> None:
        """Nothing is reduced for keeping, so the update's first collective is begun instead."""
        held = self.whole if self.kept is None else self.kept
        assert held is not None
        if self.step.updated:
            self._move = self.cuts.start_reduce_scatter(held, (), self.step.updated)
        elif self.partial:
            self._move = self.room.all_reduce(held, self.partial, is_awaited=False)

    def complete(self) -> None:
        """Wait for what `finish` began, and do what comes after it."""
        if self._move is None:
            return
        reduced, self._move = self._move.wait(), None
        if self.cut:
            self._reduced(reduced)
        elif self.step.updated:
            self.kept, self.now = reduced, self.step.updated
            if not self.layout.keeps_both:
                self._close()
        else:
            self.partial = ()

    def _keep(self, part: T) -> None:
        """Add one micro-batch's part to what is kept."""
        room = self.room
        if self.tier is Tier.DEVICE:
            if self.kept is None:
                self.kept = self._cast(part, copy=self.layout.keeps_both)
            else:
                room.add(self.kept, part)
            return
        arrived = room.move(self._cast(part), Tier.HOST, State.GRADIENTS)
        if self.tier is Tier.HOST:
            if self.kept is None:
                self.kept = arrived
            else:
                room.add(self.kept, arrived)
            return
        if self.kept is not None:
            summed = room.move(self.kept, Tier.HOST, State.GRADIENTS)
            room.add(summed, arrived)
            arrived = summed
        self.kept = self._file(room.numel(arrived))
        room.copy(arrived, self.kept)

    def _cast(self, part: T, *, copy: bool = False) -> T:
        return self.room.cast(part, self.layout.gradients, State.GRADIENTS, self.label, copy=copy)

    def _file(self, numel: int) -> T:
        """Made once: it takes no memory, and making it costs more than writing to it."""
        if self._mapped is None:
            self._mapped = self.room.new(numel, self.layout.gradients, Tier.FILE, State.GRADIENTS)
        return self._mapped

    def for_update(self) -> None:
        """Bring G from its layout to that of the update: reduce what is still partial (smallest
        pieces first), then gather what the update needs whole, but for what it gathers itself."""
        room, held = self.room, self.whole if self.kept is None else self.kept
        if held is None:
            return
        if self.kept is not None:
            self._close()
        self.raw = None
        wanted = (*self.step.updated, *self.step.gathered_gradients)
        narrower, wider = without(self.step.updated, self.now), without(self.now, wanted)
        travels = bool(narrower or self.partial or wider) and self.tier is not Tier.DEVICE
        if self.tier is Tier.FILE:
            held = room.move(held, Tier.HOST, State.GRADIENTS)
        if travels:
            held = room.move(held, Tier.DEVICE, State.GRADIENTS)
        now = self.now
        if narrower:
            held, now = self.cuts.reduce_scatter(held, now, narrower), (*now, *narrower)
        self._close()
        if self.partial:
            room.all_reduce(held, self.partial, is_awaited=True).wait()
        if wider:
            held = self.cuts.gather(held, now, wider, State.GRADIENTS)
        held = self._cast(held)
        if travels:
            held = room.move(held, Tier.HOST, State.GRADIENTS)
        self.kept, self.now, self.partial = held, wanted, ()

    def working(self) -> T | None:
        """Return what the update works with, where it works: whole along the axes of S*. It is None
        where no gradient is kept."""
        room, held = self.room, self.kept
        if held is None:
            return None
        gathered, step = self.step.gathered_gradients, self.step
        on_device = self.tier is Tier.DEVICE
        if not on_device and (gathered or step.update_tier is Tier.DEVICE):
            held, on_device = room.move(held, Tier.DEVICE, State.GRADIENTS), True
        if gathered:
            held = self.cuts.gather(held, self.now, gathered, State.GRADIENTS)
        if on_device and step.update_tier is not Tier.DEVICE:
            held = room.move(held, Tier.HOST, State.GRADIENTS)
        return held

    def clear(self) -> None:
        """After the update."""
        self._close()
        self.kept = self.raw = None
        self.now = self.cut
        self.partial = without(self.step.axes, (*self.step.updated, *self.cut))

    def read_ahead(self) -> None:
        """It is needed next."""
        if self.kept is not None:
            self.room.ahead(self.kept)

    def held(self) -> list[T]:
        """All that is there now."""
        return [held for held in (self.whole, self.raw, self.kept) if held is not None]

    def _close(self) -> None:
        self.whole = None
        self.members.unbind()
