"""FSDP2's gathers: a unit's parameters from shards to whole tensors and back.

torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py` says when, `_fsdp_collectives.py` what.
A gather is a buffer and then a tensor per parameter. In forward the buffer lives until the next
unit is gathered; in backward it goes at once, and the next unit's gather starts before this
unit's backward.

On an accelerator the host is ahead of the device, so that a gather starts when the stream of the
gathers lets it. In forward that waits until the parameters of the unit before the one in use are
there (when the root begins: for all that was computed), in backward for those of the unit in use
(`wait_for_unshard`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.axes.data.cost import kept_ranks
from ptrain.axes.data.fsdp2 import habits
from ptrain.costs import Collective, State
from ptrain.derivation.clock_state import Arrival
from ptrain.derivation.ghosts.unit_shards import UnitShards
from ptrain.derivation.tape import Scene
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.steps.wraps import FullyShard
from ptrain.timeline import Mark


class Gathers:
    """Theta of the units: sharded, on its way, gathered, or kept in the larger shards of smaller
    groups between forward and backward."""

    def __init__(
        self,
        scene: Scene,
        step: FullyShard,
        shards: Sequence[UnitShards],
        padded: Sequence[Sequence[int]],
    ) -> None:
        self.tape, self.step, self.times = scene.tape, step, scene.times
        self.holds_buffer = habits().holds_buffer
        layout = scene.plan.update.layout
        self.shards = shards
        self.kept_ranks = [kept_ranks(step.sync, own.ranks) for own in shards]
        self.stays = [  # gathered from forward to backward
            not step.sync.after_forward(is_root=unit.is_root) for unit in scene.units
        ]
        itemsize = layout.parameters.itemsize
        self.tensors = [
            [size * own.ranks * itemsize for size in sizes]
            for own, sizes in zip(shards, padded, strict=True)
        ]
        self.whole = [sum(sizes) for sizes in self.tensors]
        # a cast shard goes into the gather's buffer when it is complete
        self.casts = step.materialized and layout.parameters is not layout.master
        self.shard = [size // own.ranks for size, own in zip(self.whole, shards, strict=True)]
        units = range(len(padded))
        self.is_gathered = [False for _ in units]
        self.is_pending = [False for _ in units]
        self.between = [0 for _ in units]
        self.buffer = 0  # of the last gather in forward
        self.arrivals: list[Arrival | None] = [None for _ in units]
        self.since: float | None = None  # when the stream of the gathers lets the next one start
        self.there: float | None = None  # when the last one's parameters were
        self.root, self.dtype = len(padded) - 1, layout.parameters
        self.forward, self.backward = self._ahead(scene)

    def _ahead(self, scene: Scene) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """The units that each unit gathers ahead; torch's own are those left just before."""
        used = [unit for unit in scene.order(Mark.ENTER) if self.whole[unit]]
        left = [unit for unit in scene.order(Mark.LEAVE) if self.whole[unit]][::-1]
        own = self.step.prefetch if self.step.overlaps else 0
        forward, backward = own or 0, 1 if own is None else own
        return (
            {unit: used[i + 1 : i + 1 + forward] for i, unit in enumerate(used)},
            {unit: left[i + 1 : i + 1 + backward] for i, unit in enumerate(left)},
        )

    def enter(self, unit: int) -> None:
        """A unit's forward begins."""
        if unit == self.root:
            self.since = self.there = self._now()
        if not self.whole[unit]:
            return
        self._start(unit)
        if self.is_pending[unit]:
            self._receive(unit)
            self.since, self.there = self.there, self._now()
        for other in self.forward[unit]:
            self._start(other)

    def _receive(self, unit: int) -> None:
        """The parameters are made of the buffer, which stays for the next one's copy to begin or
        end; where nothing overlaps it goes."""
        if not self.holds_buffer:
            self.end_forward()
        self._copy_out(unit)
        kept = self.whole[unit] if self.step.overlaps else 0
        self.tape.add(kept - self.buffer - self.whole[unit])
        self.buffer = kept

    def leave(self, unit: int) -> None:
        """A unit's forward is over."""
        if self.is_gathered[unit] and not self.stays[unit]:
            if 1 < self.kept_ranks[unit] < self.shards[unit].ranks:
                self._keep(unit)
            else:
                self.reshard(unit)

    def end_forward(self) -> None:
        """The buffer of the last gather goes."""
        self.tape.add(-self.buffer)
        self.buffer = 0

    def before_backward(self, unit: int) -> None:
        """The gradient of a unit's output is there."""
        if not self.whole[unit]:
            return
        self._start(unit)
        if self.is_pending[unit]:
            self._copy_out(unit)
            self.tape.add(-self.whole[unit])
            self.since = self.there = self._now()
        for other in self.backward[unit]:
            self._start(other)

    def gather_ahead(self, unit: int) -> None:
        """Another unit begins to gather it."""
        self._start(unit)

    def end_backward(self) -> None:
        """What was gathered ahead for nobody goes: of units that no gradient came to."""
        for unit, is_pending in enumerate(self.is_pending):
            if is_pending:
                arrival, self.arrivals[unit] = self.arrivals[unit], None
                if arrival is not None:
                    arrival.wait()
                self.is_pending[unit] = False
                self.tape.add(-self.whole[unit])

    def reshard(self, unit: int) -> None:
        if self.is_gathered[unit]:
            self.is_gathered[unit] = False
            self.tape.add(-self.whole[unit])

    def _start(self, unit: int) -> None:
        """Issues the gather: where shards are cast, of a cast copy that goes when it is issued."""
        if self.is_gathered[unit] or self.is_pending[unit]:
            return
        self.is_pending[unit] = True
        between, whole = self.between[unit], self.whole[unit]
        copied = (between or self.shard[unit]) if self.casts else 0
        shards = self.shards[unit]
        self.tape.add(copied + whole)
        self.tape.hook(Hook.FSDP2_GATHER)
        self.tape.computed_beside(OperatorKind.COPY, self.dtype, 2 * (between or self.shard[unit]))
        self.arrivals[unit] = self.tape.sent(
            Collective.ALL_GATHER,
            shards.axes,
            State.PARAMETERS,
            whole,
            "",
            ranks=self.kept_ranks[unit] if between else shards.ranks,
            is_awaited=False,
            since=self.since if self.step.overlaps else None,
        )
        self.tape.add(-copied)

    def _now(self) -> float | None:
        return self.tape.clock.now if self.tape.clock is not None else None

    def _copy_out(self, unit: int) -> None:
        arrival, self.arrivals[unit] = self.arrivals[unit], None
        if arrival is not None:
            arrival.wait()
        self.tape.computed(OperatorKind.COPY, self.dtype, 2 * self.whole[unit])
        self.tape.add(self.whole[unit])
        self.tape.add(-self.between[unit])
        self.between[unit] = 0
        self.is_pending[unit], self.is_gathered[unit] = False, True

    def _keep(self, unit: int) -> None:
        """Each tensor's part is copied before the tensor goes."""
        self.is_gathered[unit] = False
        for size in self.tensors[unit]:
            self.tape.add(size // self.kept_ranks[unit])
            self.tape.add(-size)
        self.between[unit] = self.whole[unit] // self.kept_ranks[unit]

    def now(self) -> int:
        """Bytes of units that are gathered, or kept by a smaller group."""
        there = zip(self.whole, self.is_gathered, self.between, self.times, strict=True)
        return sum(times * (size * is_there + between) for size, is_there, between, times in there)
