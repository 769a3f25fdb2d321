"""Theta of one unit: kept in full or as a shard, on any tier, or made of Omega's master copy; full
on the device while it is used. And the route of a shard that is kept on a tier and made full for
the update: optimizer state, and the master copy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple

from ptrain.axes.data.cost import Run
from ptrain.axes.data.cuts import Axes, Cuts
from ptrain.cost import State
from ptrain.rooms.room import Members, Move, T
from ptrain.spec.dials import GatherAfterUpdate
from ptrain.spec.placement import Axis, Tier, without
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits


class Parameters(Generic[T]):
    """`stored` is this rank's shard over `cut` (all of it where `cut` is empty) on its tier;
    `whole` the buffer that the module's parameters are views of: `stored` itself, or empty between
    uses. Where Theta is materialized the master copy is all that is stored."""

    def __init__(self, members: Members[T], cuts: Cuts[T], step: FlatUnits, layout: Layout) -> None:
        self.members, self.cuts, self.room, self.layout = members, cuts, cuts.room, layout
        self.cut, self.tier = step.parameters, step.parameters_tier
        self.is_materialized = step.materialized
        self.dtype = layout.updated if step.materialized else layout.parameters
        self.route = Route(
            cuts=cuts,
            kept=self.cut,
            updated=step.updated,
            tier=self.tier,
            update_tier=step.update_tier,
        )
        self.whole = self.room.zeros(
            cuts.padded, layout.parameters, Tier.DEVICE, State.PARAMETERS, self.label
        )
        members.adopt(self.whole)
        self.is_transient = bool(self.cut) or self.tier is not Tier.DEVICE or self.is_materialized
        self.stored = self._first_stored() if self.is_transient else self.whole
        self._gathering: Move[T] | None = None
        self._storing: Move[T] | None = None
        self._settling: Move[T] | None = None
        self._behind: Axes = ()
        self.is_gathered = True
        self.release()

    @property
    def state(self) -> State:
        """What the stored bytes count as: a master copy is Omega's."""
        return State.OPTIMIZER if self.is_materialized else State.PARAMETERS

    def cut_runs(self, axes: Sequence[Axis]) -> tuple[Run, ...]:
        """(start, end, whether their operators are cut) of the runs of elements of a shard over
        `axes`; padding belongs to the run before it."""
        tensors = zip(map(math.prod, self.members.shapes), self.members.are_cut, strict=True)
        return self.cuts.runs(tuple(tensors), axes, self.cuts.room.coordinate)

    @property
    def label(self) -> str:
        """The unit's first tensor and its last, for whoever reads what is sent."""
        names = self.members.names
        return " … ".join(dict.fromkeys((names[0], names[-1])))

    @property
    def behind(self) -> Axes:
        """Along these axes `stored` is up to date in this rank's own part alone, until `settle`."""
        return self._behind

    def signature(self) -> Hashable:
        """Return what their next use depends on."""
        under_way = self._gathering, self._storing, self._settling
        return self.is_gathered, *(move is None for move in under_way), self._behind

    def _first_stored(self) -> T:
        part = self.room.cast(self.cuts.take(self.whole, (), self.cut), self.dtype)
        stored = self.room.new(self.room.numel(part), self.dtype, self.tier, self.state)
        self.room.copy(part, stored)
        return stored

    def gather(self) -> None:
        """Make `whole` whole, if it is not."""
        self.settle()
        self._issue(is_awaited=True)
        self._await()

    def prefetch(self) -> None:
        """Begin to; `gather` then waits for the rest."""
        self.settle()
        self._issue(is_awaited=False)

    def _issue(self, *, is_awaited: bool) -> None:
        if self.is_gathered:
            return
        self.is_gathered = True
        self.room.refill(self.whole)
        part = self._for_use()
        if not self.cut:
            self.room.copy(part, self.whole)
            return
        self._gathering = self.cuts.start_gather(
            part, self.cut, self.cut, State.PARAMETERS, self.whole, is_awaited=is_awaited
        )

    def _await(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _for_use(self) -> T:
        """What is stored, in the dtype of use, as near to `whole` as its collective needs it."""
        room, part, used = self.room, self.stored, self.layout.parameters
        if self.tier is Tier.FILE:
            part = room.move(part, Tier.HOST, self.state)
        if room.dtype(part) is not used and (self.cut or self.tier is not Tier.DEVICE):
            part = room.cast(part, used, State.PARAMETERS, self.label)
        if self.cut and self.tier is not Tier.DEVICE:
            part = room.move(part, Tier.DEVICE, State.PARAMETERS)
        return part

    def release(self) -> None:
        """Give `whole` back, if it can be rebuilt."""
        if not self.is_transient or not self.is_gathered:
            return
        self._await()
        self.room.empty(self.whole)
        self.is_gathered = False

    def place(self, missing: Axes) -> T | None:
        """Return where this rank's updated part lies in `stored`, for a gather along `missing` that
        reads it there; None where its group's parts do not lie in their order on the device."""
        is_near = self.tier is Tier.DEVICE
        if not missing or not is_near or not self.cuts.is_led_by(self.cut, missing):
            return None
        return self.cuts.take(self.stored, self.cut, (*self.cut, *missing))

    def spread(self, part: T, cut: Axes, missing: Axes, when: GatherAfterUpdate) -> None:
        """Make `stored` of the ranks' updated parts: shards over `cut`, on the device, gathered
        along `missing`."""
        into = self.stored if self.tier is Tier.DEVICE else None
        match when:
            case GatherAfterUpdate.BLOCKING:
                self.keep(self.cuts.gather(part, cut, missing, State.PARAMETERS, into))
            case GatherAfterUpdate.DURING_UPDATE:
                self._storing = self.cuts.start_gather(part, cut, missing, State.PARAMETERS, into)
            case GatherAfterUpdate.NEXT_FORWARD:
                assert into is not None, "what is gathered by the next forward is on the device"
                self.cuts.put(into, part, self.cut, cut)
                self._behind = missing

    def begin_settling(self) -> None:
        """Begin what the last update left to the next use."""
        if self._behind:
            self._settling, self._behind = self._start_settling(is_awaited=False), ()

    def settle(self) -> None:
        """Complete what the last update left to the next use."""
        if self._behind:
            self._settling, self._behind = self._start_settling(is_awaited=True), ()
        if self._settling is not None:
            self._settling.wait()
            self._settling = None

    def _start_settling(self, *, is_awaited: bool) -> Move[T]:
        missing, cut = self._behind, (*self.cut, *self._behind)
        part = self.cuts.take(self.stored, self.cut, cut)
        return self.cuts.start_gather(
            part, cut, missing, State.PARAMETERS, self.stored, is_awaited=is_awaited
        )

    def finish_update(self) -> None:
        """Complete what was issued while other units were updated."""
        if self._storing is not None:
            held = self._storing.wait()
            self._storing = None
            self.keep(held)

    def keep(self, held: T, tier: Tier = Tier.DEVICE) -> None:
        """Write an updated tensor of the size of `stored` to it, from where it lies."""
        if self.room.same(held, self.stored):
            return
        if self.tier is Tier.FILE and tier is Tier.DEVICE:
            held = self.room.move(held, Tier.HOST, State.PARAMETERS)
        self.room.copy(held, self.stored)


class UnitTheta(Generic[T]):
    """Theta of one unit, in `parts` with a buffer each: what is trained of it, and what is frozen.
    All of it is used at once."""

    def __init__(self, parts: Sequence[Parameters[T]]) -> None:
        self.parts = parts

    @property
    def is_gathered(self) -> bool:
        return all(part.is_gathered for part in self.parts)

    def gather(self) -> None:
        """Make all of it whole."""
        for part in self.parts:
            part.gather()

    def prefetch(self) -> None:
        """Begin to; `gather` then waits for the rest."""
        for part in self.parts:
            part.prefetch()

    def read_ahead(self) -> None:
        """It is gathered next, if it is not there."""
        for part in self.parts:
            if not part.is_gathered:
                part.room.ahead(part.stored)

    def release(self) -> None:
        """Give back what can be rebuilt."""
        for part in self.parts:
            part.release()

    def signature(self) -> Hashable:
        """Return what its next use depends on."""
        return tuple(part.signature() for part in self.parts)


class Route(NamedTuple, Generic[T]):
    """Between what is kept over the axes `kept` on `tier` and what the update works on, over the
    axes `updated` of them on `update_tier`. Where they differ by axes, the update is on the device:
    collectives are."""

    cuts: Cuts[T]
    kept: Axes
    updated: Axes
    tier: Tier
    update_tier: Tier
    state: State = State.OPTIMIZER

    @property
    def missing(self) -> Axes:
        """The axes along which the update needs what other ranks keep."""
        return without(self.kept, self.updated)

    @property
    def is_in_place(self) -> bool:
        """Whether what is kept is what the update works on."""
        return not self.missing and self.tier is self.update_tier is Tier.DEVICE

    def store(self, initial: T) -> T:
        """A place for this rank's part of `initial` (1-d), or for a scalar as it is."""
        room, part = self.cuts.room, initial
        is_scalar = room.shape(initial) == ()
        if self.missing and not is_scalar:
            part = self.cuts.take(initial, self.updated, self.kept)
        numel = None if is_scalar else room.numel(part)
        stored = room.new(numel, room.dtype(initial), self.tier, self.state)
        room.copy(part, stored)
        return stored

    def fetch(self, stored: T) -> T:
        """Return what the update works on: `stored` itself where it is that."""
        room, held, tier = self.cuts.room, stored, self.tier
        if tier is Tier.FILE:
            held, tier = room.move(held, Tier.HOST, self.state), Tier.HOST
        if tier is Tier.HOST and self.update_tier is Tier.DEVICE:
            held = room.move(held, Tier.DEVICE, self.state)
        if self.missing and room.shape(held):
            held = self.cuts.gather(held, self.kept, self.missing, self.state)
        return held

    def put(self, stored: T, working: T) -> None:
        """Write this rank's part of what was worked on to `stored`, from which `fetch` took it."""
        room, part = self.cuts.room, working
        if self.missing and room.shape(working):
            part = self.cuts.take(working, self.updated, self.kept)
        if room.same(part, stored):
            return
        if self.tier is Tier.FILE and self.update_tier is Tier.DEVICE:
            part = room.move(part, Tier.HOST, self.state)
        room.copy(part, stored)


class RoutedSlot(Generic[T]):
    """One tensor of optimizer state at the end of a route."""

    is_resident = False

    def __init__(self, route: Route[T], initial: T) -> None:
        self.route = route
        self.stored = route.store(initial)

    def fetch(self) -> T:
        return self.route.fetch(self.stored)

    def put(self, working: T) -> None:
        self.route.put(self.stored, working)


class TensorSlot(Generic[T]):
    """The same for one whole tensor of a unit: its elements as a flat padded shard. A counter is
    kept as it is."""

    is_resident = False

    def __init__(self, route: Route[T], initial: T) -> None:
        self.route, self.room = route, route.cuts.room
        self.shape = self.room.shape(initial)
        self.stored = route.store(self._padded(initial) if self.shape else initial)

    def fetch(self) -> T:
        whole = self.route.fetch(self.stored)
        return self.room.piece(whole, 0, self.shape) if self.shape else whole

    def put(self, working: T) -> None:
        if not self.room.same(working, self.stored):
            self.route.put(self.stored, self._padded(working) if self.shape else working)

    def _padded(self, whole: T) -> T:
        """One-dimensional, with a share of every rank; a copy only if that is longer."""
        room, flat, padded = self.room, self.room.flat(whole), self.route.cuts.padded
        if math.prod(self.shape) == padded:
            return flat
        longer = room.like(flat, padded)
        room.clear(longer)
        room.copy(flat, room.piece(longer, 0, (math.prod(self.shape),)))
        return longer
