"""What is searched, and what a search gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ptrain.axes.candidates import NOTHING, AxisChoice, Written, chosen
from ptrain.facts.operators import ModelWork
from ptrain.rates.pace import Pace
from ptrain.selection.space import Candidate, without_experts
from ptrain.selection.where import Where
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

# How far above what is exact the closed forms of bytes and of seconds may be: what is so near a
# bound is derived, and what is exact decides. `benchmarks/selection.py` fails where one of those
# that it draws is further above.
SLACK, TIME_SLACK = 1.1, 1.25


class SearchGoal(StrEnum):
    """What the best candidate has least of."""

    TIME = "time"
    MEMORY = "memory"
    DEVICES = "devices"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate, with its bytes and seconds in closed form."""

    candidate: Candidate
    peak: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class SearchCount:
    """How many candidates there were: legal ones that were scored, and of these those that fit by
    the closed form (`untimed`: may, and nobody knows their time); `least` needs least memory."""

    scored: int = 0
    fitting: int = 0
    untimed: int = 0
    least: tuple[float, Candidate] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best by the objective, best first; the fastest by band of memory; how many there were."""

    best: tuple[Scored, ...]
    front: tuple[Scored, ...]
    counts: SearchCount


Work = Callable[[Spec], ModelWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """What is searched: a job like `base` on so many devices, on a machine with this pace, whose
    micro-batches' work `work` tells. `is_nominal`: nobody measured the pace. `own`: the job's shape
    with experts, where the base's stands in for it."""

    base: Spec
    devices: int
    pace: Pace
    work: Work
    is_nominal: bool = False
    objective: SearchGoal = SearchGoal.TIME
    where: Where = field(default_factory=Where)
    written: Written = NOTHING
    own: ModelShape | None = None

    @property
    def placed(self) -> Spec:
        """Return the base with the model that candidates have."""
        return self.base if self.own is None else replace(self.base, model=self.own)

    def with_choices(self, within: tuple[AxisChoice, ...]) -> tuple[Spec, Spec]:
        """Return the base with choices of how blocks are cut, as candidates have it and as it is
        scored: by a model without experts in the place of one with them."""
        placed = chosen(self.placed, within)
        if self.own is None:
            return placed, placed
        return placed, without_experts(chosen(self.base, within))

    @property
    def scored(self) -> Spec | None:
        """Return the base where it is another than candidates have."""
        return None if self.own is None else self.base

    def without_written(self) -> SearchTask:
        """Return the same with nothing written."""
        return replace(self, written=NOTHING)

    @property
    def room(self) -> float:
        """The bytes of a device that a peak may fill."""
        cluster = self.base.cluster
        return float(cluster.usable_memory) if cluster else float("inf")
