"""The result of a search: a ranking by exact figures, and why each well-known placement lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptrain.axes.pipeline.catalogue import SCHEDULES
from ptrain.cost import PLACED, Spent
from ptrain.errors import refused
from ptrain.selection.demand import Demand
from ptrain.selection.job import SearchedJob
from ptrain.selection.quantities import QUANTITIES, recompute_of
from ptrain.selection.space import SEARCHED_AXES, SPACES
from ptrain.selection.task import SLACK, Ranked, SearchCount, SearchGoal
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import DATA_AXES, EXPERT_AXES, TOKEN_AXES, Axis, Placement, R, Tier
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, format_memory, format_seconds
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


def idea_of(spec: Spec) -> str:
    """Return the idea of a placement in the field's words: `pp × HSDP × tp, recompute full`."""
    factors = {factor.axis: factor for factor in spec.factors if factor.degree > 1}
    data = [factors[axis].placement for axis in DATA_AXES if axis in factors]
    words = [str(axis) for axis in factors if axis not in DATA_AXES]
    if data:
        words.insert(words[:1] == ["pp"], _data_idea(data))
    kept = recompute_of(spec)
    way = {"none": "", "offload": ", activations offloaded"}.get(kept, f", recompute {kept}")
    is_hosted = any(
        placement[state].tier is not Tier.DEVICE for placement in data for state in PLACED
    )
    return (" × ".join(words) or "one device") + ", states offloaded" * is_hosted + way


def _data_idea(data: Sequence[Placement]) -> str:
    """Return the name of what the data axes shard."""
    if any(placement.parameters != R for placement in data):
        return "FSDP" if all(placement.parameters != R for placement in data) else "HSDP"
    if any(placement.gradients != R for placement in data):
        return "ZeRO-2"
    return "ZeRO-1" if any(placement.optimizer != R for placement in data) else "DDP"


_LEAST = 0.001  # of the best's step: what takes less is no reason


def reason(row: Ranked | None, best: Ranked, objective: SearchGoal) -> str:
    """Return in a sentence why a choice is not the best one, by its figures and no others."""
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
        return f"its time is unknown: {row.why_untimed}"
    ratio = row.step.seconds / best.step.seconds - 1
    pace = f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'}"
    less = best.peak_bytes - row.peak_bytes
    room = f"; {format_memory(abs(less))} {'smaller' if less > 0 else 'larger'}" if less else ""
    return f"{pace}{_more(row, best)}{room}"


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


_SPENT = {
    Spent.COMPUTE: "compute",
    Spent.WRAPPERS: "wrappers on the host",
    Spent.LAUNCHES: "waiting for the host's launches",
    Spent.COPIES: "copies to and from the host",
    Spent.UPDATE: "optimizer update",
    Spent.BUBBLE: "pipeline bubble",
    Spent.INTERFERENCE: "compute slowed by collectives",
    Spent.STRAGGLERS: "stragglers and congestion",
}


def _more(row: Ranked, best: Ranked) -> str:
    """Return the two things on which a row spends most more than the best one."""
    mine, other = _parts(row), _parts(best)
    more = {name: seconds - other.get(name, 0.0) for name, seconds in mine.items()}
    least = _LEAST * sum(other.values())
    largest = sorted((name for name in more if more[name] > least), key=lambda name: -more[name])
    said = " and ".join(f"{format_seconds(more[name])} more {name}" for name in largest[:2])
    if recompute_of(row.spec) not in ("none", recompute_of(best.spec)):
        said = said.replace("more compute", "more compute with recomputation")
    return f", {said}" if said else ""


def _parts(row: Ranked) -> dict[str, float]:
    """Return the seconds of a step by what they go to; communication by axes."""
    assert row.step is not None, "a row that has a time"
    parts: dict[str, float] = {}
    for time in row.step.rows:
        axes = "+".join(time.key.axes)
        name = _SPENT.get(time.key.spent, f"exposed {axes} communication")
        parts[name] = parts.get(name, 0.0) + time.seconds
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A well-known choice: the best candidate of its kind that fits, else the one that needs least
    memory, and what their figures say. `best` None: there is none that is legal, its cut was not
    traced, or only what needs least memory was seen to fit."""

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
    reasons: tuple[str, ...] = ()
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
