"""The input and the output of a search, and the exact figures of a candidate as one row of a
ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from ptrain.axes.candidates import NOTHING, AxisChoice, Written, chosen
from ptrain.cost import Collective, Estimate, Phase, StepTime, Traffic
from ptrain.derivation.interconnect import Network
from ptrain.derivation.throughput import Throughput, throughput
from ptrain.facts.model import ModelFacts, ModelWork
from ptrain.rates.pace import Pace
from ptrain.selection.fit import Fit, fit
from ptrain.selection.space import Candidate, without_experts
from ptrain.selection.where import Where
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import grouped

# How far above what is exact the estimates of bytes and of seconds may be: what is so near a
# bound is derived, and what is exact decides. `benchmarks/selection.py` fails where one of those
# that it draws is further above.
SLACK, TIME_SLACK = 1.1, 1.15


class SearchGoal(StrEnum):
    """What the best candidate has least of."""

    TIME = "time"
    MEMORY = "memory"
    DEVICES = "devices"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate, with its estimated bytes and seconds."""

    candidate: Candidate
    peak: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class SearchCount:
    """How many candidates were scored, and how many of these fit by the estimate (`untimed`: may,
    and nobody knows their time)."""

    scored: int = 0
    fitting: int = 0
    untimed: int = 0


Work = Callable[[Spec], ModelWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """What is searched: a job like `base` on so many devices, on a machine with this pace, whose
    micro-batches' work `work` tells. `is_nominal`: nobody measured the pace. `own`: the job's shape
    with experts, where the base's stands in for it. `room`: the bytes of a device that a
    peak may fill; `is_stand_in`: the base's shape stands in for one that is traced."""

    base: Spec
    devices: int
    pace: Pace
    work: Work
    is_nominal: bool = False
    objective: SearchGoal = SearchGoal.TIME
    where: Where = field(default_factory=Where)
    written: Written = NOTHING
    own: ModelShape | None = None
    room: float = inf
    is_stand_in: bool = False

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


_BILLION = 10**9
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved:
    """Bytes of a step that a rank sends, the one that sends most, as the ranks of its groups do on
    average: what crosses nodes, and what stays within one; and that it copies between its own
    tiers."""

    between: int
    within: int
    copied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate with its exact figures. `closed` are those by which it was chosen. `seconds`
    None: nobody knows them, and `why_untimed` says why. `assumed`: the routing of tokens with which
    the peak holds; "" where it depends on none. `alike`: how many others that were derived
    have the same figures, to the byte and to the second."""

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
        """Return the time of a step."""
        return None if self.step is None else self.step.seconds

    @property
    def nominal_seconds(self) -> float:
        """Return the time of a step, of which nobody knows it the estimate."""
        return self.closed.seconds if self.seconds is None else self.seconds

    @property
    def peak_bytes(self) -> int:
        return self.memory.least_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens of a step over its time, of all ranks."""
        return None if self.throughput is None else self.throughput.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """Return what part of the devices' operations the model's are, attention whole
        (`derivation.throughput`), as `predict` says it first."""
        return None if self.throughput is None else self.throughput.mfu_full

    @property
    def figures(self) -> tuple[object, ...]:
        """Return what it is ranked and shown by."""
        return self.nominal_seconds, self.peak_bytes, self.tiers

    @property
    def price(self) -> float | None:
        """Return the money for a billion tokens, where the cluster has a price."""
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
        memory=fit(spec, exact, takes_unclaimed=spec.has_token_slices, takes_assumed=True),
        assumed=exact.assumed.get("peak", ""),
        tiers=_tiers(spec, exact),
        throughput=throughput(spec, facts, exact.step) if exact.step else None,
    )


def folded(rows: Iterable[Ranked]) -> list[Ranked]:
    """Return rows of the same figures as one, that which says least beside the defaults: what the
    others say changes nothing."""
    by_figures = grouped((row.figures, row) for row in rows)
    return [replace(min(alike, key=_said), alike=len(alike) - 1) for alike in by_figures.values()]


def _said(row: Ranked) -> int:
    """How many dials of the data axes are not the default."""
    spec = row.spec
    dials = spec.overlap is not None, spec.prefetch is not None, spec.unit is not None
    return sum((*dials, spec.sync != SyncPolicy()))


def _tiers(spec: Spec, exact: Estimate) -> BytesMoved:
    network = Network(spec)
    pairs = [_sent(network, rows) for rows in exact.by_rank()]
    between, within = max(pairs, key=lambda pair: (pair[0], pair[1]))
    return BytesMoved(between=between, within=within, copied=exact.copied_bytes())


def _sent(network: Network, rows: Iterable[Traffic]) -> tuple[int, int]:
    sums = [0.0, 0.0]
    for row in rows:
        key = row.key
        if key.phase is Phase.SETUP or not row.sent_bytes or not key.axes:
            continue
        if key.collective is Collective.SEND:
            share = float(network.pair(Axis(key.axes[0])) > 1)
        else:
            ranks, nodes = network.group(network.ordered(tuple(map(Axis, key.axes))))
            share = crossing(key.collective, ranks, nodes)
        sums[0] += share * row.sent_bytes
        sums[1] += (1 - share) * row.sent_bytes
    return round(sums[0]), round(sums[1])


def crossing(collective: Collective, ranks: int, nodes: int) -> float:
    """Which part of what a group sends crosses nodes: of a ring one link of each node does, of an
    exchange what is for the ranks of other nodes."""
    if nodes == 1:
        return 0.0
    if collective is Collective.ALL_TO_ALL:
        return (ranks - ranks / nodes) / (ranks - 1)
    return nodes / ranks


def on_more(spec: Spec, devices: int) -> Spec:
    """Return the job on a cluster of at least so many devices."""
    cluster = spec.cluster
    if cluster is None or cluster.devices >= devices:
        return spec
    return replace(spec, cluster=replace(cluster, devices=devices))
