"""Adapter: how a flat unit's gradients and a whole step of flat units are opened for the players of
`tests.pure.digests_of_lives`. All that they know of the derivation's classes stands here."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.flat_bench import Bench, Buffer, Piece
from ptrain.derivation.flat_gradients import Gradients
from ptrain.derivation.flat_memory import flat_footprints
from ptrain.derivation.flat_wrap import Flat

from ptrain.costs import Footprint, Phase, Traffic, add_traffic
from ptrain.derivation.tape import Scene, Tape, Wrap
from ptrain.plan.step import FlatUnits, Plan
from ptrain.spec.spec import Spec
from ptrain.timeline import Timeline


class Life:
    """What both lives are seen by: bytes on the device above what lives for the whole step, their
    maximum since the phase began, and what was sent or copied between tiers."""

    def __init__(self, spec: Spec, plan: Plan) -> None:
        assert isinstance(plan.wrap, FlatUnits)
        self.tape, self._account = Tape(), list[Traffic]()
        self.bench = Bench(
            tape=self.tape, spec=spec, plan=plan, step=plan.wrap, account=self._account
        )

    @property
    def level_and_peak(self) -> tuple[int, int]:
        return self.tape.level, self.tape.peak

    def traffic(self) -> tuple[Traffic, ...]:
        return add_traffic(self._account)

    def begin(self, phase: Phase) -> None:
        self.tape.enter(phase)

    def allocate(self, size: int) -> None:
        """Bytes of the model's own, freed where negative."""
        self.tape.add(size)


class GradientsOfUnit(Life):
    """G of one unit of so many elements."""

    def __init__(self, spec: Spec, plan: Plan, numel: int) -> None:
        super().__init__(spec, plan)
        self._gradients = Gradients(self.bench, Buffer(self.bench, numel))
        self._working: Piece | None = None

    def open(self) -> None:
        self._gradients.open()

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        self._gradients.finish(is_last=is_last, is_due=is_due)

    def complete(self) -> None:
        self._gradients.complete()

    def for_update(self) -> None:
        self._gradients.for_update()

    def take_working(self) -> None:
        self._working = self._gradients.working()

    def forget_working(self) -> None:
        if self._working is not None:
            self._gradients.forget_working(self._working)
        self._working = None

    def clear(self) -> None:
        self._gradients.clear()


class StepOfUnits(Life):
    """All units of a model; `wrap` is what a step's events are said to."""

    def __init__(self, spec: Spec, plan: Plan, facts: ModelFacts, timeline: Timeline) -> None:
        super().__init__(spec, plan)
        assert isinstance(plan.wrap, FlatUnits)
        scene = Scene(tape=self.tape, spec=spec, facts=facts, plan=plan, timeline=timeline)
        self.wrap: Wrap = Flat(scene, plan.wrap, bench=self.bench)


def residents(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[Footprint]:
    """Yield the bytes that live from step to step, by state and tier."""
    assert isinstance(plan.wrap, FlatUnits)
    yield from flat_footprints(spec, plan, plan.wrap, facts)
