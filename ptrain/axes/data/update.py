"""Gradients (G) and optimizer state (Ω) of one flat unit.

Gradients are a full buffer while a backward pass fills it, then the stored part until the update,
in full or as a shard, on any tier. The optimizer updates a shard over the update's axes or, if the
update needs full tensors (Muon), each tensor of the unit.

For full tensors, gradients and values are gathered and moved once per unit, and so is the updated
value. Optimizer state is stored by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic

from ptrain.axes.data.cuts import Axes, ShardLayout
from ptrain.axes.data.theta import Parameters, Route, RoutedSlot, TensorSlot
from ptrain.cost import State
from ptrain.optimizers.update import ResidentSlot, Slot
from ptrain.runtime.interface import PendingResult, Shape, T, UnitParameters
from ptrain.spec.placement import Tier, exclude_axes
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits


class UnitState(Generic[T]):
    """The parameters, gradients and optimizer state of one unit.

    Attributes:
        slots: Stored tensors of optimizer state, to be read ahead if they are on file.
        following: The unit that is updated next, whose files are read ahead.
    """

    def __init__(
        self, members: UnitParameters[T], cuts: ShardLayout[T], step: FlatUnits, layout: Layout
    ) -> None:
        self.members, self.cuts, self.room, self.step = members, cuts, cuts.room, step
        self.parameters = Parameters(members, cuts, step, layout)
        self.gradients = Gradients(self.parameters, step)
        self.slots: list[T] = []  # optimizer state that may be on file, to be read ahead
        self.following: UnitState[T] | None = None

    def read_ahead(self) -> None:
        """Announce the tensors that the update of the following unit needs."""
        if self.following is not None:
            self.following.gradients.read_ahead()
            for tensor in (self.following.parameters.stored, *self.following.slots):
                self.room.prefetch(tensor)

    def route(self, cuts: ShardLayout[T]) -> Route[T]:
        """Return the route of optimizer state with the layout `cuts`."""
        return Route(
            cuts=cuts,
            stored_axes=self.step.optimizer,
            update_axes=self.step.updated,
            tier=self.step.optimizer_tier,
            update_tier=self.step.update_tier,
        )

    def value(self) -> T:
        """Return the parameters' shard over the update's axes, on the update's tier.

        It is the stored tensor if that has this layout.
        """
        parameters, cut, room = self.parameters, self.step.updated, self.room
        held, tier, now = parameters.stored, parameters.tier, parameters.cut
        if parameters.is_materialized:
            return parameters.route.fetch(held)
        if tier is Tier.FILE:
            held, tier = room.copy_to_tier(held, Tier.HOST, State.PARAMETERS), Tier.HOST
        if missing := exclude_axes(now, cut):
            if tier is Tier.HOST:
                held, tier = room.copy_to_tier(held, Tier.DEVICE, State.PARAMETERS), Tier.DEVICE
            held = self.cuts.gather_part(held, now, missing, State.PARAMETERS)
            now = exclude_axes(now, missing)
        held = self.cuts.take_part(held, now, cut)
        if tier is not self.step.update_tier:
            held = room.copy_to_tier(held, self.step.update_tier, State.PARAMETERS)
        return held

    def store(self, value: T) -> None:
        """Write an updated shard to the stored parameters, gathered if these are less sharded."""
        parameters, step, cut, room = self.parameters, self.step, self.step.updated, self.room
        missing, extra = exclude_axes(cut, parameters.cut), exclude_axes(parameters.cut, cut)
        part, tier, place = value, step.update_tier, parameters.updated_part(missing)
        # Cast before a collective or a move, so that it has the stored dtype. A copy to `place`
        # casts by itself.
        if place is None or extra or tier is not Tier.DEVICE:
            part = room.cast(value, parameters.dtype)
        if parameters.is_materialized:
            parameters.route.put(parameters.stored, part)
            return
        if extra:
            part = self.cuts.take_part(part, cut, parameters.cut)
        if missing:
            if place is not None:
                part = self._copy_to_place(part, place)
            elif tier is not Tier.DEVICE:
                part = room.copy_to_tier(part, Tier.DEVICE, State.PARAMETERS)
            parameters.update_stored(part, (*cut, *extra), missing, step.gather_after_update)
        else:
            parameters.write_stored(part, tier)

    def _copy_to_place(self, part: T, place: T) -> T:
        """Copy a part to its place in the stored parameters, and return the place.

        Dropping the part before the gather saves memory.
        """
        if not self.room.is_same_memory(part, place):
            self.room.copy(part, place)
        return place


class ShardTarget(Generic[T]):
    """An update target of one unit: its shard over the axes of the update."""

    is_in_place = False
    is_frozen = False

    def __init__(self, unit: UnitState[T]) -> None:
        self.unit = unit
        self.owns_master = unit.parameters.is_materialized

    def persistent_parameter(self) -> T | None:
        """Return None: the gradient of a shard is brought for each update."""

    def working_gradient(self) -> T | None:
        # Here, because the gradient is the first tensor that an update asks for. The next unit's
        # files are read during this one's update.
        self.unit.read_ahead()
        return self.unit.gradients.update_gradient()

    def value(self) -> T:
        return self.unit.value()

    def store(self, value: T) -> None:
        self.unit.store(value)

    def local_numels(self) -> list[int]:
        """Return the elements of each tensor in the shard; padding belongs to the last."""
        cuts, start, sizes = self.unit.cuts, 0, list[int]()
        ranges = list(cuts.shard_ranges(self.unit.step.updated))
        for shape in self.unit.members.shapes:
            end = start + math.prod(shape)
            sizes.append(sum(max(0, min(end, b) - max(start, a)) for a, b in ranges))
            start = end
        sizes[-1] += cuts.shard_numel(self.unit.step.updated) - sum(sizes)
        return sizes

    def create_slot(self, initial: T) -> Slot[T]:
        route = self.unit.route(self.unit.cuts)
        if route.is_in_place:
            return ResidentSlot(_tag_optimizer_state(self.unit, initial))
        slot = RoutedSlot(route, initial)
        self.unit.slots.append(slot.stored)
        return slot


class TensorsUpdate(Generic[T]):
    """The update of one unit by full tensors, in training and in predictions."""

    def __init__(self, unit: UnitState[T]) -> None:
        assert not unit.step.updated, "whole tensors are updated where the update is on no shard"
        self.unit, self.room = unit, unit.room
        self.shapes = unit.members.shapes
        self._whole = ShardTarget(unit)
        self._gradient: T | None = None
        self._value: T | None = None
        self._num_given = 0  # number of gradients returned so far
        self._stored = 0

    def gradient(self, index: int) -> T | None:
        """Return one tensor's gradient. The unit's gradient is dropped after the last tensor."""
        if self._num_given == 0:
            self._gradient = self._whole.working_gradient()
        held = self._gradient
        # Every tensor of the unit takes its gradient once per update, also if it is None, so the
        # count shows which one is last.
        self._num_given = (self._num_given + 1) % len(self.shapes)
        if self._num_given == 0:
            self._gradient = None
        return None if held is None else self._tensor_view(held, index)

    def value(self, index: int) -> T:
        """Return one tensor's value, as a view of the unit's full value."""
        if self._value is None:
            self._value = self.unit.value()
        return self._tensor_view(self._value, index)

    def drop_values(self) -> None:
        """Drop values that were read without an update."""
        self._value = None

    def store(self, index: int, value: T) -> None:
        """Write one updated tensor; the last one stores the unit's parameters."""
        if self._value is None:
            self._value = self._updated_buffer()
        place = self._tensor_view(self._value, index)
        if not self.room.is_same_memory(place, value):
            self.room.copy(value, place)
        self._stored = (self._stored + 1) % len(self.shapes)
        if self._stored == 0:
            whole, self._value = self._value, None
            self.unit.store(whole)

    def _updated_buffer(self) -> T:
        """Return a buffer for the unit's updated tensors.

        These are the stored parameters, if full and on the update's tier.
        """
        parameters, step, cuts = self.unit.parameters, self.unit.step, self.unit.cuts
        if not parameters.cut and parameters.tier is step.update_tier:
            return parameters.stored
        place = self.room.new_empty(
            cuts.padded, parameters.dtype, step.update_tier, State.PARAMETERS
        )
        self.room.fill_zeros(self.room.view_range(place, cuts.numel, (cuts.padded - cuts.numel,)))
        return place

    def _tensor_view(self, whole: T, index: int) -> T:
        """Return the view of one tensor in a full buffer."""
        start = sum(map(math.prod, self.shapes[:index]))
        return self.room.view_range(whole, start, self.shapes[index])


class TensorTarget(Generic[T]):
    """An update target of one full tensor of a unit."""

    is_in_place = False
    is_frozen = False

    def __init__(self, update: TensorsUpdate[T], index: int) -> None:
        self.update, self.unit, self.index = update, update.unit, index
        self.shape = update.shapes[index]
        self.owns_master = self.unit.parameters.is_materialized
        unit = self.unit.cuts
        self.cuts = ShardLayout(
            unit.room, math.prod(self.shape), self.unit.step.optimizer, unit.via
        )
        self.slots: list[TensorSlot[T]] = []  # not of state that is stored as it is used

    def persistent_parameter(self) -> T | None:
        """Return None: the tensor is a view of a buffer that is gathered for each update."""

    def working_gradient(self) -> T | None:
        return self.update.gradient(self.index)

    def value(self) -> T:
        return self.update.value(self.index)

    def store(self, value: T) -> None:
        self.update.store(self.index, value)

    def local_numels(self) -> list[int]:
        return [math.prod(self.shape)]

    def create_slot(self, initial: T) -> Slot[T]:
        # Reading the value for the initial state gathered the unit's parameters; they would be
        # stale by the first update.
        self.update.drop_values()
        if self.keeps_whole:
            return ResidentSlot(_tag_optimizer_state(self.unit, initial))
        slot = TensorSlot(self.unit.route(self.cuts_of(self.unit.room.shape(initial))), initial)
        self.unit.slots.append(slot.stored)
        self.slots.append(slot)
        return slot

    def slot_of(self, stored: T) -> TensorSlot[T] | None:
        """Return the slot of stored optimizer state; None if it is stored as it is used."""
        return next((slot for slot in self.slots if slot.stored is stored), None)

    def cuts_of(self, shape: Shape) -> ShardLayout[T]:
        """Return the layout of optimizer state of a shape; of a factor, it is smaller."""
        if not shape or math.prod(shape) == self.cuts.numel:
            return self.cuts
        unit = self.unit.cuts
        return ShardLayout(unit.room, math.prod(shape), self.unit.step.optimizer, unit.via)

    @property
    def keeps_whole(self) -> bool:
        """True if optimizer state is stored as it is used, in the tensor's shape."""
        route = self.route
        return not route.stored_axes and route.is_in_place

    @property
    def route(self) -> Route[T]:
        return self.unit.route(self.cuts)


def _tag_optimizer_state(unit: UnitState[T], initial: T) -> T:
    """Tag a tensor as optimizer state."""
    return unit.room.cast(initial, unit.room.dtype(initial), State.OPTIMIZER)


class Gradients(Generic[T]):
    """The gradients of one flat unit.

    Attributes:
        whole: Collects a micro-batch's gradients, in the dtype of the reduction.
        kept: The stored sum, in the dtype of storage, sharded along `now`.
        raw: The last micro-batch's shard, for layouts that keep a second copy.
        now: Axes that shard `kept`.
        partial: Axes along which the sum is still to be reduced, besides the update's.
        cut: Axes that shard stored gradients.
        tier: Tier of stored gradients.
    """

    def __init__(self, parameters: Parameters[T], step: FlatUnits) -> None:
        self.members, self.label = parameters.members, parameters.label
        self.cuts, self.room, self.layout = parameters.cuts, parameters.room, parameters.layout
        self.step = step
        self.cut, self.tier = step.gradients, step.gradients_tier
        self.whole: T | None = None
        self._unwritten: set[int] = set()  # tensors whose gradient is not in `whole` yet
        self.raw: T | None = None
        self.kept: T | None = None
        self.now: Axes = self.cut
        self.partial = exclude_axes(step.axes, (*step.updated, *self.cut))
        self._mapped: T | None = None
        self._move: PendingResult[T] | None = None
        self._is_in_place = self.layout.parameters is self.layout.reduced

    @property
    def adds_up(self) -> bool:
        """True if full gradients are added to a separate sum after every micro-batch."""
        return not self.cut and (self.layout.keeps_both or self.tier is not Tier.DEVICE)

    def signature(self) -> Hashable:
        """Return a key of the state that the next use depends on."""
        held = (self.whole, self.raw, self.kept)
        sizes = tuple(None if tensor is None else self.room.numel(tensor) for tensor in held)
        return sizes, len(self._unwritten), self.now, self.partial, self._move is None

    def allocate_buffer(self) -> None:
        """Allocate the gradients' buffer before the unit's backward.

        The first gradient of a tensor is copied to it instead of added to zeros, which moves half
        as many bytes.
        """
        if self.whole is not None:
            return
        self.whole = self.room.new_empty(
            self.cuts.padded, self.layout.reduced, Tier.DEVICE, State.GRADIENTS, self.label
        )
        # padding takes part in sums and norms, so it must be zero
        if padding := self.cuts.padded - self.cuts.numel:
            self.room.fill_zeros(self.room.view_range(self.whole, self.cuts.numel, (padding,)))
        self._mark_unwritten()

    def _mark_unwritten(self) -> None:
        """Make the next gradient of each tensor overwrite the buffer."""
        self.members.drop_gradients()
        self._unwritten = set(range(len(self.members.names)))

    def zero_missing(self) -> None:
        """Set missing gradients to zero.

        They are missing for parameters that had no part in the loss, and before a pass in which no
        hook reports gradients.
        """
        for index in sorted(self._unwritten):
            self._write_first(index)

    def take_gradient(self, index: int) -> None:
        """Take a tensor's gradient from autograd.

        If the tensor's `.grad` is its view of the buffer, autograd has already added to it, unless
        gradients are reduced in another dtype.
        """
        if self.whole is None:
            return
        if index in self._unwritten:
            self._write_first(index)
        elif not self._is_in_place:
            self.members.add_gradient(index, self.whole)

    def _write_first(self, index: int) -> None:
        """Copy the first gradient of a tensor into the buffer."""
        assert self.whole is not None, "there is somewhere to write to"
        self.members.write_gradient(index, self.whole, is_bound=self._is_in_place)
        self._unwritten.discard(index)

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        """Reduce the buffer along `cut`, if due, and store this rank's part.

        With overlap, the first collective is only started; `wait` does the rest.
        """
        if self.whole is None:
            return
        self.zero_missing()
        # A consumed unit is updated at once, so there is nothing to overlap with.
        overlaps = self.step.overlaps and not self.step.consumed
        if self.cut and is_due and overlaps:
            self._move = self.cuts.start_reduce_scatter(self.whole, (), self.cut)
        elif self.cut and is_due:
            self._store_reduced(self.cuts.reduce_scatter(self.whole, (), self.cut))
        elif self.adds_up:
            self._add_to_stored(self.whole)
            if self.layout.keeps_both:
                self._mark_unwritten()
            else:
                self._drop_buffer()
        if overlaps and is_last and not self.cut and self.tier is Tier.DEVICE:
            self._start_update()

    def _store_reduced(self, shard: T) -> None:
        """Store the reduced shard and free the buffer."""
        # Before the cast below, which allocates: the full buffer and the cast shard are not live at
        # once.
        self._drop_buffer()
        self._add_to_stored(shard)
        if self.layout.keeps_both:
            self.raw = shard

    def _start_update(self) -> None:
        """Start the update's first collective, if nothing is reduced for storage."""
        held = self.whole if self.kept is None else self.kept
        assert held is not None
        if self.step.updated:
            self._move = self.cuts.start_reduce_scatter(held, (), self.step.updated)
        elif self.partial:
            self._move = self.room.all_reduce(held, self.partial, is_awaited=False)

    def wait(self) -> None:
        """Wait for the collective that `finish` started, and store its result."""
        if self._move is None:
            return
        reduced, self._move = self._move.wait(), None
        if self.cut:
            self._store_reduced(reduced)
        elif self.step.updated:
            self.kept, self.now = reduced, self.step.updated
            if not self.layout.keeps_both:
                self._drop_buffer()
        else:
            self.partial = ()

    def _add_to_stored(self, part: T) -> None:
        """Add one micro-batch's part to the stored sum."""
        room = self.room
        if self.tier is Tier.DEVICE:
            if self.kept is None:
                self.kept = self._cast_to_kept(part, copy=self.layout.keeps_both)
            else:
                room.add(self.kept, part)
            return
        # Cast before the move, so that the bytes of the stored dtype are moved.
        arrived = room.copy_to_tier(self._cast_to_kept(part), Tier.HOST, State.GRADIENTS)
        if self.tier is Tier.HOST:
            if self.kept is None:
                self.kept = arrived
            else:
                room.add(self.kept, arrived)
            return
        if self.kept is not None:
            summed = room.copy_to_tier(self.kept, Tier.HOST, State.GRADIENTS)
            room.add(summed, arrived)
            arrived = summed
        self.kept = self._file_tensor(room.numel(arrived))
        room.copy(arrived, self.kept)

    def _cast_to_kept(self, part: T, *, copy: bool = False) -> T:
        """Cast a part to the dtype of storage."""
        return self.room.cast(part, self.layout.gradients, State.GRADIENTS, self.label, copy=copy)

    def _file_tensor(self, numel: int) -> T:
        """Return the file's tensor, created once: creating it costs more than writing to it."""
        if self._mapped is None:
            self._mapped = self.room.new_empty(
                numel, self.layout.gradients, Tier.FILE, State.GRADIENTS
            )
        return self._mapped

    def for_update(self) -> None:
        """Bring gradients into the layout of the update.

        Partial sums are reduced first, so that later moves are small. Then the axes that the update
        needs full are gathered, except the axes that `update_gradient` gathers.
        """
        room, held = self.room, self.whole if self.kept is None else self.kept
        if held is None:
            return
        if self.kept is not None:
            self._drop_buffer()
        self.raw = None
        wanted = (*self.step.updated, *self.step.gathered_gradients)
        narrower, wider = exclude_axes(self.step.updated, self.now), exclude_axes(self.now, wanted)
        travels = bool(narrower or self.partial or wider) and self.tier is not Tier.DEVICE
        if self.tier is Tier.FILE:
            held = room.copy_to_tier(held, Tier.HOST, State.GRADIENTS)
        if travels:
            held = room.copy_to_tier(held, Tier.DEVICE, State.GRADIENTS)
        now = self.now
        if narrower:
            held, now = self.cuts.reduce_scatter(held, now, narrower), (*now, *narrower)
        self._drop_buffer()
        if self.partial:
            room.all_reduce(held, self.partial, is_awaited=True).wait()
        if wider:
            held = self.cuts.gather_part(held, now, wider, State.GRADIENTS)
        held = self._cast_to_kept(held)
        if travels:
            held = room.copy_to_tier(held, Tier.HOST, State.GRADIENTS)
        self.kept, self.now, self.partial = held, wanted, ()

    def update_gradient(self) -> T | None:
        """Return the gradient on the update's tier, None without one.

        It is gathered along the axes of S*.
        """
        room, held = self.room, self.kept
        if held is None:
            return None
        gathered, step = self.step.gathered_gradients, self.step
        on_device = self.tier is Tier.DEVICE
        if not on_device and (gathered or step.update_tier is Tier.DEVICE):
            held, on_device = room.copy_to_tier(held, Tier.DEVICE, State.GRADIENTS), True
        if gathered:
            held = self.cuts.gather_part(held, self.now, gathered, State.GRADIENTS)
        if on_device and step.update_tier is not Tier.DEVICE:
            held = room.copy_to_tier(held, Tier.HOST, State.GRADIENTS)
        return held

    def clear(self) -> None:
        """Drop all gradients after the update."""
        self._drop_buffer()
        self.kept = self.raw = None
        self.now = self.cut
        self.partial = exclude_axes(self.step.axes, (*self.step.updated, *self.cut))

    def read_ahead(self) -> None:
        """Announce that the stored gradients are needed next."""
        if self.kept is not None:
            self.room.prefetch(self.kept)

    def live_tensors(self) -> list[T]:
        """Return all live tensors of gradients."""
        return [held for held in (self.whole, self.raw, self.kept) if held is not None]

    def _drop_buffer(self) -> None:
        """Free the buffer, and drop `.grad` of all parameters."""
        self.whole = None
        self.members.drop_gradients()
