"""Search every legal product of choices: estimate its bytes and seconds and keep the best, and the
front of memory and time.

One block of candidates shares the cut of the model's blocks, the flow, the micro-batch and the way
to keep activations; the choices of the data axes vary within it. Of dials those are searched that
decide what fits and what moves; what is gathered together a descent chooses (`descent`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.candidates import units_of
from ptrain.cost import State
from ptrain.derivation.clock import Clock
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import own_facts
from ptrain.rates.pace import UnknownRate
from ptrain.selection.bound import (
    FlowSeconds,
    RankLevels,
    WayBytes,
    WaySeconds,
    peak_of,
    way_bytes,
)
from ptrain.selection.flows import (
    InnerCut,
    PipelineFlow,
    PipelineFlows,
    flow_of,
    without_shared,
)
from ptrain.selection.profile import Activity, Links, Seconds, clock_of, seconds_of, sizes_of
from ptrain.selection.quantities import Aspect
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
    through_of,
    ways_to_keep,
)
from ptrain.selection.task import (
    SLACK,
    TIME_SLACK,
    Scored,
    SearchCount,
    SearchGoal,
    SearchResult,
    SearchTask,
)
from ptrain.selection.ways import (
    DataWay,
    UnitSeconds,
    representatives,
    unit_seconds,
    ways_of,
)
from ptrain.selection.where import Constraint, Where
from ptrain.spec.activations import Kept
from ptrain.spec.dials import UnitSize
from ptrain.spec.placement import Axis
from ptrain.units import grouped

_KEPT = 1024  # candidates that are remembered between blocks
_BANDS = 24  # of memory, the fastest of each of which is remembered for a front


def may_hold(rule: Constraint, figure: float, slack: float) -> bool:
    """Return whether what is exact may obey a bound from above by its estimate; of any other bound
    that cannot tell."""
    return rule.compare not in ("<", "<=") or rule.holds_of(figure / slack)


@dataclass(frozen=True, slots=True)
class DataRow:
    """A choice of the data axes with its degrees, and its place among those of other bytes."""

    way: DataWay
    degrees: tuple[int, ...]
    memory: int
    seconds: WaySeconds


@dataclass(frozen=True, slots=True)
class DataTable:
    """The choices of the data axes for some ranks, and their bytes, which several share."""

    rows: Sequence[DataRow]
    memories: Sequence[WayBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBlock:
    """Candidates that differ in their choices of the data axes alone: `peaks` by their bytes,
    `seconds` of their flow, None where nobody knows them."""

    within: tuple[AxisChoice, ...]
    flow: PipelineFlow
    table: DataTable
    micro: int
    kept: Kept
    peaks: Sequence[float]
    seconds: FlowSeconds | None

    def __len__(self) -> int:
        return len(self.table.rows)

    def step(self, row: DataRow) -> float:
        """Return the seconds of a row."""
        return float("inf") if self.seconds is None else row.seconds.step(self.seconds)

    def candidate(self, place: int) -> Candidate:
        """Return one of them."""
        row = self.table.rows[place]
        return Candidate(
            within=self.within,
            pipeline=self.flow.choice,
            data=row.way.sized(row.degrees),
            micro=self.micro,
            kept=self.kept,
        )

    def scored(self, place: int) -> Scored:
        """Return one of them with its figures."""
        row = self.table.rows[place]
        candidate, peak = self.candidate(place), self.peaks[row.memory]
        return Scored(candidate=candidate, peak=peak, seconds=self.step(row))


class Keeper:
    """Remembers the best of each block, and forgets what others are better than."""

    def __init__(self, task: SearchTask) -> None:
        self.task, self.room, self.counts = task, task.room, SearchCount()
        self.best: list[tuple[float, float, int, CandidateBlock, int]] = []
        self.bound = float("inf")
        self.front: dict[int, tuple[float, CandidateBlock, int]] = {}
        self.rules = [
            (rule, name == "time", slack)
            for name, slack in (("memory", SLACK), ("time", TIME_SLACK))
            for rule in task.where.bounds(name)
        ]

    def take(self, block: CandidateBlock) -> None:
        """Take in a block."""
        task, counts, room = self.task, self.counts, self.room
        counts.scored += len(block)
        least = min(block.peaks)
        if counts.least is None or least < counts.least[0]:
            at = block.peaks.index(least)
            places = (n for n, row in enumerate(block.table.rows) if row.memory == at)
            counts.least = (least, block.candidate(next(places)))
        if least > room * SLACK:
            return
        by_memory = task.objective is SearchGoal.MEMORY
        for place, row in enumerate(block.table.rows):
            if (peak := block.peaks[row.memory]) > room * SLACK:
                continue
            seconds = block.step(row)
            figures = (peak, seconds)
            if self.rules and not self._may_hold(figures):
                continue
            counts.fitting += peak <= room
            counts.untimed += block.seconds is None
            self._band(peak, seconds, block, place)
            key, tie = figures if by_memory else figures[::-1]
            if key <= self.bound:
                self.best.append((key, tie, len(self.best), block, place))
        if len(self.best) > 4 * _KEPT:
            self._forget()

    def _may_hold(self, figures: tuple[float, float]) -> bool:
        return all(may_hold(rule, figures[at], slack) for rule, at, slack in self.rules)

    def _band(self, peak: float, seconds: float, block: CandidateBlock, place: int) -> None:
        """Remember the fastest of each band of memory."""
        if self.room == float("inf") or seconds == float("inf"):
            return
        band = int(peak / (self.room * SLACK) * _BANDS)
        if band not in self.front or seconds < self.front[band][0]:
            self.front[band] = (seconds, block, place)

    def _forget(self) -> None:
        self.best.sort(key=itemgetter(0, 1, 2))
        del self.best[_KEPT:]
        self.bound = self.best[-1][0] if len(self.best) == _KEPT else float("inf")

    def result(self) -> SearchResult:
        """Return what is remembered."""
        self._forget()
        return SearchResult(
            best=tuple(block.scored(place) for *_, block, place in self.best),
            front=tuple(block.scored(place) for _, (_, block, place) in sorted(self.front.items())),
            counts=self.counts,
        )


class Search:
    """Loops over all that a block has in common, and asks everything once."""

    def __init__(self, task: SearchTask) -> None:
        self.task = task
        self.facts: ModelFacts = own_facts(replace(task.placed, unit=UnitSize()))
        self.legality = Legality(task.placed, task.written, task.scored)
        self.links = Links(task.base, task.pace, is_nominal=task.is_nominal)
        self.flows = PipelineFlows(task.placed, self.facts, self.links, task.devices)
        self.choices = data_choices(task.base, task.written)
        self.units = units_of(task.written)
        self.ways_to_keep = task.written.kept or ways_to_keep(task.written.away)
        self.inners: dict[tuple[AxisChoice, ...], InnerCut] = {}
        self.too_large: list[tuple[InnerCut, int, Through, Kept, int]] = []
        # by numbers and identities (of `ways_to_keep`): values of a spec are slow to compare
        self.staged: dict[int, list[PipelineFlow]] = {}
        self.running: dict[tuple[int, int], dict[Through, list[PipelineFlow]]] = {}
        self.cuttable: dict[tuple[int, int, Through, bool], bool] = {}
        self.gathered: dict[tuple[int, int], frozenset[UnitSize | None]] = {}
        self.ways: dict[tuple[object, ...], list[DataWay]] = {}
        self.legal: dict[tuple[object, ...], list[DataWay]] = {}
        self.tables: dict[tuple[object, ...], DataTable] = {}
        self.moved: dict[tuple[object, ...], UnitSeconds] = {}
        self.activities: dict[tuple[object, ...], Activity] = {}
        self.clocks: dict[int, Clock] = {}
        self.seconds: dict[tuple[object, ...], Seconds | None] = {}
        self.least = float("inf")  # bytes, of all candidates so far

    def run(self, where: Where) -> SearchResult:
        """Return the best of all legal candidates that obey constraints."""
        self._obey(where)
        keeper = Keeper(self.task)
        for block in self.blocks():
            keeper.take(block)
        return keeper.result()

    def scores(self, where: Where) -> bool:
        """Return whether any legal candidate that obeys constraints is scored."""
        self._obey(where)
        return next(self.blocks(), None) is not None

    def has(self, where: Where) -> bool:
        """Return whether any legal candidate obeys constraints, too large as it may be."""
        return self.scores(where) or self.has_too_large

    def _obey(self, where: Where) -> None:
        self.too_large.clear()
        if where != self.task.where:
            self.task = replace(self.task, where=where)
            for kept in (self.staged, self.running, self.gathered, self.ways, self.tables):
                kept.clear()

    def blocks(self) -> Iterator[CandidateBlock]:
        """Yield the space, a block at a time."""
        task, self.least = self.task, float("inf")
        for inner in self._inners():
            for left, choices in pipelines(task.base, task.devices // inner.ranks, task.written):
                stages = task.devices // inner.ranks // left
                if stages not in self.staged:
                    self.staged[stages] = self._flows(choices)
                batches = self._batches(left * inner.sampling) if self.staged[stages] else ()
                for micro, number in apart(batches):
                    yield from self._of_batch(inner, left, stages, micro, number)

    def _inners(self) -> Iterator[InnerCut]:
        """The ways to cut blocks that obey constraints."""
        task = self.task
        products = inner_products(task.placed, task.devices, task.written)
        for number, (ranks, within) in enumerate(products):
            specs = task.with_choices(within)
            if task.where.admits(Aspect.WITHIN, specs[0]):
                if within not in self.inners:
                    sizes = sizes_of(specs[0], self.facts)
                    self.inners[within] = InnerCut.of(number, ranks, within, specs, sizes)
                yield self.inners[within]

    def _batches(self, data_ranks: int) -> Iterator[tuple[int, int]]:
        """The micro-batches that obey constraints."""
        base, where = self.task.base, self.task.where
        yield from (
            (micro, number)
            for micro, number in micro_batches(base, data_ranks)
            if where.admits(Aspect.BATCH, batched(base, micro, number))
        )

    def _flows(self, choices: Sequence[AxisChoice]) -> list[PipelineFlow]:
        base, where = self.task.base, self.task.where
        return [
            flow_of(base, choice)
            for choice in choices
            if where.admits(Aspect.PIPELINE, chosen(base, (choice,)))
        ]

    def score(self, candidate: Candidate) -> Scored:
        """Return the figures of one candidate, whose blocks are cut as others were."""
        inner, through = self.inners[candidate.within], through_of(candidate.pipeline)
        beside, micro, kept = (THROUGH[through], *inner.within), candidate.micro, candidate.kept
        (way,) = ways_of(self.task.base, [candidate.data], beside)
        own = tuple(factor.degree for factor in candidate.data.factors)
        degrees = (*own[:-1], *(last * inner.shared for last in own[-1:]))
        number = candidate.spec(self.task.placed).batch.accumulate
        memories: dict[WayBytes, int] = {}
        row = self._row(inner, way, degrees, own, memories, many=number > 1)
        block = self._block(
            inner,
            flow_of(self.task.base, candidate.pipeline),
            DataTable([row], list(memories)),
            self._activity(inner, micro, kept),
            micro,
            number,
            kept,
        )
        return Scored(candidate=candidate, peak=block.peaks[0], seconds=block.step(row))

    def _of_batch(
        self, inner: InnerCut, left: int, stages: int, micro: int, number: int
    ) -> Iterator[CandidateBlock]:
        running, where = self._running(stages, number), self.task.where
        room = self.task.room * SLACK
        for kept in self.ways_to_keep:
            if where.asks(Aspect.KEPT) and not where.admits(Aspect.KEPT, kept_so(inner.spec, kept)):
                continue
            for through, flows in running.items():
                if not self._is_legal(inner, kept, through, several=micro > 1):
                    continue
                activity = self._activity(inner, micro, kept)
                if activity.least > room:
                    self.too_large.append((inner, left, through, kept, number))
                    continue
                table = self._legal(inner, left, through, kept, number)
                if table.rows:
                    for flow in flows:
                        yield self._block(inner, flow, table, activity, micro, number, kept)

    def _block(
        self,
        inner: InnerCut,
        flow: PipelineFlow,
        table: DataTable,
        activity: Activity,
        micro: int,
        number: int,
        kept: Kept,
    ) -> CandidateBlock:
        shares = self.flows.shares(flow, number)
        levels = [RankLevels(share, inner.sizes, activity) for share in shares]
        # until something fits the least of all is looked for
        limit = max(self.task.room * SLACK, self.least)
        peaks = [peak_of(levels, memory, limit, is_many=number > 1) for memory in table.memories]
        self.least = min(self.least, *peaks)
        seconds = None
        if min(peaks) <= self.task.room * SLACK:
            work = self._seconds(inner, micro, kept)
            if work is not None:
                seconds = self.flows.seconds(flow, number, work, inner.sizes, activity.hidden)
        return CandidateBlock(
            within=inner.within,
            flow=flow,
            table=table,
            micro=micro,
            kept=kept,
            peaks=peaks,
            seconds=seconds,
        )

    def _running(self, stages: int, number: int) -> dict[Through, list[PipelineFlow]]:
        """The flows over so many ranks that take so many micro-batches."""
        key = (stages, number)
        if key not in self.running:
            self.running[key] = grouped(
                (through_of(flow.choice), flow)
                for flow in self.staged[stages]
                if self.legality.pipeline(flow.choice, number)
            )
        return self.running[key]

    def _is_legal(self, inner: InnerCut, kept: Kept, through: Through, *, several: bool) -> bool:
        """Whether blocks that are cut and kept so may be in such a flow, of one sample or
        several."""
        key = (inner.number, id(kept), through, several)
        if key not in self.cuttable:
            self.cuttable[key] = self.legality.within(inner.within, kept, through, several=several)
        return self.cuttable[key]

    @property
    def has_too_large(self) -> bool:
        """Return whether there are legal candidates that are not scored, for the activations of a
        micro-batch of theirs take more than a device has, whatever their states are."""
        return any(self._legal(*where).rows for where in self.too_large)

    def _activity(self, inner: InnerCut, micro: int, kept: Kept) -> Activity:
        """Sizes grow with the samples from two on; one alone saves less."""
        least = min(micro, 2)
        key = (inner.number, micro, id(kept))
        if key not in self.activities and micro > least:
            self.activities[key] = self._activity(inner, least, kept).of_samples(micro, least)
        elif key not in self.activities:
            self.activities[key] = inner.activity(least, kept, self.task.own)
        return self.activities[key]

    def _seconds(self, inner: InnerCut, micro: int, kept: Kept) -> Seconds | None:
        """None where nobody knows what is computed, or how long that takes."""
        key = (inner.number, micro, id(kept))
        if key not in self.seconds:
            spec = kept_so(batched(inner.spec, micro, 1), kept)
            try:
                work, moved = self.task.work(spec), self._activity(inner, micro, kept).moved
                if inner.number not in self.clocks:
                    self.clocks[inner.number] = clock_of(inner.spec, self.task.pace)
                seconds = seconds_of(
                    spec, work, self.clocks[inner.number], moved, is_issued=self.links.is_issued
                )
                self.seconds[key] = seconds.after(*inner.waits(micro, kept, self.task))
            except UnknownRate:
                self.seconds[key] = None
        return self.seconds[key]

    def _legal(
        self, inner: InnerCut, left: int, through: Through, kept: Kept, number: int
    ) -> DataTable:
        """The choices of the data axes that are legal with so many micro-batches."""
        key = (inner.number, id(kept))
        if key not in self.gathered:
            self.gathered[key] = frozenset(
                unit for unit in self.units if self.legality.unit(inner.within, unit, kept)
            )
        return self._table(inner, left, through, self.gathered[key], many=number > 1)

    def _table(
        self,
        inner: InnerCut,
        left: int,
        through: Through,
        units: frozenset[UnitSize | None],
        *,
        many: bool,
    ) -> DataTable:
        """The legal choices of the data axes beside others."""
        key = (inner.key, left, through, units, many)
        if key not in self.tables:
            memories: dict[WayBytes, int] = {}
            rows = [
                self._row(inner, way, degrees, own, memories, many=many)
                for axes in self.choices
                for degrees in degrees_over(len(axes), left * inner.shared)
                if (own := without_shared(degrees, inner.shared)) is not None
                and self._are_admitted(axes, own)
                for way in representatives(
                    way
                    for way in self._ways(axes, inner, through, many=many)
                    if way.said_unit in units
                    and self._is_cut_evenly(inner, way.row_shards(degrees))
                )
            ]
            self.tables[key] = DataTable(rows, list(memories))
        return self.tables[key]

    def _row(
        self,
        inner: InnerCut,
        way: DataWay,
        degrees: tuple[int, ...],
        own: tuple[int, ...],
        memories: dict[WayBytes, int],
        *,
        many: bool,
    ) -> DataRow:
        sizes, key = inner.sizes, (way.moved, way.is_late, degrees, inner.key)
        if key not in self.moved:
            within = inner.ranks // inner.shared
            self.moved[key] = unit_seconds(self.links, way, degrees, sizes, within)
        unit = self.moved[key]
        bytes_of = way_bytes(self.task.base, way, degrees, sizes, unit.largest, is_many=many)
        memory = memories.setdefault(bytes_of, len(memories))
        parts = way.parts(State.OPTIMIZER, degrees)
        seconds = WaySeconds(self.links, way, degrees, unit, len(sizes.tensors), parts)
        return DataRow(way, own, memory, seconds)

    def _is_cut_evenly(self, inner: InnerCut, shards: int) -> bool:
        return not inner.shape or self.legality.shards(inner.within, shards)

    def _are_admitted(self, axes: tuple[Axis, ...], degrees: tuple[int, ...]) -> bool:
        """Whether degrees obey what is asked of ranks, whatever is done with them."""
        if (first := next(iter(self.choices[axes]), None)) is None:
            return False
        factors = zip(first.factors, degrees, strict=True)
        sized = replace(first, factors=tuple(f._replace(degree=d) for f, d in factors))
        return self.task.where.admits(Aspect.RANKS, chosen(self.task.base, (sized,)))

    def _ways(
        self, axes: tuple[Axis, ...], inner: InnerCut, through: Through, *, many: bool
    ) -> list[DataWay]:
        """The legal choices of the data axes that obey what is asked of them."""
        key = (axes, inner.axes, through, many)
        if key not in self.ways:
            legal = self._legal_ways(axes, inner, through, many=many)
            self.ways[key] = [way for way in legal if self._is_admitted(way, inner, through)]
        return self.ways[key]

    def _is_admitted(self, way: DataWay, inner: InnerCut, through: Through) -> bool:
        """Whether a choice obeys what is asked of tuples and dials, beside others."""
        where, choices = self.task.where, (way.choice, THROUGH[through], *inner.within)
        return not where.asks(Aspect.DATA) or where.admits(
            Aspect.DATA, chosen(self.task.base, choices)
        )

    def _legal_ways(
        self, axes: tuple[Axis, ...], inner: InnerCut, through: Through, *, many: bool
    ) -> list[DataWay]:
        """The legal choices of the data axes, whatever is asked of them."""
        key = (axes, inner.axes, through, many)
        if key not in self.legal:
            beside, base = (THROUGH[through], *inner.within), self.task.base
            # What is legal with several micro-batches is so with one: no rule asks for more of them
            # but those of schedules, which `pipeline` has asked.
            several = () if many else self._legal_ways(axes, inner, through, many=True)
            known = {id(way.choice): way for way in several}
            others = [choice for choice in self.choices[axes] if id(choice) not in known]
            legal = self.legality.data(others, inner.within, through, many=many)
            known |= {id(way.choice): way for way in ways_of(base, legal, beside)}
            choices = self.choices[axes]
            self.legal[key] = [known[id(choice)] for choice in choices if id(choice) in known]
        return self.legal[key]
