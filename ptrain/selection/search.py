"""Search all products of choices: estimate bytes and seconds, and keep the best and the front of
memory and time.

A block of candidates shares the choices within a layer block, the pipeline, the micro-batch and the
way to keep activations; choices of the data axes vary within it. Dials that affect memory and
traffic are searched here. The size of units is chosen by a descent (`choose.neighbours`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import prod
from operator import itemgetter

from ptrain.axes.candidates import AxisChoice, apply_choices
from ptrain.facts.model import ModelFacts, ModelWork
from ptrain.plan.lower import built_in_facts
from ptrain.rates.pace import Pace, UnknownRate
from ptrain.selection.bound import (
    DataWay,
    FlowSeconds,
    PipelineFlow,
    PipelineFlows,
    WayBytes,
    WaySeconds,
    flow_of,
    levels_of,
    peak,
    representatives,
    way_bytes,
)
from ptrain.selection.job import SearchedJob
from ptrain.selection.profile import (
    Activity,
    Links,
    PassSums,
    Sizes,
    activity_of,
    clock_of,
    exchange_seconds,
    seconds_of,
    sizes_of,
)
from ptrain.selection.ranking import SLACK, TIME_SLACK, Scored, SearchCount
from ptrain.selection.space import (
    THROUGH,
    Candidate,
    Legality,
    Through,
    apart,
    batched,
    data_choices,
    degrees_over,
    inner_products,
    kept_so,
    micro_batches,
    pipelines,
    sized,
    through_of,
    ways_to_keep,
    without_experts,
)
from ptrain.selection.where import Aspect, Constraint, Where
from ptrain.spec.activations import ActivationMode
from ptrain.spec.dials import UnitSize
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import group_by_key

# Best candidates kept per placement. They differ in batches, activations and pipelines, and an
# exact derivation may reject those whose estimate is too low by up to SLACK.
_PER_PLACEMENT = 16
_BANDS = 16  # bands of memory; the fastest of each is on the estimated front


Work = Callable[[Spec], ModelWork]


def may_hold(rule: Constraint, figure: float, slack: float) -> bool:
    """Return True if the exact figure may satisfy a bound, given its estimate.

    Only upper bounds can be excluded, since estimates may be too high by `slack`.
    """
    return rule.compare not in ("<", "<=") or rule.holds_of(figure / slack)


class ScoredCut:
    """The estimates for layer blocks with some choices within a block, cached.

    All choices that differ only in expert parallelism share one. `spec` has only axes within a
    block, and no experts.
    """

    def __init__(self, spec: Spec, work: Work, pace: Pace) -> None:
        self.spec, self.work, self.clock = spec, work, clock_of(spec, pace)
        self.activity, self.sums = cache(self._activity), cache(self._sums)

    def _activity(self, kept: ActivationMode) -> Activity:
        activity = activity_of(self.spec, kept)
        assert activity is not None, "blocks whose peaks are predicted"
        return activity

    def _sums(self, kept: ActivationMode, micro: int) -> PassSums | None:
        """Return the seconds of the passes; None if computation or rates are unknown."""
        spec = kept_so(batched(self.spec, micro, 1), kept)
        try:
            return seconds_of(spec, self.work(spec), self.clock)
        except UnknownRate:
            return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCut:
    """A choice of the axes within a block.

    Attributes:
        ranks: Number of ranks of these axes together.
        within: The choices.
        placed: Spec with these choices only.
        scored: Its estimates.
        sizes: Parameter counts of a rank.
        shared: Number of its ranks that also share states of the data axes.
    """

    ranks: int
    within: tuple[AxisChoice, ...]
    placed: Spec
    scored: ScoredCut
    sizes: Sizes
    shared: int


@dataclass(slots=True, eq=False)
class DataRow:
    """A choice of the data axes with degrees, bytes and seconds, for one choice within a block: a
    placement.

    `best` are its candidates that may fit, best first. `least` and `smallest` give the smallest
    peak and the block of the candidate that has it.
    """

    way: DataWay
    degrees: tuple[int, ...]
    memory: WayBytes
    seconds: WaySeconds
    best: list[Entry] = field(default_factory=list)
    least: float = float("inf")
    smallest: CandidateBlock | None = None

    @property
    def tightest(self) -> Scored:
        """The candidate with the smallest peak."""
        assert self.smallest is not None, "a placement that a run came to"
        return self.smallest.scored(self)


@dataclass(frozen=True, kw_only=True)
class CandidateBlock:
    """Candidates that differ only in the data axes.

    `groups` has the rows by their bytes, and `timed` returns the seconds that they share, or None
    if these are unknown.
    """

    cut: BlockCut
    flow: PipelineFlow
    groups: Mapping[WayBytes, Sequence[DataRow]]
    micro: int
    kept: ActivationMode
    levels: Sequence[tuple[float, ...]]
    timed: Callable[[], FlowSeconds | None]

    @cached_property
    def flow_seconds(self) -> FlowSeconds | None:
        """The seconds that all candidates share; None if unknown."""
        return self.timed()

    @property
    def rows(self) -> list[DataRow]:
        """The rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]

    def peak(self, row: DataRow) -> float:
        """Return the estimated peak of a row in bytes."""
        return max([peak(level, row.memory) for level in self.levels])

    def step(self, row: DataRow) -> float:
        """Return the estimated step time of a row in seconds; infinite if unknown."""
        return float("inf") if self.flow_seconds is None else row.seconds.step(self.flow_seconds)

    def candidate(self, row: DataRow) -> Candidate:
        """Return the candidate of a row."""
        return Candidate(
            within=self.cut.within,
            pipeline=self.flow.choice,
            data=sized(row.way.choice, row.degrees),
            micro=self.micro,
            kept=self.kept,
        )

    def scored(self, row: DataRow) -> Scored:
        """Return the candidate of a row with its estimates."""
        return Scored(candidate=self.candidate(row), peak=self.peak(row), seconds=self.step(row))


Entry = tuple[float, float, int, CandidateBlock, DataRow]


class SearchResult:
    """The best candidates of each placement, with the `counts` of all.

    Attributes:
        placements: All placements.
    """

    def __init__(self, job: SearchedJob, *, by_memory: bool) -> None:
        self.job, self.by_memory, self.counts = job, by_memory, SearchCount()
        self.placements: list[DataRow] = []
        self.limit = job.room * SLACK

    def take(self, block: CandidateBlock) -> None:
        """Add the candidates of a block."""
        others, saved = block.levels[0][0], min([level[4] for level in block.levels])
        for memory, rows in block.groups.items():
            self.counts.scored += len(rows)
            # Most groups are too large by their states and the activations of the rank that saves
            # least, and need no peak per rank.
            floor = memory.lives[0] * others + saved
            if floor > self.limit and floor >= rows[0].least:
                continue
            size = block.peak(rows[0])
            for row in rows:
                if row.smallest is None:
                    self.placements.append(row)
                if size < row.least:
                    row.least, row.smallest = size, block
                if size <= self.limit:
                    self._fit(block, row, size)

    def _fit(self, block: CandidateBlock, row: DataRow, size: float) -> None:
        """Add a candidate that may fit, if it satisfies constraints on figures."""
        counts, best = self.counts, row.best
        seconds = block.step(row)
        for name, figure, slack in (("memory", size, SLACK), ("time", seconds, TIME_SLACK)):
            if not all(may_hold(rule, figure, slack) for rule in self.job.where.bounds(name)):
                return
        counts.fitting += size <= self.job.room
        counts.untimed += seconds == float("inf")
        first, second = (size, seconds) if self.by_memory else (seconds, size)
        if len(best) < _PER_PLACEMENT or first < best[-1][0]:
            # The running count makes keys unique, so that ties never compare blocks, which have no
            # order.
            insort(best, (first, second, counts.scored + counts.fitting, block, row))
            del best[_PER_PLACEMENT:]

    @cached_property
    def entries(self) -> list[Entry]:
        """The best candidates by the objective, best first; read once all blocks are added."""
        return sorted(
            (entry for row in self.placements for entry in row.best), key=itemgetter(0, 1, 2)
        )

    @property
    def best(self) -> Iterator[Scored]:
        """The candidates, best first."""
        return (block.scored(row) for *_, block, row in self.entries)

    @property
    def least(self) -> Scored | None:
        """The candidate with the smallest peak."""
        smallest = min(self.placements, key=lambda row: row.least, default=None)
        return None if smallest is None else smallest.tightest

    @cached_property
    def front(self) -> list[Scored]:
        """The fastest candidate of each band of memory."""
        fastest: dict[int, tuple[float, CandidateBlock, DataRow]] = {}
        for first, second, _, block, row in self.entries:
            seconds, size = (second, first) if self.by_memory else (first, second)
            band = int(size / self.limit * _BANDS)
            if band not in fastest or seconds < fastest[band][0]:
                fastest[band] = seconds, block, row
        return [block.scored(row) for _, block, row in fastest.values()]


class Search:
    """The loops over all choices, with cached results.

    Args:
        job: The job.
        work: Returns the computation of a spec per micro-batch.
        pace: Rates of the machine.
        is_nominal: True if the rates are declared, not measured.
        by_memory: True to minimize memory instead of time.
    """

    def __init__(
        self,
        job: SearchedJob,
        work: Work,
        pace: Pace,
        *,
        is_nominal: bool = False,
        by_memory: bool = False,
    ) -> None:
        self.job, self.work, self.pace, self.by_memory = job, work, pace, by_memory
        self.facts: ModelFacts = built_in_facts(replace(job.sized, unit=UnitSize()))
        self.legality = Legality(job.sized, job.scored, job.written)
        self.links = Links(job.scored, pace, job.devices, is_nominal=is_nominal)
        self.flows = PipelineFlows(job.sized, self.facts, self.links)
        self.choices = data_choices(job.scored, job.written)
        self.ways_to_keep = job.written.kept or ways_to_keep(job.written.offload_tier)
        self.cut, self.sums = cache(self._cut), cache(self._sums)
        self.scored: dict[tuple[object, ...], ScoredCut] = {}
        self.running, self.rows = cache(self._running), cache(self._rows)
        self.is_whole = cache(self.legality.within)
        self.ways: dict[tuple[object, ...], list[DataWay]] = {}

    def run(self, where: Where) -> SearchResult:
        """Return the best legal candidates that satisfy constraints."""
        self._obey(where)
        self.rows.cache_clear()  # rows hold the best candidates of the previous run
        result = SearchResult(self.job, by_memory=self.by_memory)
        for block in self.blocks():
            result.take(block)
        return result

    def has(self, where: Where) -> bool:
        """Return True if a legal candidate satisfies constraints; later runs are not affected."""
        own = self.job.where
        self._obey(where)
        is_there = next(self.blocks(), None) is not None
        self._obey(own)
        return is_there

    def _obey(self, where: Where) -> None:
        """Set the constraints, and clear caches that depend on them."""
        if where != self.job.where:
            self.job = replace(self.job, where=where)
            self.running.cache_clear()
            self.rows.cache_clear()

    def blocks(self) -> Iterator[CandidateBlock]:
        """Yield all blocks of candidates that satisfy constraints."""
        job, base, where = self.job, self.job.scored, self.job.where
        for ranks, within in inner_products(job.sized, job.devices, job.written):
            cut = self.cut(ranks, within)
            if not where.admits(Aspect.WITHIN, cut.placed):
                continue
            for left, _ in pipelines(base, job.devices // ranks, job.written):
                samples = left * cut.placed.data_degree
                for micro, number in apart(micro_batches(base, samples)):
                    if where.admits(Aspect.BATCH, batched(base, micro, number)):
                        yield from self._of_batch(cut, left, micro, number)

    def _of_batch(
        self, cut: BlockCut, left: int, micro: int, number: int
    ) -> Iterator[CandidateBlock]:
        """Yield the blocks for one choice within a block and one micro-batch."""
        running = self.running(self.job.devices // cut.ranks, left, number)
        for kept in self.kept if running else ():
            for through, flows in running.items():
                if self.is_whole(cut.within, kept, through, several=micro > 1):
                    groups = self.rows(cut, left, through, number > 1)
                    for flow in flows if groups else ():
                        yield self._block(cut, flow, groups, micro, number, kept)

    @property
    def kept(self) -> list[ActivationMode]:
        """The ways to keep activations that satisfy constraints."""
        base, where = self.job.scored, self.job.where
        ways = self.ways_to_keep
        return [kept for kept in ways if where.admits(Aspect.KEPT, kept_so(base, kept))]

    def _running(self, ranks: int, left: int, number: int) -> dict[Through, list[PipelineFlow]]:
        """Return the legal pipelines that leave `left` ranks to the data axes, by their effect on
        others."""
        base, written = self.job.scored, self.job.written
        choices = next(some for rest, some in pipelines(base, ranks, written) if rest == left)
        return group_by_key(
            (through_of(choice), flow_of(base, choice))
            for choice in choices
            if self.job.where.admits(Aspect.PIPELINE, apply_choices(base, (choice,)))
            and self.legality.pipeline(choice, number)
        )

    def _block(
        self,
        cut: BlockCut,
        flow: PipelineFlow,
        groups: Mapping[WayBytes, Sequence[DataRow]],
        micro: int,
        number: int,
        kept: ActivationMode,
    ) -> CandidateBlock:
        """Return a block of candidates with its memory figures."""
        levels = levels_of(
            self.flows.shares(flow, number), cut.sizes, cut.scored.activity(kept), micro, number
        )
        return CandidateBlock(
            cut=cut,
            flow=flow,
            groups=groups,
            micro=micro,
            kept=kept,
            levels=list(levels),
            timed=partial(self._flow_seconds, cut, flow, micro, number, kept),
        )

    def _flow_seconds(
        self, cut: BlockCut, flow: PipelineFlow, micro: int, number: int, kept: ActivationMode
    ) -> FlowSeconds | None:
        """Return the seconds that a block's candidates share; None if unknown."""
        sums = self.sums(cut, kept, micro)
        return self.flows.seconds(flow, number, sums, cut.sizes) if sums else None

    def score(self, candidate: Candidate) -> Scored:
        """Return the estimates of one candidate."""
        base, through = self.job.scored, through_of(candidate.pipeline)
        ranks = prod(f.degree for choice in candidate.within for f in choice.factors)
        cut = self.cut(ranks, candidate.within)
        way = DataWay(base, candidate.data, (THROUGH[through], *candidate.within))
        own = tuple(factor.degree for factor in candidate.data.factors)
        number = candidate.spec(self.job.sized).batch.accumulate
        row = self._row(cut, way, own)
        block = self._block(
            cut,
            flow_of(base, candidate.pipeline),
            {row.memory: [row]},
            candidate.micro,
            number,
            candidate.kept,
        )
        return Scored(candidate=candidate, peak=block.peak(row), seconds=block.step(row))

    def _cut(self, ranks: int, within: tuple[AxisChoice, ...]) -> BlockCut:
        """Return a choice of the axes within a block, with its estimates."""
        placed = apply_choices(self.job.sized, within)
        # Choices of expert parallelism have the same stand-in without experts, so that they share
        # its estimates.
        spec = without_experts(apply_choices(self.job.scored, within))
        key = spec.factors, spec.context, spec.tensor
        if key not in self.scored:
            self.scored[key] = ScoredCut(spec, self.work, self.pace)
        return BlockCut(
            ranks=ranks,
            within=within,
            placed=placed,
            scored=self.scored[key],
            sizes=sizes_of(placed, self.facts),
            shared=prod(choice.num_sharing_ranks for choice in within),
        )

    def _sums(self, cut: BlockCut, kept: ActivationMode, micro: int) -> PassSums | None:
        """Return the seconds of the passes, with the exchange of experts' rows."""
        if (sums := cut.scored.sums(kept, micro)) is None:
            return None
        there, back = exchange_seconds(batched(cut.placed, micro, 1), self.pace, kept)
        forward, backward, host = sums.block
        return replace(sums, block=(forward + there, backward + back, host))

    def _rows(
        self, cut: BlockCut, left: int, through: Through, many: bool
    ) -> dict[WayBytes, list[DataRow]]:
        """Return the legal choices of the data axes for one choice within a block, by bytes."""
        rows: list[DataRow] = []
        base, where = self.job.scored, self.job.where
        for axes, choices in self.choices.items():
            ways = [
                way
                for way in self._ways(axes, cut, through, many=many)
                if where.admits(Aspect.DATA, way.spec)
            ]
            for degrees in degrees_over(len(axes), left * cut.shared) if ways else ():
                if degrees and degrees[-1] % cut.shared:
                    continue  # these ranks belong to axes that share the innermost axis's states
                own = (*degrees[:-1], *(last // cut.shared for last in degrees[-1:]))
                if where.admits(Aspect.RANKS, apply_choices(base, (sized(choices[0], own),))):
                    rows += (self._row(cut, way, own) for way in representatives(ways))
        return group_by_key((row.memory, row) for row in rows)

    def _row(self, cut: BlockCut, way: DataWay, own: tuple[int, ...]) -> DataRow:
        """Return a row with its bytes and seconds."""
        degrees = (*own[:-1], *(last * cut.shared for last in own[-1:]))
        memory = way_bytes(self.job.scored, way, degrees, cut.sizes)
        within = cut.ranks // cut.shared
        return DataRow(way, own, memory, WaySeconds(self.links, way, degrees, cut.sizes, within))

    def _ways(
        self, axes: tuple[Axis, ...], cut: BlockCut, through: Through, *, many: bool
    ) -> list[DataWay]:
        """Return the legal choices on these axes, for any degrees."""
        key = (axes, tuple(f.axis for c in cut.within for f in c.factors), through, many)
        if key not in self.ways:
            beside = (THROUGH[through], *cut.within)
            legal = self.legality.data(self.choices[axes], cut.within, through, many=many)
            self.ways[key] = [DataWay(self.job.scored, choice, beside) for choice in legal]
        return self.ways[key]
