"""The result of a search: a ranking by exact figures, and why each well-known placement lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ptrain.axes.pipeline.catalogue import SCHEDULES
from ptrain.cost import Spent, StepTime
from ptrain.errors import refused
from ptrain.selection.demand import Demand
from ptrain.selection.job import SearchedJob
from ptrain.selection.task import Ranked, SearchCount, SearchGoal
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, format_memory
from ptrain.wording import Worded

_WHOLE, _ALL_SHARDED = "R,R,R,R", "S*,S,S,R"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChoice:
    """A choice by the name that people have for it; `rules` are constraints, in which N stands for
    the number of devices; `least`: the devices that it takes at least."""

    name: str
    rules: tuple[str, ...]
    least: int = 2

    def where(self, devices: int) -> tuple[str, ...] | None:
        """Return its constraints on so many devices; None where it needs more."""
        if devices < self.least:
            return None
        return tuple(rule.replace("N", str(devices)) for rule in self.rules)


KNOWN = (
    KnownChoice(
        name="data parallelism only",
        rules=("mesh.dp_replicate=N", f"placement.dp_replicate={_WHOLE}"),
    ),
    KnownChoice(
        name="sharded optimizer state only",
        rules=("mesh.dp_shard=N", "placement.dp_shard=R,S,R,R"),
    ),
    KnownChoice(
        name="sharded optimizer state and gradients",
        rules=("mesh.dp_shard=N", "placement.dp_shard=R,S,S,R"),
    ),
    KnownChoice(
        name="everything sharded over all devices",
        rules=("mesh.dp_shard=N", f"placement.dp_shard={_ALL_SHARDED}"),
    ),
    KnownChoice(
        name="sharded within a node, replicated across nodes (8 x N/8)",
        rules=(
            "mesh.dp_shard=8",
            "mesh.pp=1",
            "mesh.tp=1",
            "mesh.cp=1",
            f"placement.dp_shard={_ALL_SHARDED}",
            f"placement.dp_replicate={_WHOLE}",
        ),
        least=16,
    ),
    KnownChoice(name="tp=8 with data parallelism", rules=("mesh.tp=8", "mesh.pp=1"), least=8),
    KnownChoice(
        name="pipeline with data parallelism", rules=("mesh.tp=1", "mesh.cp=1", "mesh.pp>1")
    ),
)

_ROUNDED = 1e-9  # of a step: so far apart are sums of the same seconds in another order


def reason(row: Ranked | None, best: Ranked, objective: SearchGoal) -> str:
    """Return why a choice is not the best one, by its figures and no others."""
    if row is None:
        return "its peak is unknown"
    memory = row.memory
    if memory.short_bytes > 0:
        return f"does not fit by {format_memory(memory.short_bytes)}"
    if memory.host_short_bytes > 0:
        return f"its host lacks {format_memory(memory.host_short_bytes)}"
    if not memory.fits:
        return "whether it fits is unknown"
    if row.figures == best.figures:
        return "is the best"
    if objective is SearchGoal.MEMORY:
        return f"needs {format_memory(row.peak_bytes - best.peak_bytes)} more"
    if best.step is None:
        return _of_bytes(row, best)
    if row.step is None:
        return "its time is unknown"
    ratio = row.step.seconds / best.step.seconds
    return f"{ratio - 1:+.1%}: {_more(row.step, best.step)}"


def _of_bytes(row: Ranked, best: Ranked) -> str:
    said = []
    for name, mine, other in (
        ("between nodes", row.tiers.between, best.tiers.between),
        ("within a node", row.tiers.within, best.tiers.within),
    ):
        if mine != other:
            sign = "more" if mine > other else "less"
            said.append(f"sends {format_bytes(abs(mine - other))} {sign} {name}")
    return ", ".join(said) or "sends the same amount"


def _more(step: StepTime, best: StepTime) -> str:
    """The two things on which it spends most more than the best one."""
    more = {spent: step.spent(spent) - best.spent(spent) for spent in Spent}
    largest = sorted(more, key=lambda spent: -more[spent])[:2]
    least = _ROUNDED * best.seconds
    said = [f"{spent} {more[spent]:+.3g} s" for spent in largest if more[spent] > least]
    return ", ".join(said) or "in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A well-known choice: the best candidate of its kind that fits, else the one that needs least
    memory, and what their figures say. `best` None: there is none that is legal, or its cut was not
    traced."""

    name: str
    best: Ranked | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which something fits, and the candidate."""

    change: str
    fitting: Ranked


@dataclass(frozen=True, kw_only=True)
class PlacementRanking(Worded):
    """A ranking, best first: exact figures of those that are best by its estimate and fit. `front`:
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


def _is_serial(row: Ranked) -> bool:
    """Whether the ranks of a pipeline compute one at a time."""
    name = row.spec.pipeline.schedule
    is_staged = row.spec.degree(Axis.PP) > 1
    return is_staged and isinstance(name, ScheduleName) and SCHEDULES[name].is_serial


def undominated(rows: Iterable[Ranked]) -> list[Ranked]:
    """Return rows, best first, without naive pipelines that another schedule of the same placement
    beats: with no more bytes it is no slower."""
    kept: list[Ranked] = []
    for row in rows:
        factors = row.spec.factors
        if not _is_serial(row) or all(
            other.spec.factors != factors or other.peak_bytes > row.peak_bytes for other in kept
        ):
            kept.append(row)
    return kept


def order_of(objective: SearchGoal, row: Ranked) -> tuple[float, ...]:
    """Return what sorts rows by an objective; what has no time stands behind all that has one, in
    the order of nominal seconds, and where nobody knows these either of the bytes that it
    copies."""
    if objective is SearchGoal.MEMORY:
        return False, float(row.peak_bytes), row.nominal_seconds, _is_serial(row)
    copied = 0 if row.seconds is not None else row.tiers.copied
    return row.seconds is None, row.nominal_seconds, copied, float(row.peak_bytes), _is_serial(row)
