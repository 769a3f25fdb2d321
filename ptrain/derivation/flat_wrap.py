"""All flat units on a model's timeline: what is gathered ahead, what is reduced beside the backward
pass, and the update."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ptrain.algebra.layout import place_of
from ptrain.derivation.flat_bench import Bench, Buffer
from ptrain.derivation.flat_gradients import Gradients
from ptrain.derivation.flat_unit import Unit
from ptrain.derivation.memory import differing_axes, within_tp
from ptrain.derivation.tape import Scene
from ptrain.facts.model import UnitFacts
from ptrain.plan.step import FlatUnits
from ptrain.spec.batch import GradientSync
from ptrain.spec.placement import Tier
from ptrain.timeline import Complete, Kind, Mark

SCALE_BYTES = 4  # fp32, as is the flag of an overflow


class Flat:
    """Flat units, one after the other in forward, backward and update. `chosen` are those that are
    played (all, where it is not given)."""

    def __init__(
        self,
        scene: Scene,
        step: FlatUnits,
        *,
        bench: Bench | None = None,
        chosen: Sequence[UnitFacts] | None = None,
    ) -> None:
        self.scene, self.step = scene, step
        self.bench = bench or Bench(tape=scene.tape, spec=scene.spec, plan=scene.plan, step=step)
        self.units: list[Unit | None] = []
        buffers: dict[int, Buffer] = {}
        for unit in scene.facts.units if chosen is None else chosen:
            if unit.numel not in buffers:
                buffers[unit.numel] = Buffer(self.bench, unit.numel)
            made = Unit(self.bench, buffers[unit.numel], unit) if unit.numel else None
            self.units.append(made)
        self.unit_of = scene.unit_of()
        entered = dict.fromkeys(scene.order(Mark.ENTER) if step.prefetch and not chosen else ())
        self.order = [index for index in entered if self.units[index] is not None]
        self.flying: Gradients | None = None
        self.is_last = True
        self.half: Kind | None = None
        self.waiting: dict[int, int] = {}  # bytes of gradients that wait for a half to end, by unit

    @property
    def used(self) -> list[Unit]:
        """The units that hold parameters."""
        return [unit for unit in self.units if unit is not None]

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_last = is_last

    def begin_half(self, kind: Kind) -> None:
        self.half = kind
        for unit in self.used if kind is Kind.WEIGHT else ():
            unit.gradients.open()

    def end_half(self, kind: Kind) -> None:
        """Gradients of weights alone come by no hook: they go where they belong when all are
        there."""
        self.half = None
        if kind is Kind.WEIGHT:
            for index, unit in reversed([*enumerate(self.units)]):
                if unit is not None:
                    unit.pending = 0
                    self.bench.tape.add(-self.waiting.pop(index, 0))
                    self.finish(unit)
        self._complete()
        if kind is Kind.WEIGHT and self.is_last:
            self._release_all()

    def enter(self, unit: int) -> None:
        self._gather(unit, is_forward=True)

    def leave(self, unit: int) -> None:
        found = self.units[unit]
        if found is None:
            return
        if self.step.sync.after_forward(is_root=found.facts.is_root):
            found.theta.release()

    def before_backward(self, unit: int) -> None:
        found = self.units[unit]
        if found is None:
            return
        self._gather(unit, is_forward=False)
        if not found.pending:
            found.pending = found.num_tensors
            found.gradients.open()

    def complete(self, gradient: Complete) -> None:
        """Added to the unit's buffer, and gone before the unit's hook runs."""
        index = self.unit_of[gradient.parameter]
        unit = self.units[index]
        assert unit is not None
        if self.half is Kind.WEIGHT:
            if unit.gradients.is_in_place:
                self.bench.tape.add(-gradient.size)
            else:
                self.waiting[index] = self.waiting.get(index, 0) + gradient.size
            return
        if not gradient.cloned:
            self.bench.tape.add(-gradient.size)
        elif not unit.gradients.is_in_place:
            self.bench.tape.spike(gradient.size)
        unit.pending -= 1
        if unit.pending == 0:
            self.finish(unit)

    def after_backward(self, unit: int) -> None:
        """A parameter that had no part in the loss leaves its unit open until the pass is over."""
        if unit == len(self.units) - 1 and self.half is None:
            for late in self.used:
                if late.pending:
                    late.pending = 0
                    self.finish(late)
            self.end()

    def finish(self, unit: Unit) -> None:
        """The unit's backward is complete."""
        is_due = self.is_last or self.step.sync.gradients is GradientSync.EVERY
        if is_due:
            self._complete()
        unit.gradients.finish(is_last=self.is_last, is_due=is_due)
        self.flying = unit.gradients
        if self.step.consumed:
            unit.gradients.for_update()
        if self.is_last or self.step.sync.reshard_after_backward:
            unit.theta.release()
        if self.step.consumed:
            unit.update.run()
            unit.gradients.clear()

    def end(self) -> None:
        """The micro-batch is over."""
        self._complete()
        if self.is_last:
            self._release_all()

    def _release_all(self) -> None:
        for unit in self.used:
            unit.theta.release()

    def gathered(self) -> int:
        return sum(unit.theta.gathered_bytes for unit in self.used)

    def lingering(self) -> int:
        return 0

    def signature(self) -> Hashable:
        units = tuple(
            (unit.pending, unit.theta.now(), unit.gradients.state()) for unit in self.used
        )
        return units, self.is_last, self.flying is None

    def reduce(self) -> None:
        for unit in self.used:
            unit.gradients.for_update()
        if self.bench.layout.scales_loss and self._on_device and not self.step.consumed:
            self.bench.tape.spike(SCALE_BYTES)

    def clipped(self, shard: int) -> list[list[int]] | None:
        """On the gradients' tier, but for the scalar that is reduced."""
        if self.step.consumed:
            return None
        if self._on_device and within_tp(self.scene.plan):
            return self._by_operator(shard)
        if self._on_device:
            held = (unit.gradients.kept for unit in self.used)
            return [[piece.numel for piece in held if piece is not None]]
        step = self.scene.plan.clip
        if step is not None and step.axes:
            size = max(SCALE_BYTES, self.bench.layout.gradients.itemsize)
            self.bench.tape.spike(size)
        return None

    def _by_operator(self, shard: int) -> list[list[int]]:
        """Elements of the views of which there is a norm each: of tensors that are cut within tp,
        then of those that its ranks have alike."""
        place = place_of(self.scene.spec, differing_axes(self.scene.plan), shard)
        found = [run for unit in self.used for run in unit.kept_runs(place)]
        return [[end - start for start, end, flag in found if flag is cut] for cut in (True, False)]

    @property
    def _on_device(self) -> bool:
        return self.step.gradients_tier is Tier.DEVICE

    def update(self, shard: int) -> None:
        for unit in self.used:
            unit.update.run()

    def finish_update(self) -> None:
        """Gathers that were issued during the update are awaited."""
        for unit in self.used:
            unit.theta.finish_update()
        for unit in self.used:
            unit.gradients.clear()

    def _complete(self) -> None:
        if self.flying is not None:
            self.flying.complete()
        self.flying = None

    def _gather(self, index: int, *, is_forward: bool) -> None:
        """The unit, and the beginning of those that follow in this direction."""
        unit = self.units[index]
        if unit is None:
            return
        unit.theta.gather()
        if not self.step.prefetch or index not in self.order:
            return
        place = self.order.index(index)
        following = self.order[place + 1 :] if is_forward else self.order[:place][::-1]
        for other in following[: self.step.prefetch]:
            ahead = self.units[other]
            assert ahead is not None
            ahead.theta.prefetch()
