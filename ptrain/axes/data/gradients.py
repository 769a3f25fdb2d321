"""G of one unit: a whole buffer while a backward pass fills it, then what is kept of it until the
update, as a whole or a shard, on any tier."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic

from ptrain.axes.data.cuts import Axes
from ptrain.axes.data.theta import Parameters
from ptrain.cost import State
from ptrain.rooms.room import Move, T
from ptrain.spec.placement import Tier, without
from ptrain.steps.wraps import FlatUnits


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
