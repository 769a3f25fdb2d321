"""Adapter: how a flat unit's gradients and a whole step of flat units are opened for the players of
`tests.pure.replay_digests`. All that they know of the derivation's classes stands here."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.cost import Footprint, Phase, Traffic, add_traffic
from ptrain.derivation.flat import Flat
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.tape import Account, Scene, Tape, Wrap
from ptrain.facts.model import ModelFacts
from ptrain.runtime.ghost import Ghost
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Timeline


class Life:
    """What both lives are seen by: bytes on the device above what lives for the whole step, their
    maximum since the phase began, and what was sent or copied between tiers."""

    def __init__(self, spec: Spec, plan: Plan, facts: ModelFacts, timeline: Timeline) -> None:
        assert isinstance(plan.wrap, FlatUnits)
        self._account = Account(spec)
        self.tape = Tape(account=self._account)
        scene = Scene(tape=self.tape, spec=spec, facts=facts, plan=plan, timeline=timeline)
        self.flat = Flat(scene, plan.wrap)

    @property
    def level_and_peak(self) -> tuple[int, int]:
        return self.tape.level, self.tape.peak

    def traffic(self) -> tuple[Traffic, ...]:
        return add_traffic(self._account.rows)

    def begin(self, phase: Phase) -> None:
        self.tape.enter(phase)

    def allocate(self, size: int) -> None:
        """Bytes of the model's own, freed where negative."""
        self.tape.add(size)


class GradientsOfUnit(Life):
    """G of the only unit of a model."""

    def __init__(self, spec: Spec, plan: Plan, facts: ModelFacts) -> None:
        super().__init__(spec, plan, facts, Timeline(forward=(), backward=()))
        self._gradients = self.flat.units.all[0].gradients
        self._working: Ghost | None = None

    def open(self) -> None:
        self._gradients.allocate_buffer()

    def finish(self, *, is_last: bool, is_due: bool) -> None:
        self._gradients.finish(is_last=is_last, is_due=is_due)

    def complete(self) -> None:
        self._gradients.wait()

    def for_update(self) -> None:
        self._gradients.for_update()

    def take_working(self) -> None:
        self._working = self._gradients.update_gradient()

    def forget_working(self) -> None:
        self._working = None

    def clear(self) -> None:
        self._gradients.clear()


class StepOfUnits(Life):
    """All units of a model; `wrap` is what a step's events are said to."""

    @property
    def wrap(self) -> Wrap:
        return self.flat


def residents(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[Footprint]:
    """Yield the bytes that live from step to step, by state and tier."""
    assert isinstance(plan.wrap, FlatUnits)
    yield from make_wrapping(spec, plan, facts).footprints(0)
