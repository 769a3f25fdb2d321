"""Search every legal product of choices: score it in closed form and keep the best, and the front
of memory and time.

One block of candidates shares the cut of the model's blocks, the flow, the micro-batch and the way
to keep activations; the choices of the data axes vary within it, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.candidates import units_of
from ptrain.derivation.clock import Clock
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import own_facts
from ptrain.rates.pace import UnknownRate
from ptrain.selection.arrays import Columns, distinct, numpy
from ptrain.selection.batch import BlockBatch, OpenBlock
from ptrain.selection.flows import (
    BoundedPeaks,
    CandidateBlock,
    DataTable,
    FlowGroup,
    InnerCut,
    PipelineFlow,
    PipelineFlows,
    flow_of,
    without_shared,
)
from ptrain.selection.peaks import RankPeaks
from ptrain.selection.profile import Activity, Seconds, Wires, clock_of, seconds_of, sizes_of
from ptrain.selection.quantities import Aspect
from ptrain.selection.rows import Ways
from ptrain.selection.score import MomentParameters
from ptrain.selection.space import (
    THROUGH,
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
    SearchCount,
    SearchGoal,
    SearchResult,
    SearchTask,
)
from ptrain.selection.unit_ways import DataWay, SharedUnits, blocks_of_bucket, ways_of
from ptrain.selection.where import Constraint, Where
from ptrain.spec.activations import Kept
from ptrain.spec.dials import UnitSize
from ptrain.spec.placement import Axis
from ptrain.units import grouped

_KEPT = 1024  # candidates that are remembered between blocks
_BANDS = 24  # of memory, the fastest of each of which is remembered for a front


def may_hold(rule: Constraint, figures: Any, slack: float) -> Any:
    """Return of which closed forms what is exact may obey a bound from above; of any other bound
    they cannot tell."""
    match rule.compare:
        case "<" | "<=":
            return rule.holds_of(figures / slack)
        case _:
            return numpy().ones_like(figures, dtype=bool)


class Keeper:
    """Remembers the best of each block, and forgets what others are better than."""

    def __init__(self, task: SearchTask) -> None:
        self.task, self.counts = task, SearchCount()
        self.best: list[tuple[float, float, CandidateBlock, int]] = []
        self.bound = float("inf")
        self.front: dict[int, tuple[float, CandidateBlock, int]] = {}

    def take(self, block: CandidateBlock) -> None:
        np, task = numpy(), self.task
        self.counts.scored += block.number
        self.counts.untimed += block.untimed
        if block.least is not None:
            peak, *where = block.least
            if self.counts.least is None or peak < self.counts.least[0]:
                self.counts.least = (peak, block.candidate(*where))
        if not len(block.rows):
            return
        fits = block.peaks <= task.room * SLACK
        for name, figures, slack in (
            ("memory", block.peaks, SLACK),
            ("time", block.seconds, TIME_SLACK),
        ):
            for rule in task.where.bounds(name):
                fits &= may_hold(rule, figures, slack)
        places = np.flatnonzero(fits)
        if not len(places):
            return
        self.counts.fitting += int((block.peaks[places] <= task.room).sum())
        keys, ties = block.seconds, block.peaks
        if task.objective is SearchGoal.MEMORY:
            keys, ties = ties, keys
        self._bands(block, places)
        good = places[keys[places] <= self.bound]
        if len(good) > _KEPT:
            good = good[np.argpartition(keys[good], _KEPT)[:_KEPT]]
        figures = (keys[good].tolist(), ties[good].tolist(), good.tolist())
        self.best += [(key, tie, block, place) for key, tie, place in zip(*figures, strict=True)]
        if len(self.best) > 4 * _KEPT:
            self._forget()

    def _bands(self, block: CandidateBlock, places: Any) -> None:
        """The fastest of each band of memory."""
        np = numpy()
        most = self.task.room if self.task.room < float("inf") else float(block.peaks.max())
        bands = (block.peaks[places] / (most * SLACK) * _BANDS).astype(int)
        order = np.argsort(block.seconds[places], kind="stable")[::-1]
        fastest = np.full(_BANDS + 1, -1)
        fastest[bands[order]] = order  # of one band the last that is written stays
        used = np.flatnonzero(fastest >= 0)
        at = places[fastest[used]]
        for band, place, seconds in zip(
            used.tolist(), at.tolist(), block.seconds[at].tolist(), strict=True
        ):
            if seconds == float("inf"):
                continue
            if band not in self.front or seconds < self.front[band][0]:
                self.front[band] = (seconds, block, place)

    def _forget(self) -> None:
        self.best.sort(key=itemgetter(0, 1))
        del self.best[_KEPT:]
        self.bound = self.best[-1][0]

    def result(self) -> SearchResult:
        if self.best:
            self._forget()
        return SearchResult(
            best=tuple(block.scored(place) for _, _, block, place in self.best),
            front=tuple(block.scored(place) for _, (_, block, place) in sorted(self.front.items())),
            counts=self.counts,
        )


class Search:
    """Loops over all that a block has in common, and asks everything once."""

    def __init__(self, task: SearchTask) -> None:
        self.task = task
        self.facts: ModelFacts = own_facts(replace(task.placed, unit=UnitSize()))
        self.legality = Legality(task.placed, task.written, task.scored)
        self.flows = PipelineFlows(task.placed, self.facts)
        self.wires = Wires(task.base, task.pace, task.is_nominal)
        self.shared_units = SharedUnits(self.wires)
        self.choices = data_choices(task.base, task.written)
        self.units = units_of(task.written)
        self.ways_to_keep = task.written.kept or ways_to_keep(task.written.away)
        self.too_large: list[tuple[InnerCut, int, Through, Kept, int]] = []
        # by numbers and identities (of `ways_to_keep`): values of a spec are slow to compare
        self.staged: dict[int, list[PipelineFlow]] = {}
        self.running: dict[tuple[int, int], dict[Through, FlowGroup]] = {}
        self.cuttable: dict[tuple[int, int, Through, bool], bool] = {}
        self.gathered: dict[tuple[int, int], frozenset[UnitSize | None]] = {}
        self.ways: dict[tuple[object, ...], Ways] = {}
        self.legal: dict[tuple[object, ...], list[DataWay]] = {}
        self.tables: dict[tuple[object, ...], DataTable] = {}
        self.columns: dict[tuple[object, ...], Columns] = {}
        self.parts: dict[tuple[object, ...], MomentParameters] = {}
        self.least = float("inf")  # bytes: of all candidates that were scored
        self.activities: dict[tuple[object, ...], Activity] = {}
        self.clocks: dict[int, Clock] = {}
        self.seconds: dict[tuple[object, ...], Seconds | None] = {}

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
            self.staged.clear()
            self.running.clear()
            self.gathered.clear()
            self.ways.clear()
            self.tables.clear()
            self.columns.clear()

    def blocks(self) -> Iterator[CandidateBlock]:
        """Yield the space, a block at a time."""
        self.least = float("inf")
        for inner in self._inners():
            batch = BlockBatch(self.task, self.flows, self.wires, inner)
            for block in self._of_inner(inner):
                batch.add(block)
                # until something fits blocks look for the least of all, each for its own
                if batch.is_full or self.least > self.task.room:
                    yield from self._scored(batch)
            yield from self._scored(batch)

    def _scored(self, batch: BlockBatch) -> Iterator[CandidateBlock]:
        """The blocks of a batch, which is empty then."""
        for block in batch.scored():
            if block.least is not None:
                self.least = min(self.least, block.least[0])
            yield block

    def _of_inner(self, inner: InnerCut) -> Iterator[OpenBlock]:
        task = self.task
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
                yield InnerCut.of(number, ranks, within, specs, sizes_of(specs[0], self.facts))

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

    def _of_batch(
        self, inner: InnerCut, left: int, stages: int, micro: int, number: int
    ) -> Iterator[OpenBlock]:
        running, where = self._running(stages, number), self.task.where
        room = self.task.room * SLACK
        for kept in self.ways_to_keep:
            if where.asks(Aspect.KEPT) and not where.admits(Aspect.KEPT, kept_so(inner.spec, kept)):
                continue
            for through, group in running.items():
                if not self._is_legal(inner, kept, through, several=micro > 1):
                    continue
                if self._activity(inner, micro, kept).least > room:
                    self.too_large.append((inner, left, through, kept, number))
                    continue
                table = self._legal(inner, left, through, kept, number)
                if len(table):
                    yield self._open(inner, table, group, micro, kept)

    def _running(self, stages: int, number: int) -> dict[Through, FlowGroup]:
        """The flows over so many ranks that take so many micro-batches."""
        key = (stages, number)
        if key not in self.running:
            by_through = grouped(
                (through_of(flow.choice), flow)
                for flow in self.staged[stages]
                if self.legality.pipeline(flow.choice, number)
            )
            self.running[key] = {
                through: FlowGroup(self.flows, flows, number)
                for through, flows in by_through.items()
            }
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
        return any(len(self._legal(*where)) for where in self.too_large)

    def _open(
        self, inner: InnerCut, table: DataTable, group: FlowGroup, micro: int, kept: Kept
    ) -> OpenBlock:
        moments = group.moments
        key = (id(moments), inner.key)  # `flows` keeps them
        if key not in self.parts:
            self.parts[key] = MomentParameters.of(moments.at, inner.sizes)
        ranks = RankPeaks(
            moments=moments,
            act=self._activity(inner, micro, kept),
            parts=self.parts[key],
            block=inner.sizes.block,
            is_many=group.micro_batches > 1,
            experts=inner.sizes.own_experts,
        )
        return OpenBlock(
            group=group,
            micro=micro,
            kept=kept,
            peaks=BoundedPeaks(table, ranks, self.task.room * SLACK, self.least),
            seconds=partial(self._seconds, inner, micro, kept),
        )

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
                    spec, work, self.clocks[inner.number], moved, is_issued=self.wires.is_issued
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
                unit for unit in self._units(inner) if self.legality.unit(inner.within, unit, kept)
            )
        return self._table(inner, left, through, self.gathered[key], many=number > 1)

    def _units(self, inner: InnerCut) -> Iterator[UnitSize | None]:
        """What may be gathered together: no block besides a bucket that one block fills, unless
        somebody asks for it."""
        task = self.task
        is_bucket = blocks_of_bucket(task.base, inner.sizes) == 1 and None in self.units
        is_same = is_bucket and not any(True for _ in task.where.bounds("unit"))
        yield from (unit for unit in self.units if not (is_same and unit == UnitSize()))

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
        if key in self.tables:
            return self.tables[key]
        parts = []
        stages = self.task.devices // (left * inner.ranks)
        layers = max(1, self.flows.num_layers // stages)
        for axes in self.choices:
            for degrees in degrees_over(len(axes), left * inner.shared):
                own = without_shared(degrees, inner.shared)
                if own is None or not self._are_admitted(axes, own):
                    continue
                ways = self._ways(axes, inner, through, many=many)
                indices = self._indices(ways, degrees, inner, units)
                if len(indices):
                    parts.append((ways, own, indices, self._columns(ways, degrees, inner, layers)))
        self.tables[key] = DataTable(parts)
        return self.tables[key]

    def _are_admitted(self, axes: tuple[Axis, ...], degrees: tuple[int, ...]) -> bool:
        """Whether degrees obey what is asked of ranks, whatever is done with them."""
        if (first := next(iter(self.choices[axes]), None)) is None:
            return False
        factors = zip(first.factors, degrees, strict=True)
        sized = replace(first, factors=tuple(f._replace(degree=d) for f, d in factors))
        return self.task.where.admits(Aspect.RANKS, chosen(self.task.base, (sized,)))

    def _columns(
        self, ways: Ways, degrees: tuple[int, ...], inner: InnerCut, layers: int
    ) -> Columns:
        """Those of all ways, whichever of them are legal with a way to keep activations."""
        key = (id(ways), degrees, inner.key, layers)  # `ways` keeps them
        if key not in self.columns:
            within = inner.ranks // inner.shared
            self.columns[key] = ways.columns(degrees, inner.sizes, within, layers)
        return self.columns[key]

    def _indices(
        self,
        ways: Ways,
        degrees: tuple[int, ...],
        inner: InnerCut,
        units: frozenset[UnitSize | None],
    ) -> Any:
        """Which of the ways are legal with these degrees, and obey what is asked of them."""
        np = numpy()
        if not ways.ways:
            return np.zeros(0, dtype=int)
        fine = ways.of_units(units)
        if inner.shape:
            shards = ways.row_shards(degrees)
            for number in distinct(shards)[0]:
                if not self.legality.shards(inner.within, int(number)):
                    fine &= shards != number
        return np.flatnonzero(fine)

    def _ways(
        self, axes: tuple[Axis, ...], inner: InnerCut, through: Through, *, many: bool
    ) -> Ways:
        key = (axes, inner.axes, through, many)
        if key not in self.ways:
            legal = self._legal_ways(axes, inner, through, many=many)
            admitted = [way for way in legal if self._is_admitted(way, inner, through)]
            self.ways[key] = Ways(self.shared_units, admitted)
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
