"""The parameters (Θ) of one flat unit, and the route of a shard between storage and update.

Parameters are stored in full or as a shard, on any tier, or are cast from the master copy in the
optimizer state. They are full on the device while they are used. A route brings a stored shard
(optimizer state, or the master copy) to the update and back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple

from ptrain.axes.data.cost import Run
from ptrain.axes.data.cuts import Axes, ShardLayout
from ptrain.cost import State
from ptrain.runtime.interface import PendingResult, T, UnitParameters
from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.placement import Axis, Tier, exclude_axes
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits


class Parameters(Generic[T]):
    """The parameters of one flat unit.

    Attributes:
        stored: This rank's shard over `cut` on its tier; the full buffer if `cut` is empty. With
            materialized parameters (M), the master copy.
        whole: The full buffer whose views the module's parameters are: `stored`, or a buffer that
            is empty between uses.
        cut: Axes that shard `stored`.
        tier: Tier of `stored`.
        is_gathered: `whole` has the parameters, or a gather into it was issued.
    """

    def __init__(
        self, members: UnitParameters[T], cuts: ShardLayout[T], step: FlatUnits, layout: Layout
    ) -> None:
        self.members, self.cuts, self.room, self.layout = members, cuts, cuts.room, layout
        self.cut, self.tier = step.parameters, step.parameters_tier
        self.is_materialized = step.materialized
        self.dtype = layout.update_dtype if step.materialized else layout.parameters
        self.route = Route(
            cuts=cuts,
            stored_axes=self.cut,
            update_axes=step.updated,
            tier=self.tier,
            update_tier=step.update_tier,
        )
        # Zeros, so that the padding, which no tensor covers, has values for collectives and sums.
        self.whole = self.room.zeros(
            cuts.padded, layout.parameters, Tier.DEVICE, State.PARAMETERS, self.label
        )
        members.bind_views(self.whole)
        self.is_transient = bool(self.cut) or self.tier is not Tier.DEVICE or self.is_materialized
        self.stored = self._first_stored() if self.is_transient else self.whole
        self._gathering: PendingResult[T] | None = None
        self._storing: PendingResult[T] | None = None
        self._settling: PendingResult[T] | None = None
        self._behind: Axes = ()
        self.is_gathered = True
        # The buffer was needed only to bind the views. Values are in `stored` by now.
        self.release()

    @property
    def state(self) -> State:
        """The state that the stored bytes count as: optimizer state for a master copy."""
        return State.OPTIMIZER if self.is_materialized else State.PARAMETERS

    def cut_runs(self, axes: Sequence[Axis]) -> tuple[Run, ...]:
        """Return the runs of a shard over `axes`, with a flag for sharded operators.

        A run is (start, end, flag). Padding belongs to the run before it.
        """
        tensors = zip(map(math.prod, self.members.shapes), self.members.are_cut, strict=True)
        return self.cuts.shard_runs(tuple(tensors), axes, self.cuts.room.coordinate)

    @property
    def label(self) -> str:
        """The names of the unit's first and last tensor, for meters."""
        names = self.members.names
        return " … ".join(dict.fromkeys((names[0], names[-1])))

    @property
    def stale_axes(self) -> Axes:
        """The axes along which only this rank's part of `stored` is up to date, until
        `finish_gather`."""
        return self._behind

    def signature(self) -> Hashable:
        """Return a key of the state that the next use depends on."""
        under_way = self._gathering, self._storing, self._settling
        return self.is_gathered, *(move is None for move in under_way), self._behind

    def _first_stored(self) -> T:
        """Return the initial shard, taken from the full buffer."""
        part = self.room.cast(self.cuts.take_part(self.whole, (), self.cut), self.dtype)
        stored = self.room.new_empty(self.room.numel(part), self.dtype, self.tier, self.state)
        self.room.copy(part, stored)
        return stored

    def gather(self) -> None:
        """Fill `whole`, and wait for it."""
        # The last update may have left a gather into `stored`, which the copy below reads.
        self.finish_gather()
        self._start_gather(is_awaited=True)
        self._wait_for_gather()

    def prefetch(self) -> None:
        """Start to fill `whole`; `gather` waits for the rest."""
        self.finish_gather()
        self._start_gather(is_awaited=False)

    def _start_gather(self, *, is_awaited: bool) -> None:
        """Allocate `whole` and copy or all-gather the parameters into it."""
        if self.is_gathered:
            return
        # Set when the gather is issued and not when it ends: a second prefetch must not issue it
        # again.
        self.is_gathered = True
        # The tensor object and its views stay; only its memory comes back. The module's parameters
        # need no new binding.
        self.room.allocate_storage(self.whole)
        part = self._for_use()
        if not self.cut:
            self.room.copy(part, self.whole)
            return
        self._gathering = self.cuts.start_gather(
            part, self.cut, self.cut, State.PARAMETERS, self.whole, is_awaited=is_awaited
        )

    def _wait_for_gather(self) -> None:
        """Wait for the all-gather."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _for_use(self) -> T:
        """Return the stored tensor in the dtype of use, where the collective needs it."""
        room, part, used = self.room, self.stored, self.layout.parameters
        if self.tier is Tier.FILE:
            part = room.copy_to_tier(part, Tier.HOST, self.state)
        # cast before the gather, which then moves the dtype of use
        if room.dtype(part) is not used and (self.cut or self.tier is not Tier.DEVICE):
            part = room.cast(part, used, State.PARAMETERS, self.label)
        if self.cut and self.tier is not Tier.DEVICE:
            part = room.copy_to_tier(part, Tier.DEVICE, State.PARAMETERS)
        return part

    def release(self) -> None:
        """Free `whole` if it can be rebuilt."""
        if not self.is_transient or not self.is_gathered:
            return
        # A prefetched unit may be released without use. Its collective still writes to the memory
        # that is freed next.
        self._wait_for_gather()
        self.room.free_storage(self.whole)
        self.is_gathered = False

    def updated_part(self, missing: Axes) -> T | None:
        """Return this rank's updated part in `stored`, for a gather along `missing` from it.

        Returns None if the parameters are not on the device, or the parts are not in group order.
        """
        is_near = self.tier is Tier.DEVICE
        if not missing or not is_near or not self.cuts.is_led_by(self.cut, missing):
            return None
        return self.cuts.take_part(self.stored, self.cut, (*self.cut, *missing))

    def update_stored(self, part: T, cut: Axes, missing: Axes, when: GatherAfterUpdate) -> None:
        """Update `stored` from the ranks' updated parts.

        Args:
            part: This rank's shard over `cut`, on the device.
            cut: Axes of the shard.
            missing: Axes to all-gather along.
            when: Gather now, during the update of later units, or before the next forward.
        """
        into = self.stored if self.tier is Tier.DEVICE else None
        match when:
            case GatherAfterUpdate.BLOCKING:
                self.write_stored(self.cuts.gather_part(part, cut, missing, State.PARAMETERS, into))
            case GatherAfterUpdate.DURING_UPDATE:
                self._storing = self.cuts.start_gather(part, cut, missing, State.PARAMETERS, into)
            case GatherAfterUpdate.NEXT_FORWARD:
                assert into is not None, "what is gathered by the next forward is on the device"
                # Only this rank's part is written. `finish_gather` gathers from it.
                self.cuts.put_part(into, part, self.cut, cut)
                self._behind = missing

    def begin_settling(self) -> None:
        """Start the gather that the last update left to the next use."""
        if self._behind:
            self._settling, self._behind = self._start_settling(is_awaited=False), ()

    def finish_gather(self) -> None:
        """Complete the gather that the last update left to the next use."""
        if self._behind:
            self._settling, self._behind = self._start_settling(is_awaited=True), ()
        if self._settling is not None:
            self._settling.wait()
            self._settling = None

    def _start_settling(self, *, is_awaited: bool) -> PendingResult[T]:
        """Issue the gather of the updated parts into `stored`."""
        missing, cut = self._behind, (*self.cut, *self._behind)
        part = self.cuts.take_part(self.stored, self.cut, cut)
        return self.cuts.start_gather(
            part, cut, missing, State.PARAMETERS, self.stored, is_awaited=is_awaited
        )

    def finish_update(self) -> None:
        """Wait for the gather of updated parameters that was issued while other units were updated,
        and write its result to the stored parameters."""
        if self._storing is not None:
            held = self._storing.wait()
            self._storing = None
            self.write_stored(held)

    def write_stored(self, held: T, tier: Tier = Tier.DEVICE) -> None:
        """Write an updated tensor of the size of `stored` to it.

        `tier` is the tier of the updated tensor. Nothing is copied if it is `stored`.
        """
        if self.room.is_same_memory(held, self.stored):
            return
        # there is no direct copy between a file and the device
        if self.tier is Tier.FILE and tier is Tier.DEVICE:
            held = self.room.copy_to_tier(held, Tier.HOST, State.PARAMETERS)
        self.room.copy(held, self.stored)


class UnitTheta(Generic[T]):
    """The parameters of one unit, in a buffer of trained and a buffer of frozen ones."""

    def __init__(self, parts: Sequence[Parameters[T]]) -> None:
        self.parts = parts

    @property
    def is_gathered(self) -> bool:
        return all(part.is_gathered for part in self.parts)

    def gather(self) -> None:
        """Fill the full buffers of all parts."""
        for part in self.parts:
            part.gather()

    def prefetch(self) -> None:
        """Start to fill all parts; `gather` waits for the rest."""
        for part in self.parts:
            part.prefetch()

    def read_ahead(self) -> None:
        """Announce that the parts that are not gathered are needed next."""
        for part in self.parts:
            if not part.is_gathered:
                part.room.prefetch(part.stored)

    def release(self) -> None:
        """Free the full buffers that can be rebuilt."""
        for part in self.parts:
            part.release()

    def signature(self) -> Hashable:
        """Return a key of the state that the next use depends on."""
        return tuple(part.signature() for part in self.parts)


class Route(NamedTuple, Generic[T]):
    """The route of a shard between storage and update.

    Attributes:
        cuts: The layout of the buffer.
        stored_axes: Axes that shard the stored tensor.
        update_axes: The subset that also shards the update. If it differs from `stored_axes`, the
            update is on the device, where collectives are.
        tier: Tier of the stored tensor.
        update_tier: Tier of the update.
        state: The state that moves count as.
    """

    cuts: ShardLayout[T]
    stored_axes: Axes
    update_axes: Axes
    tier: Tier
    update_tier: Tier
    state: State = State.OPTIMIZER

    @property
    def gather_axes(self) -> Axes:
        """The axes along which the update needs other ranks' parts."""
        return exclude_axes(self.stored_axes, self.update_axes)

    @property
    def is_in_place(self) -> bool:
        """True if the update works on the stored tensor."""
        return not self.gather_axes and self.tier is self.update_tier is Tier.DEVICE

    def store(self, initial: T) -> T:
        """Return a new stored tensor with this rank's part of `initial` (1-d, or a scalar)."""
        room, part = self.cuts.room, initial
        is_scalar = room.shape(initial) == ()
        if self.gather_axes and not is_scalar:
            part = self.cuts.take_part(initial, self.update_axes, self.stored_axes)
        numel = None if is_scalar else room.numel(part)
        stored = room.new_empty(numel, room.dtype(initial), self.tier, self.state)
        room.copy(part, stored)
        return stored

    def fetch(self, stored: T) -> T:
        """Return the tensor that the update works on: `stored` if that is in place."""
        room, held, tier = self.cuts.room, stored, self.tier
        if tier is Tier.FILE:
            held, tier = room.copy_to_tier(held, Tier.HOST, self.state), Tier.HOST
        if tier is Tier.HOST and self.update_tier is Tier.DEVICE:
            held = room.copy_to_tier(held, Tier.DEVICE, self.state)
        if self.gather_axes and room.shape(held):
            held = self.cuts.gather_part(held, self.stored_axes, self.gather_axes, self.state)
        return held

    def put(self, stored: T, working: T) -> None:
        """Write this rank's part of the updated tensor to `stored`, from which `fetch` took it."""
        room, part = self.cuts.room, working
        if self.gather_axes and room.shape(working):
            part = self.cuts.take_part(working, self.update_axes, self.stored_axes)
        if room.is_same_memory(part, stored):
            return
        if self.tier is Tier.FILE and self.update_tier is Tier.DEVICE:
            part = room.copy_to_tier(part, Tier.HOST, self.state)
        room.copy(part, stored)


class RoutedSlot(Generic[T]):
    """A slot for a unit's optimizer state at the end of a route."""

    is_resident = False

    def __init__(self, route: Route[T], initial: T) -> None:
        self.route = route
        self.stored = route.store(initial)

    def fetch(self) -> T:
        return self.route.fetch(self.stored)

    def put(self, working: T) -> None:
        self.route.put(self.stored, working)


class TensorSlot(Generic[T]):
    """A slot for one full tensor of a unit, stored as a flat padded shard.

    Scalars are stored unchanged.
    """

    is_resident = False

    def __init__(self, route: Route[T], initial: T) -> None:
        self.route, self.room = route, route.cuts.room
        self.shape = self.room.shape(initial)
        self.stored = route.store(self._flat_padded(initial) if self.shape else initial)

    def fetch(self) -> T:
        whole = self.route.fetch(self.stored)
        return self.room.view_range(whole, 0, self.shape) if self.shape else whole

    def put(self, working: T) -> None:
        if not self.room.is_same_memory(working, self.stored):
            self.route.put(self.stored, self._flat_padded(working) if self.shape else working)

    def _flat_padded(self, whole: T) -> T:
        """Return a full tensor as 1-d with padding; it is copied only if there is padding."""
        room, flat, padded = self.room, self.room.flatten(whole), self.route.cuts.padded
        if math.prod(self.shape) == padded:
            return flat
        longer = room.empty_like(flat, padded)
        room.fill_zeros(longer)
        room.copy(flat, room.view_range(longer, 0, (math.prod(self.shape),)))
        return longer
