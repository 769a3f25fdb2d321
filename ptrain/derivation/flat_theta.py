"""Theta of one flat unit: whole on the device for use, from what is kept of it on any tier."""

from __future__ import annotations

from collections.abc import Hashable

from ptrain.costs import State
from ptrain.derivation.flat_bench import Axes, Bench, Buffer, Piece, Started, kept
from ptrain.spec.batch import GatherAfterUpdate
from ptrain.spec.placement import Tier


class Theta:
    """`stored` is this rank's shard, `whole` the buffer that the model sees: `stored` itself, or
    there only for use."""

    def __init__(self, bench: Bench, buffer: Buffer) -> None:
        step = bench.step
        self.bench, self.buffer = bench, buffer
        self.cut, self.tier = step.parameters, step.parameters_tier
        self.stored = kept(buffer.numel(self.cut), bench.stored, self.tier)
        self.is_transient = bool(self.cut) or self.tier is not Tier.DEVICE or step.materialized
        self.whole: Piece | None = None if self.is_transient else self.stored
        self._gathering: tuple[Started, Piece] | None = None
        self._storing: tuple[Started, Piece] | None = None
        late = step.gather_after_update is GatherAfterUpdate.NEXT_FORWARD
        # in a steady step the first use completes what the update before it left open
        missing = tuple(axis for axis in step.updated if axis not in self.cut)
        self._behind: Axes = missing if late else ()

    @property
    def state(self) -> State:
        """What the stored bytes count as: a master copy is Omega's."""
        return State.OPTIMIZER if self.bench.step.materialized else State.PARAMETERS

    @property
    def gathered_bytes(self) -> int:
        """Of what is there only for use."""
        return self.whole.size if self.is_transient and self.whole is not None else 0

    def now(self) -> Hashable:
        """What its next use depends on."""
        return self.whole is None, self._gathering is None, self._storing is None, self._behind

    def gather(self) -> None:
        """Whole from here on."""
        self.prefetch()
        if self._gathering is not None:
            self._awaited()

    def prefetch(self) -> None:
        """Begins to gather; `gather` waits for the rest."""
        self._settle()
        if self.whole is not None:
            return
        self.whole = self.bench.new(self.buffer.padded, self.bench.layout.parameters)
        part = self._for_use()
        if self.cut:
            started = self.buffer.start_gather(
                part, self.cut, self.cut, State.PARAMETERS, into=self.whole
            )
            self._gathering = (started, part)
            return
        self.bench.copied(part, self.whole, State.PARAMETERS)
        self.bench.drop(part)

    def _awaited(self) -> None:
        assert self._gathering is not None
        started, part = self._gathering
        self.buffer.wait(started)
        self.bench.drop(part)
        self._gathering = None

    def _for_use(self) -> Piece:
        """What is stored, in the dtype of use, as near to `whole` as its collective needs it."""
        bench, part = self.bench, self.stored
        if self.tier is Tier.FILE:
            part = bench.move(part, Tier.HOST, self.state)
        if self.cut or self.tier is not Tier.DEVICE:
            part = bench.instead(part, bench.cast(part, bench.layout.parameters))
        if self.cut and self.tier is not Tier.DEVICE:
            part = bench.instead(part, bench.move(part, Tier.DEVICE, State.PARAMETERS))
        return part

    def release(self) -> None:
        """Gone, if it can be rebuilt."""
        if self.is_transient and self.whole is not None:
            if self._gathering is not None:
                self._awaited()
            self.bench.drop(self.whole)
            self.whole = None

    def spread(self, part: Piece, cut: Axes, missing: Axes) -> None:
        """`stored` of the ranks' updated parts: shards over `cut` on the device, gathered along
        `missing`."""
        into = self.stored if self.tier is Tier.DEVICE else None
        match self.bench.step.gather_after_update:
            case GatherAfterUpdate.BLOCKING:
                held = self.buffer.gather(part, cut, missing, State.PARAMETERS, into)
                self.keep(held)
                self.bench.drop(held)
            case GatherAfterUpdate.DURING_UPDATE:
                started = self.buffer.start_gather(part, cut, missing, State.PARAMETERS, into)
                part.storage.in_flight = True
                self._storing = (started, part)
            case GatherAfterUpdate.NEXT_FORWARD:
                self._behind = missing

    def finish_update(self) -> None:
        """Completes what was issued while other units were updated."""
        if self._storing is not None:
            (started, part), self._storing = self._storing, None
            held = self.buffer.wait(started)
            part.storage.in_flight = False
            self.bench.drop(part)
            self.keep(held)
            self.bench.drop(held)

    def keep(self, held: Piece) -> None:
        """An updated tensor goes to its place."""
        if held.storage is self.stored.storage:
            return
        if self.tier is Tier.FILE and held.tier is Tier.DEVICE:
            staged = self.bench.move(held, Tier.HOST, State.PARAMETERS)
            self.bench.copied(staged, self.stored, State.PARAMETERS)
        else:
            self.bench.copied(held, self.stored, State.PARAMETERS)

    def _settle(self) -> None:
        """Completes what the last update left to the next use."""
        if self._behind:
            missing, self._behind = self._behind, ()
            cut = (*self.cut, *missing)
            part = self.buffer.take(self.stored, self.cut, cut)
            self.buffer.gather(part, cut, missing, State.PARAMETERS, self.stored)
            self.bench.drop(part)
