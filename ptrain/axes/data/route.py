"""A shard that is kept on a tier and made whole for the update: optimizer state, and the master
copy that Theta is materialized from."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

from ptrain.axes.data.cuts import Axes, Cuts
from ptrain.cost import State
from ptrain.rooms.room import T
from ptrain.spec.placement import Tier, without


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
