"""G of one flat unit: whole while a backward pass fills it, then what is kept of it until the
update, on any tier."""

from __future__ import annotations

from collections.abc import Hashable

from ptrain.costs import Collective, State
from ptrain.derivation.flat_bench import Bench, Buffer, Piece, Started, kept, without
from ptrain.spec.placement import Tier


class Gradients:
    """`whole` collects a micro-batch's gradients, `kept` is their sum (cut along `now`), `raw` a
    layout's second copy."""

    def __init__(self, bench: Bench, buffer: Buffer) -> None:
        step, layout = bench.step, bench.layout
        self.bench, self.buffer, self.step = bench, buffer, step
        self.cut, self.tier = step.gradients, step.gradients_tier
        self.keeps_both = layout.keeps_both
        self.is_in_place = layout.parameters is layout.reduced
        self.whole: Piece | None = None
        self.raw: Piece | None = None
        self.kept: Piece | None = None
        self.now = self.cut
        self.partial = without(step.axes, (*step.updated, *step.gradients))
        self._started: Started | None = None

    def state(self) -> Hashable:
        """What their next use depends on."""
        pieces = (self.whole, self.raw, self.kept)
        sizes = tuple(piece.numel if piece is not None else None for piece in pieces)
        return sizes, self.now, self.partial, self._started is None

    def open(self) -> None:
        """Before the unit's backward: somewhere for gradients to be added to."""
        if self.whole is None:
            self.whole = self.bench.new(self.buffer.padded, self.bench.layout.reduced)

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        """After the unit's backward: reduced to the cut, and kept; with overlap only begun."""
        if self.whole is None:
            return
        overlaps = self.step.overlaps and not self.step.consumed
        if self.cut and is_due:
            started = self.buffer.start_reduce_scatter(self.whole, (), self.cut)
            if overlaps:
                self._started = started
            else:
                self._reduced(self.buffer.wait(started))
        elif not self.cut and (self.keeps_both or self.tier is not Tier.DEVICE):
            self._keep(self.whole)
            if not self.keeps_both:
                self._close()
        if overlaps and is_last and not self.cut and self.tier is Tier.DEVICE:
            self._start_update()

    def complete(self) -> None:
        """Waits for what `finish` began, and does what comes after it."""
        if self._started is None:
            return
        made, self._started = self.buffer.wait(self._started), None
        if self.cut:
            self._reduced(made)
        elif self.step.updated:
            self.bench.drop(self.kept)
            self.kept, self.now = made, self.step.updated
            if not self.keeps_both:
                self._close()
        else:
            self.partial = ()

    def for_update(self) -> None:
        """From the layout of G to that of the update, but for what that gathers itself."""
        bench, buffer = self.bench, self.buffer
        held = self.whole if self.kept is None else self.kept
        if held is None:
            return
        if self.kept is not None:
            self._close()
        bench.drop(self.raw)
        self.raw = None
        wanted = (*self.step.updated, *self.step.gathered_gradients)
        narrower, wider = without(self.step.updated, self.now), without(self.now, wanted)
        travels = bool(narrower or self.partial or wider) and self.tier is not Tier.DEVICE
        now = self.now
        if self.tier is Tier.FILE:
            held = bench.move(held, Tier.HOST, State.GRADIENTS)
        if travels:
            held = self._then(held, bench.move(held, Tier.DEVICE, State.GRADIENTS))
        if narrower:
            held = self._then(held, buffer.reduce_scatter(held, now, narrower))
            now = (*now, *narrower)
        if held is self.whole:
            self.whole = None
        self._close()
        if self.partial:
            bench.send(Collective.ALL_REDUCE, self.partial, State.GRADIENTS, held.size)
        if wider:
            held = self._then(held, buffer.gather(held, now, wider, State.GRADIENTS))
        held = self._then(held, bench.cast(held, bench.layout.gradients))
        if travels:
            held = self._then(held, bench.move(held, Tier.HOST, State.GRADIENTS))
        if held is not self.kept:
            bench.drop(self.kept)
        self.kept, self.now, self.partial = held, wanted, ()

    def working(self) -> Piece | None:
        """What the update works with, where it works."""
        bench, held = self.bench, self.kept
        if held is None:
            return None
        gathered = self.step.gathered_gradients
        on_device = self.step.update_tier is Tier.DEVICE
        if held.tier is not Tier.DEVICE and (gathered or on_device):
            held = self._then(held, bench.move(held, Tier.DEVICE, State.GRADIENTS))
        if gathered:
            held = self._then(held, self.buffer.gather(held, self.now, gathered, State.GRADIENTS))
        if held.tier is Tier.DEVICE and not on_device:
            held = self._then(held, bench.move(held, Tier.HOST, State.GRADIENTS))
        return held

    def clear(self) -> None:
        """After the update."""
        self._close()
        self.bench.drop(self.kept, self.raw)
        self.kept = self.raw = None
        self.now = self.cut
        self.partial = without(self.step.axes, (*self.step.updated, *self.cut))

    def forget_working(self, held: Piece) -> None:
        """Frees what `working` made, unless it is what is kept."""
        if held is not self.kept:
            self.bench.drop(held)

    def _then(self, old: Piece, new: Piece) -> Piece:
        """`new` in place of `old`, which goes unless it is held elsewhere too."""
        if new is not old and old is not self.kept and old is not self.whole:
            self.bench.drop(old)
        return new

    def _reduced(self, shard: Piece) -> None:
        self._close()
        self._keep(shard)
        if self.keeps_both:
            self.bench.drop(self.raw)
            self.raw = shard
        elif shard is not self.kept:
            self.bench.drop(shard)

    def _keep(self, part: Piece) -> None:
        """Adds one micro-batch's part to what is kept."""
        bench, dtype = self.bench, self.bench.layout.gradients
        if self.tier is Tier.DEVICE:
            if self.kept is None and self.keeps_both:
                self.kept = bench.new(part.numel, dtype)
            elif self.kept is None:
                self.kept = bench.cast(part, dtype)
            return
        cast = bench.cast(part, dtype)
        bench.moved(Tier.DEVICE, Tier.HOST, cast.size, State.GRADIENTS)
        if cast is not part:
            bench.drop(cast)
        if self.tier is Tier.FILE:
            if self.kept is not None:
                bench.moved(Tier.FILE, Tier.HOST, cast.size, State.GRADIENTS)
            bench.moved(Tier.HOST, Tier.FILE, cast.size, State.GRADIENTS)
        self.kept = kept(part.numel, dtype, self.tier)

    def _start_update(self) -> None:
        """Nothing is reduced for keeping, so the update's first collective is begun instead."""
        held = self.whole if self.kept is None else self.kept
        assert held is not None
        if self.step.updated:
            self._started = self.buffer.start_reduce_scatter(held, (), self.step.updated)
        elif self.partial:
            self.buffer.all_reduce(held, self.partial)
            self._started = Started(held)

    def _close(self) -> None:
        self.bench.drop(self.whole)
        self.whole = None
