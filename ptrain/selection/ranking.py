"""The result of a search: a ranking by exact figures, and why each well-known placement lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ptrain.axes.pipeline.catalogue import SCHEDULES
from ptrain.derivation.estimate import Derivation
from ptrain.errors import refused
from ptrain.selection.demand import Demand
from ptrain.selection.job import SearchedJob
from ptrain.selection.quantities import QUANTITIES, recompute_of
from ptrain.selection.space import SEARCHED_AXES, SPACES
from ptrain.selection.task import SLACK, Ranked, SearchCount, SearchGoal
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import EXPERT_AXES, TOKEN_AXES, Axis
from ptrain.spec.spec import Spec
from ptrain.wording import Worded

_WHOLE, _ALL_SHARDED = "R,R,R,R", "S*,S,S,R"
_OF_DATA = ("mesh.pp=1", "mesh.tp=1", "mesh.cp=1", "mesh.ep=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChoice:
    """A choice by the name that people have for it; `rules` are constraints, in which N stands for
    the number of devices; `least`: the devices that it takes at least; `axes`: what a job must be
    able to use for it; `kept`: how blocks keep activations, if that is part of it."""

    name: str
    rules: tuple[str, ...]
    least: int = 2
    kept: str = ""
    axes: tuple[Axis, ...] = ()

    def where(self, job: SearchedJob) -> tuple[str, ...] | None:
        """Return its constraints for a job; None if the job has too few devices for it, or no use
        of its axes."""
        if job.devices < self.least or not all(may_use(axis, job) for axis in self.axes):
            return None
        return tuple(rule.replace("N", str(job.devices)) for rule in self.rules)


def may_use(axis: Axis, job: SearchedJob) -> bool:
    """Return True if a search tries more than one rank on an axis."""
    space = next(space for space in SPACES if axis in space.axes)
    return any(size > 1 for size in space.sizes(job.base, job.devices, job.written))


KNOWN = (
    KnownChoice(name="DDP", rules=("mesh.dp_replicate=N", f"placement.dp_replicate={_WHOLE}")),
    KnownChoice(name="ZeRO-1", rules=("mesh.dp_shard=N", "placement.dp_shard=R,S,R,R")),
    KnownChoice(name="ZeRO-2", rules=("mesh.dp_shard=N", "placement.dp_shard=R,S,S,R")),
    KnownChoice(name="FSDP", rules=("mesh.dp_shard=N", f"placement.dp_shard={_ALL_SHARDED}")),
    KnownChoice(
        name="HSDP, sharded within a node of 8",
        rules=(
            *("mesh.dp_shard=8", *_OF_DATA, f"placement.dp_shard={_ALL_SHARDED}"),
            f"placement.dp_replicate={_WHOLE}",
        ),
        least=16,
    ),
    KnownChoice(name="tp=8 × data", rules=("mesh.tp=8", "mesh.pp=1"), least=8),
    KnownChoice(name="pp × data", rules=("mesh.tp=1", "mesh.cp=1", "mesh.pp>1")),
    KnownChoice(name="pp × tp", rules=("mesh.pp>1", "mesh.tp>1", "mesh.cp=1"), least=4),
    KnownChoice(name="cp", rules=("mesh.cp>1",), axes=TOKEN_AXES),
    KnownChoice(name="ep", rules=("mesh.ep>1",), axes=EXPERT_AXES),
)


def recomputing(spec: Spec) -> Iterator[KnownChoice]:
    """Yield the other ways to keep activations on the mesh of a spec."""
    degrees = [f"mesh.{axis}={spec.degree(axis)}" for axis in SEARCHED_AXES]
    for word in QUANTITIES["recompute"].words:
        if word != recompute_of(spec):
            name = f"the mesh of the best, recompute={word}"
            yield KnownChoice(name=name, rules=tuple(degrees), kept=word, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A well-known choice: the best candidate of its kind that fits, else the one that needs least
    memory. `best` None: there is none that is legal, its cut was not traced, or only what needs
    least memory was seen to fit, as `why` says. With a best, `report.selection.why_lost` makes a
    sentence of its figures."""

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
    `remedies` are what would. `winner`: what is derived of the best one. `objective` is what was
    asked for; where that is a number of devices, `by_number` has the best on each that was tried,
    and `demand` is what a training may take. `asked_margin`: the margin that was asked for where
    nothing leaves it."""

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
    winner: Derivation | None = field(default=None, repr=False, compare=False)
    by_number: tuple[tuple[int, Ranked], ...] = ()
    demand: Demand | None = None
    asked_margin: float = 0.0

    @property
    def ranked_by(self) -> SearchGoal:
        """Return what the rows are ordered by, on the devices that there are."""
        return SearchGoal.MEMORY if self.objective is SearchGoal.MEMORY else SearchGoal.TIME

    @property
    def best(self) -> Ranked | None:
        """Return the winner, None where nothing fits."""
        return self.ranking[0] if self.ranking else None

    @property
    def is_far_from_fitting(self) -> bool:
        """Return True if what needs least memory does not fit without a margin either, and its
        estimate is further above the limit than it may be away."""
        least, cluster = self.least, self.job.base.cluster
        if least is None or cluster is None:
            return False
        return least.memory.short_bytes > 0 and least.closed.peak > cluster.usable_memory * SLACK

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
