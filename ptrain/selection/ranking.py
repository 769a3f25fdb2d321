"""The output of a search: a row of exact figures per candidate, the ranking of
rows with the reasons why well-known placements lost, and the demand of a full training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ptrain.axes.pipeline.catalogue import SCHEDULES
from ptrain.cost import Collective, Estimate, Phase, StepTime, Traffic
from ptrain.derivation.estimate import Derivation, Throughput, predict_throughput
from ptrain.derivation.interconnect import Network
from ptrain.derivation.kernels import takes_peak_of
from ptrain.errors import input_error
from ptrain.facts.model import ModelFacts
from ptrain.selection.fit import Fit, fit
from ptrain.selection.job import SearchedJob
from ptrain.selection.space import Candidate
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import format_count, group_by_key, parse_count
from ptrain.wording import Worded, data_frame

# Largest ratio of estimated to exact bytes and seconds. Candidates this close to a bound are
# derived, and the exact figure decides. `benchmarks/selection.py` fails if one of its sampled
# ratios is larger.
SLACK, TIME_SLACK = 1.1, 1.15


class SearchGoal(StrEnum):
    """The figure that a search minimizes."""

    TIME = "time"
    MEMORY = "memory"
    DEVICES = "devices"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate with its estimated peak in bytes and step time in seconds."""

    candidate: Candidate
    peak: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class SearchCount:
    """The number of candidates that were scored, that fit by the estimate, and whose time is
    unknown (`untimed`)."""

    scored: int = 0
    fitting: int = 0
    untimed: int = 0


_BILLION = 10**9
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved:
    """Bytes of a step on the rank that sends most: sent between nodes, sent within a node (averaged
    over its groups), and copied between tiers."""

    between: int
    within: int
    copied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate with its exact figures.

    Attributes:
        spec: Its spec.
        closed: The estimates by which it was chosen.
        step: Its step time; None if unknown.
        memory: Its peak and the available memory.
        tiers: The bytes that it moves.
        throughput: Tokens per second and MFU; None if the time is unknown.
        why_untimed: The reason why the time is unknown.
        assumed: The routing of tokens for which the peak holds; "" if it depends on none.
        alike: Number of other derived candidates with identical figures.
    """

    spec: Spec
    closed: Scored
    step: StepTime | None
    memory: Fit
    tiers: BytesMoved
    throughput: Throughput | None
    why_untimed: str = ""
    assumed: str = ""
    alike: int = 0

    @property
    def seconds(self) -> float | None:
        """The step time in seconds; None if unknown."""
        return None if self.step is None else self.step.seconds

    @property
    def nominal_seconds(self) -> float:
        """The step time, or its estimate if it is unknown."""
        return self.closed.seconds if self.seconds is None else self.seconds

    @property
    def peak_bytes(self) -> int:
        """The peak, or its lower bound."""
        return self.memory.least_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second of all ranks; None if unknown."""
        return None if self.throughput is None else self.throughput.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """The model FLOPs utilization with full attention, as `predict` prints it first; None if
        unknown."""
        return None if self.throughput is None else self.throughput.mfu_full

    @property
    def figures(self) -> tuple[object, ...]:
        """The figures by which it is ranked and shown."""
        return self.nominal_seconds, self.peak_bytes, self.tiers

    @property
    def price(self) -> float | None:
        """The price of a billion tokens; None if time or price of the cluster is unknown."""
        cluster, rate = self.spec.cluster, self.tokens_per_second
        if rate is None or cluster is None or cluster.price is None:
            return None
        return cluster.price * self.spec.world_size * _BILLION / rate / _HOUR


def ranked(spec: Spec, closed: Scored, exact: Estimate, facts: ModelFacts) -> Ranked:
    """Return the row of a candidate with its exact figures."""
    return Ranked(
        spec=spec,
        closed=closed,
        step=exact.step,
        why_untimed="" if exact.step else exact.undefined.get("step_seconds", ""),
        memory=fit(spec, exact, takes_unclaimed=takes_peak_of(spec, facts), takes_assumed=True),
        assumed=exact.assumed.get("peak", ""),
        tiers=_tiers(spec, exact),
        throughput=predict_throughput(spec, facts, exact.step) if exact.step else None,
    )


def folded(rows: Iterable[Ranked]) -> list[Ranked]:
    """Return one row per group with identical figures: the one with the fewest non-default
    dials."""
    by_figures = group_by_key((row.figures, row) for row in rows)
    return [replace(min(alike, key=_said), alike=len(alike) - 1) for alike in by_figures.values()]


def _said(row: Ranked) -> int:
    """Return the number of data dials that differ from the default."""
    spec = row.spec
    dials = spec.overlap is not None, spec.prefetch is not None, spec.unit is not None
    return sum((*dials, spec.sync != SyncPolicy()))


def _tiers(spec: Spec, exact: Estimate) -> BytesMoved:
    """Return the bytes that the spec's busiest rank moves."""
    network = Network(spec)
    pairs = [_sent(network, rows) for rows in exact.by_rank()]
    between, within = max(pairs, key=lambda pair: (pair[0], pair[1]))
    return BytesMoved(between=between, within=within, copied=exact.copied_bytes())


def _sent(network: Network, rows: Iterable[Traffic]) -> tuple[int, int]:
    """Return the bytes that a rank sends between nodes and within its node."""
    sums = [0.0, 0.0]
    for row in rows:
        key = row.key
        if key.phase is Phase.SETUP or not row.sent_bytes or not key.axes:
            continue
        if key.collective is Collective.SEND:
            share = float(network.pair(Axis(key.axes[0])) > 1)
        else:
            ranks, nodes = network.group(network.axis_names(tuple(map(Axis, key.axes))))
            share = crossing(key.collective, ranks, nodes)
        sums[0] += share * row.sent_bytes
        sums[1] += (1 - share) * row.sent_bytes
    return round(sums[0]), round(sums[1])


def crossing(collective: Collective, ranks: int, nodes: int) -> float:
    """Return the part of a group's traffic that crosses nodes.

    In a ring one link per node crosses; in an all-to-all the parts for ranks of other nodes do.
    """
    if nodes == 1:
        return 0.0
    if collective is Collective.ALL_TO_ALL:
        return (ranks - ranks / nodes) / (ranks - 1)
    # A ring of R ranks on N nodes has R links, of which N connect nodes.
    return nodes / ranks


_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The limits of a training: tokens, seconds in total, and money in total; None means no
    limit."""

    tokens: int
    deadline: float | None = field(default=None, metadata={"key": "deadline_seconds"})
    budget: float | None = None

    def seconds(self, row: Ranked) -> float | None:
        """Return the time of the full training; None if the step time is unknown."""
        rate = row.tokens_per_second
        return None if rate is None else self.tokens / rate

    def money(self, row: Ranked) -> float | None:
        """Return the price of the full training; None without a price."""
        return None if row.price is None else row.price * self.tokens / 1e9

    def is_met(self, row: Ranked) -> bool:
        """Return True if the row is known to meet all limits."""
        seconds, money = self.seconds(row), self.money(row)
        in_time = self.deadline is None or (seconds is not None and seconds <= self.deadline)
        return in_time and (self.budget is None or (money is not None and money <= self.budget))

    def figures(self, row: Ranked) -> tuple[str, str]:
        """Return the days and the price of the full training, as text."""
        seconds, money = self.seconds(row), self.money(row)
        return (
            "an unknown time" if seconds is None else f"{seconds / _DAY:.3g} days",
            "unknown" if money is None else f"{money:,.0f}",
        )

    @property
    def text(self) -> str:
        """The demand in words."""
        said = [f"{format_count(self.tokens)} tokens"]
        if self.deadline is not None:
            said.append(f"within {self.deadline / _DAY:.3g} days")
        if self.budget is not None:
            said.append(f"at a cost of {self.budget:,.0f}")
        return " ".join(said)


def demand_of(tokens: str | None, deadline: str | None, budget: float | None) -> Demand | None:
    """Return the demand of command-line options; None without any.

    Raises:
        SpecError: A limit is given without tokens, or a value is invalid.
    """
    if tokens is None:
        if deadline is not None or budget is not None:
            raise input_error(
                "--tokens",
                "a deadline or a budget needs a number of tokens",
                "Add the tokens, for example `--tokens 1T`.",
            )
        return None
    try:
        number = parse_count(tokens)
    except ValueError:
        raise input_error(
            "--tokens",
            f"{tokens[:40]} is not a number",
            "Use a number such as `1T`, `300B` or `15e12`.",
        ) from None
    return Demand(
        tokens=number, deadline=None if deadline is None else _duration(deadline), budget=budget
    )


def _duration(text: str) -> float:
    """Return a duration such as `30d` in seconds."""
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|w)\s*", text)) is None:
        raise input_error(
            "--deadline",
            f"{text[:40]} is not a duration",
            "Use a duration such as `30d`, `12h` or `90min`.",
        )
    return float(match[1]) * _UNITS[match[2]]


def numbers(devices: int) -> Iterator[int]:
    """Yield the powers of two below `devices`, then `devices`."""
    number = 1
    while number < devices:
        yield number
        number *= 2
    yield devices


def cheapest(rows: Iterable[tuple[int, Ranked]]) -> tuple[int, Ranked] | None:
    """Return the number of devices with the lowest price per token, or the lowest device time
    without prices; None if no time is known."""
    known = [(n, row) for n, row in rows if row.tokens_per_second is not None]
    return min(known, key=lambda pair: pair[0] / (pair[1].tokens_per_second or 1.0), default=None)


_WHOLE, _ALL_SHARDED = "R,R,R,R", "S*,S,S,R"
_OF_DATA = ("mesh.pp=1", "mesh.tp=1", "mesh.cp=1", "mesh.ep=1")


# Constraints of well-known placements, by their usual name; N is the number of devices.
KNOWN = {
    "DDP": ("mesh.dp_replicate=N", f"placement.dp_replicate={_WHOLE}"),
    "ZeRO-1": ("mesh.dp_shard=N", "placement.dp_shard=R,S,R,R"),
    "ZeRO-2": ("mesh.dp_shard=N", "placement.dp_shard=R,S,S,R"),
    "FSDP": ("mesh.dp_shard=N", f"placement.dp_shard={_ALL_SHARDED}"),
    "HSDP, sharded within a node of 8": (
        *("mesh.dp_shard=8", *_OF_DATA, f"placement.dp_shard={_ALL_SHARDED}"),
        f"placement.dp_replicate={_WHOLE}",
    ),
    "tp=8 × data": ("mesh.tp=8", "mesh.pp=1"),
    "pp × data": ("mesh.tp=1", "mesh.cp=1", "mesh.pp>1"),
    "pp × tp": ("mesh.pp>1", "mesh.tp>1", "mesh.cp=1"),
    "cp": ("mesh.cp>1",),
    "ep": ("mesh.ep>1",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A well-known choice that is not the best.

    `best` is its best candidate that fits, else the one with least memory. None if no candidate is
    legal, its part was not traced, or only the one with least memory fits; `why` has the reason.
    With a best, `report.selection.why_lost` explains its figures.
    """

    name: str
    best: Ranked | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which something fits, and the candidate that fits."""

    change: str
    fitting: Ranked


@dataclass(frozen=True, kw_only=True)
class PlacementRanking(Worded):
    """The result of a search, best row first; rows have exact figures and fit.

    Attributes:
        job: The job.
        objective: The figure that was to be minimized.
        ranking: The rows.
        front: Rows for which no other is both faster and smaller.
        counts: Numbers of scored candidates.
        derived: Number of exact predictions.
        unknown: The reason why times are unknown; rows are then ordered by nominal seconds.
        least: If nothing fits, the candidate that needs least memory.
        remedies: If nothing fits, changes with which something would.
        lost: Well-known choices and why they lost.
        winner: The full derivation of the best row.
        by_number: If devices were searched, the best row on each number that was tried.
        demand: The limits of the training.
        asked_margin: The requested margin, if no candidate leaves it free.
    """

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

    def to_pandas(self) -> Any:
        """Return the rows of the ranking as a pandas DataFrame, best row first.

        Raises:
            SpecError: pandas is not installed.
        """
        rows = [
            {
                "spec": row.spec.name,
                "step_seconds": row.seconds,
                "tokens_per_second": row.tokens_per_second,
                "mfu": row.mfu,
                "peak_bytes": row.peak_bytes,
                "fits": row.memory.fits,
            }
            for row in self.ranking
        ]
        return data_frame(rows, "PlacementRanking.to_pandas")

    @property
    def ranked_by(self) -> SearchGoal:
        """The figure that orders the rows on a fixed number of devices."""
        return SearchGoal.MEMORY if self.objective is SearchGoal.MEMORY else SearchGoal.TIME

    @property
    def best(self) -> Ranked | None:
        """The best row; None if nothing fits."""
        return self.ranking[0] if self.ranking else None

    @property
    def spec(self) -> Spec:
        """The best row's spec; raises SpecError if nothing fits."""
        if self.best is None:
            raise input_error("ptrain select", f"nothing fits on {self.job.devices} devices")
        return self.best.spec


def front_of(rows: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Return the rows for which no other is as fast with less memory, fastest first."""
    front: list[Ranked] = []
    for row in sorted(rows, key=lambda row: (row.nominal_seconds, row.peak_bytes)):
        if not front or row.peak_bytes < front[-1].peak_bytes:
            front.append(row)
    return tuple(front)


def _is_serial(row: Ranked) -> bool:
    """Return True if pipeline ranks compute one at a time."""
    name = row.spec.pipeline.schedule
    is_staged = row.spec.degree(Axis.PP) > 1
    return is_staged and isinstance(name, ScheduleName) and SCHEDULES[name].is_serial


def undominated(rows: Iterable[Ranked]) -> list[Ranked]:
    """Return rows without naive pipelines that another schedule of the same placement beats in
    memory.

    Rows must be sorted, best first. With no more bytes, the other schedule is no slower.
    """
    kept: list[Ranked] = []
    for row in rows:
        factors = row.spec.factors
        if not _is_serial(row) or all(
            other.spec.factors != factors or other.peak_bytes > row.peak_bytes for other in kept
        ):
            kept.append(row)
    return kept


def order_of(objective: SearchGoal, row: Ranked) -> tuple[float, ...]:
    """Return the sort key of a row for an objective.

    Rows without a time come last, ordered by nominal seconds, then by bytes copied between tiers.
    """
    if objective is SearchGoal.MEMORY:
        return False, float(row.peak_bytes), row.nominal_seconds, _is_serial(row)
    copied = 0 if row.seconds is not None else row.tiers.copied
    return row.seconds is None, row.nominal_seconds, copied, float(row.peak_bytes), _is_serial(row)
