"""What a search has result: a ranking by exact figures, and what they say of all else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ptrain.errors import refused
from ptrain.selection.demand import Demand
from ptrain.selection.job import SearchedJob
from ptrain.selection.task import Ranked, Scored, SearchCount, SearchGoal
from ptrain.spec.spec import Spec
from ptrain.wording import Worded


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A well-known choice: the best candidate of its kind that fits, else the one that needs least
    memory, and what their figures say. `best` None: there is none that is legal, or `closed` is
    what it is by closed form, for its cut was not traced."""

    name: str
    best: Ranked | None
    why: str
    closed: tuple[Spec, Scored] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which something fits, and the candidate."""

    change: str
    fitting: Ranked


@dataclass(frozen=True, kw_only=True)
class PlacementRanking(Worded):
    """A ranking, best first: exact figures of those that are best by closed form and fit. `front`:
    no other that was derived is faster and needs less. `unknown` says why there is no time; the
    order is then that of nominal seconds. Where nothing fits, `least` needs least memory of all and
    `remedies` are what would. `reasons`: why the best one is as it is. `objective` is what was
    asked for; where that is a number of devices, `by_number` has the best on each that was tried,
    and `demand` is what a training may take."""

    job: SearchedJob
    objective: SearchGoal
    ranking: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    counts: SearchCount
    derived: int
    unknown: str = ""
    least: Ranked | None = None
    remedies: tuple[Remedy, ...] = ()
    lost: tuple[Lost, ...] = ()
    reasons: tuple[str, ...] = ()
    by_number: tuple[tuple[int, Ranked], ...] = ()
    demand: Demand | None = None

    @property
    def ranked_by(self) -> SearchGoal:
        """Return what the rows are ordered by, on the devices that there are."""
        return SearchGoal.MEMORY if self.objective is SearchGoal.MEMORY else SearchGoal.TIME

    @property
    def best(self) -> Ranked | None:
        """Return the winner, None where nothing fits."""
        return self.ranking[0] if self.ranking else None

    @property
    def spec(self) -> Spec:
        """Return the winner's spec. Raises SpecError where nothing fits."""
        if self.best is None:
            raise refused("ptrain select", f"nothing fits on {self.job.devices} devices")
        return self.best.spec


def front_of(rows: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Return those that no other is as fast as with less memory, fastest first."""
    front: list[Ranked] = []
    for row in sorted(rows, key=lambda row: (row.nominal_seconds, row.peak_bytes)):
        if not front or row.peak_bytes < front[-1].peak_bytes:
            front.append(row)
    return tuple(front)


def order_of(objective: SearchGoal, row: Ranked) -> tuple[bool, float, float]:
    """Return what sorts rows by an objective; what has no time stands behind all that has one, in
    the order of the closed form's."""
    if objective is SearchGoal.MEMORY:
        return False, float(row.peak_bytes), row.nominal_seconds
    return row.seconds is None, row.nominal_seconds, float(row.peak_bytes)
