"""Cached runs that many tests share: the measurement of a spec on its ranks, and its prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.meters.measure import join_estimates
from ptrain.report.record import Check, compare_estimates
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.verification.reference import Trajectory
from tests.gloo.cases import Case
from tests.gloo.runs import Report, train_on_rank
from tests.ranks import Ranks
from tests.trajectories import one_device

STEPS = 6  # two of them at the full learning rate
MEASURED_STEP = 3  # steady: DDP rebuilds its buckets in the second step


@dataclass(frozen=True)
class Outcome:
    """The results of a case after its run."""

    spec: Spec
    reports: list[Report]

    @property
    def trajectory(self) -> Trajectory:
        trajectory = self.reports[0].trajectory
        assert trajectory is not None
        return trajectory

    @cached_property
    def measured(self) -> Estimate:
        return join_estimates([report.measured for report in self.reports if report.measured])

    @cached_property
    def exact(self) -> Estimate:
        return derive(self.spec, facts_of(self.spec)).exact

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        return compare_estimates(self.exact, self.measured)


class Runs:
    """A cache that runs a case when it is first requested."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._outcomes: dict[Case, Outcome] = {}
        self._references: dict[tuple[object, ...], Trajectory] = {}

    def of(self, case: Case) -> Outcome:
        if case not in self._outcomes:
            spec = case.spec()
            reports = self._ranks.run(case.size, train_on_rank, spec, STEPS, MEASURED_STEP)
            self._outcomes[case] = Outcome(spec, reports)
        return self._outcomes[case]

    def all(self) -> Iterator[tuple[Case, Outcome]]:
        yield from sorted(self._outcomes.items(), key=lambda item: str(item[0]))

    def reference(self, case: Case) -> Trajectory:
        """Return the single-device trajectory on the same global batches, independent of mesh and
        placement."""
        key = (case.layout, case.fp64, case.model, case.layers, case.accumulate * case.size)
        if key not in self._references:
            self._references[key] = one_device(case.spec(), STEPS)
        return self._references[key]
