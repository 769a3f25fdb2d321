"""The search: every legal product of choices, scored in closed form, the best of them kept.

One block of candidates has one cut of its blocks, one flow, one micro-batch and one way to keep
activations; within it are all choices of the data axes, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.candidates import UNITS
from ptrain.costs import Collective
from ptrain.derivation.estimate import own_facts
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import ModelWork
from ptrain.rates.pace import Pace, UnknownRate
from ptrain.selection.arrays import numpy
from ptrain.selection.flows import Flow, Flows, flow_of
from ptrain.selection.profile import Activity, Seconds, Sizes, activity_of, seconds_of, sizes_of
from ptrain.selection.rows import Columns, Ways, Wires, way_of
from ptrain.selection.score import Places, peaks, step_seconds
from ptrain.selection.space import (
    KEPT,
    THROUGH,
    Candidate,
    Legality,
    Through,
    data_choices,
    degrees_over,
    inner_products,
    kept_so,
    micro_batches,
    pipelines,
    through_of,
)
from ptrain.selection.where import Part, Where
from ptrain.spec.activations import Kept
from ptrain.spec.axis import Axis
from ptrain.spec.dials import UnitSize
from ptrain.spec.spec import Spec

_KEPT = 4096  # candidates that are remembered between blocks
_BANDS = 24  # of memory, the fastest of each of which is remembered for a front
_SLACK = 1.05  # over the device's memory: the closed form is not exact, and what is exact decides


class Objective(StrEnum):
    """What the best candidate has least of."""

    TIME = "time"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate, with its bytes and seconds in closed form."""

    candidate: Candidate
    peak: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class Tally:
    """How many candidates there were: legal ones that were scored, and of these those that fit by
    the closed form, and those that would if anybody knew their time; `least` needs least memory of all."""

    scored: int = 0
    fitting: int = 0
    untimed: int = 0
    least: tuple[float, Candidate] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best by the objective, best first; the fastest by band of memory; how many there were."""

    best: tuple[Scored, ...]
    front: tuple[Scored, ...]
    tally: Tally


Work = Callable[[Spec], ModelWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is searched: a job like `base` on so many devices, on a machine with this pace, whose
    micro-batches' work `work` tells. `is_nominal`: nobody measured the pace."""

    base: Spec
    devices: int
    pace: Pace
    work: Work
    is_nominal: bool = False
    objective: Objective = Objective.TIME
    where: Where = field(default_factory=Where)

    @property
    def room(self) -> float:
        """Bytes that a device has."""
        cluster = self.base.cluster
        return float(cluster.device_memory) if cluster else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Candidates that differ in their flow and in their choices of the data axes alone: `rows` and
    `columns` are whose figures these are."""

    within: tuple[AxisChoice, ...]
    flows: Sequence[Flow]
    table: _DataTable
    micro: int
    kept: Kept
    number: int
    untimed: int
    rows: Any
    columns: Any
    peaks: Any
    seconds: Any
    least: tuple[float, int, int]

    def scored(self, place: int) -> Scored:
        """Return one of them."""
        where = int(self.rows[place]), int(self.columns[place])
        return Scored(
            candidate=self.candidate(*where),
            peak=float(self.peaks[place]),
            seconds=float(self.seconds[place]),
        )

    def candidate(self, row: int, column: int) -> Candidate:
        """Return what stands at a place of the block."""
        return Candidate(
            within=self.within,
            pipeline=self.flows[column].choice,
            data=self.table.choice(row),
            micro=self.micro,
            kept=self.kept,
        )


class _Keeper:
    """Remembers the best of each block, and forgets what others are better than."""

    def __init__(self, task: Task) -> None:
        self.task, self.tally = task, Tally()
        self.best: list[tuple[float, float, _Block, int]] = []
        self.bound = float("inf")
        self.front: dict[int, tuple[float, _Block, int]] = {}

    def take(self, block: _Block) -> None:
        np, task = numpy(), self.task
        self.tally.scored += block.number
        self.tally.untimed += block.untimed
        peak, *where = block.least
        least = self.tally.least
        if least is None or peak < least[0]:
            self.tally.least = (peak, block.candidate(*where))
        fits = block.peaks <= task.room * _SLACK
        for rule in task.where.bounds("memory"):
            fits &= rule.holds_of(block.peaks)
        for rule in task.where.bounds("time"):
            fits &= rule.holds_of(block.seconds)
        places = np.flatnonzero(fits)
        self.tally.fitting += int((block.peaks[places] <= task.room).sum())
        if not len(places):
            return
        keys, ties = block.seconds, block.peaks
        if task.objective is Objective.MEMORY:
            keys, ties = ties, keys
        self._bands(block, places)
        good = places[keys[places] <= self.bound]
        if len(good) > _KEPT:
            good = good[np.argpartition(keys[good], _KEPT)[:_KEPT]]
        self.best += [
            (float(key), float(tie), block, int(place))
            for key, tie, place in zip(keys[good], ties[good], good, strict=True)
        ]
        if len(self.best) > 4 * _KEPT:
            self._forget()

    def _bands(self, block: _Block, places: Any) -> None:
        """The fastest of each band of memory."""
        np = numpy()
        most = self.task.room if self.task.room < float("inf") else float(block.peaks.max())
        bands = (block.peaks[places] / (most * _SLACK) * _BANDS).astype(int)
        order = np.argsort(block.seconds[places], kind="stable")
        _, first = np.unique(bands[order], return_index=True)
        for at in order[first]:
            seconds, band = float(block.seconds[places[at]]), int(bands[at])
            if seconds == float("inf"):
                continue
            if band not in self.front or seconds < self.front[band][0]:
                self.front[band] = (seconds, block, int(places[at]))

    def _forget(self) -> None:
        self.best.sort(key=itemgetter(0, 1))
        del self.best[_KEPT:]
        self.bound = self.best[-1][0]

    def found(self) -> Found:
        if self.best:
            self._forget()
        return Found(
            best=tuple(block.scored(place) for _, _, block, place in self.best),
            front=tuple(block.scored(place) for _, (_, block, place) in sorted(self.front.items())),
            tally=self.tally,
        )


class _DataTable:
    """The choices of the data axes for some ranks, as arrays: of several kinds of ways, each with
    its degrees."""

    def __init__(self, parts: Sequence[tuple[Ways, tuple[int, ...], Any, Columns]]) -> None:
        np = numpy()
        self.parts = [part[:3] for part in parts]
        self.ends = np.cumsum([len(indices) for _, _, indices, _ in parts])
        names = parts[0][3] if parts else ()
        self.columns: Columns = {
            name: np.concatenate([columns[name][indices] for _, _, indices, columns in parts])
            for name in names
        }

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def choice(self, row: int) -> AxisChoice:
        """Return the choice that a row is of."""
        at = int(numpy().searchsorted(self.ends, row, side="right"))
        ways, degrees, indices = self.parts[at]
        start = int(self.ends[at]) - len(indices)
        return ways.choice(int(indices[row - start]), degrees)

    def shaped(self, dimensions: int) -> Columns:
        """Return the columns along the first of so many dimensions."""
        shape = (-1,) + (1,) * (dimensions - 1)
        return {name: column.reshape(shape) for name, column in self.columns.items()}

    def at(self, rows: Any) -> Columns:
        """Return some rows, one below the other."""
        return {name: column[rows][:, None] for name, column in self.columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    """How blocks are cut: by `ranks` ranks together."""

    ranks: int
    within: tuple[AxisChoice, ...]
    spec: Spec
    sizes: Sizes

    @property
    def shape(self) -> tuple[tuple[Axis, int], ...]:
        """Return the axes and degrees, whatever their tuples are."""
        return tuple((f.axis, f.degree) for choice in self.within for f in choice.factors)


class Search:
    """Loops over all that a block has in common, and asks everything once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.facts: ModelFacts = own_facts(replace(task.base, unit=UnitSize()))
        self.legality = Legality(task.base)
        self.flows = Flows(task.base, self.facts)
        self.wires = Wires(task.base, task.pace, task.is_nominal)
        self.choices = data_choices(task.base)
        self.ways: dict[tuple[object, ...], Ways] = {}
        self.tables: dict[tuple[object, ...], _DataTable] = {}
        self.activities: dict[tuple[object, ...], Activity] = {}
        self.seconds: dict[tuple[object, ...], Seconds | None] = {}

    def run(self, where: Where) -> Found:
        """Return the best of all legal candidates that obey constraints."""
        if where != self.task.where:
            self.task = replace(self.task, where=where)
            self.ways.clear()
            self.tables.clear()
        keeper = _Keeper(self.task)
        for block in self.blocks():
            keeper.take(block)
        return keeper.found()

    def blocks(self) -> Iterator[_Block]:
        """Yield the space, a block at a time."""
        task = self.task
        for ranks, within in inner_products(task.base, task.devices):
            spec = chosen(task.base, within)
            if not task.where.admits(Part.WITHIN, spec):
                continue
            inner = _Inner(ranks=ranks, within=within, spec=spec, sizes=sizes_of(spec, self.facts))
            for left, choices in pipelines(task.base, task.devices // ranks):
                flows = self._flows(choices)
                for micro, number in micro_batches(task.base, left) if flows else ():
                    if task.where.admits(Part.BATCH, _batched(task.base, micro, number)):
                        yield from self._of_batch(inner, left, flows, micro, number)

    def _flows(self, choices: Sequence[AxisChoice]) -> list[Flow]:
        base, where = self.task.base, self.task.where
        return [
            flow_of(base, choice)
            for choice in choices
            if where.admits(Part.PIPELINE, chosen(base, (choice,)))
        ]

    def _of_batch(
        self, inner: _Inner, left: int, flows: Sequence[Flow], micro: int, number: int
    ) -> Iterator[_Block]:
        legality = self.legality
        flows = [flow for flow in flows if legality.pipeline(flow.choice, number)]
        for kept in KEPT:
            if not self.task.where.admits(Part.KEPT, kept_so(inner.spec, kept)):
                continue
            by_way: dict[Through, list[Flow]] = {}
            for flow in flows:
                by_way.setdefault(through_of(flow.choice), []).append(flow)
            for way, alike in by_way.items():
                if not legality.within(inner.within, kept, way):
                    continue
                if self._activity(inner, micro, kept).least > self.task.room * _SLACK:
                    continue  # whatever the states are
                units = frozenset(unit for unit in UNITS if legality.unit(inner.within, unit, kept))
                table = self._table(inner, left, way, units, many=number > 1)
                if len(table):
                    yield self._block(inner, table, alike, (micro, number, kept))

    def _block(
        self,
        inner: _Inner,
        table: _DataTable,
        flows: Sequence[Flow],
        batch: tuple[int, int, Kept],
    ) -> _Block:
        np, task = numpy(), self.task
        micro, number, kept = batch
        activity = self._activity(inner, micro, kept)
        places = self.flows.places(flows, number)
        peak = peaks(table.shaped(3), places, inner.sizes, activity, number).max(axis=2)
        rows, columns = np.nonzero(peak <= task.room * _SLACK)
        untimed = 0
        least = int(peak.argmin())
        seconds = np.zeros(0)
        work = self._seconds(inner, micro, kept)
        if work is None:
            rows, columns, untimed = rows[:0], columns[:0], len(rows)
        elif len(rows):
            busy = step_seconds(table.at(rows), places.at(columns), inner.sizes, work, number).max(
                axis=1
            )
            seconds = busy + self._idle(flows, places, number, work, activity)[columns]
        return _Block(
            within=inner.within,
            flows=flows,
            table=table,
            micro=micro,
            kept=kept,
            number=peak.size,
            untimed=untimed,
            rows=rows,
            columns=columns,
            peaks=peak[rows, columns],
            seconds=seconds,
            least=(float(peak.flat[least]), *divmod(least, peak.shape[1])),
        )

    def _idle(
        self,
        flows: Sequence[Flow],
        places: Places,
        number: int,
        work: Seconds,
        activity: Activity,
    ) -> Any:
        """What each flow's schedule leaves idle, and what it waits for at its boundaries: while it
        fills and drains, and where nothing moves beside what is computed, for each micro-batch."""
        np, pace = numpy(), self.task.pace
        forward, backward = places.computing(work)
        slowest = (forward + backward).argmax(axis=1)
        waits = []
        for at, flow in enumerate(flows):
            if flow.schedule is None:
                waits.append(0.0)
                continue
            busy = float(forward[at, slowest[at]]), float(backward[at, slowest[at]])
            stride = self.task.devices // flow.ranks
            crossing = self.wires.seconds(Collective.SEND, 2, stride, activity.hidden)
            crossings = 2 * (flow.ranks - 1 + (0 if pace.overlaps else number * flow.per_rank))
            waits.append(self.flows.idle(flow, number, work, busy) + crossings * crossing)
        return np.array(waits)

    def _activity(self, inner: _Inner, micro: int, kept: Kept) -> Activity:
        """Sizes grow with the samples from two on; one alone saves less."""
        least = min(micro, 2)
        key = (inner.within, least, kept)
        if key not in self.activities:
            sized = replace(inner.spec, batch=replace(inner.spec.batch, micro=least))
            self.activities[key] = activity_of(sized, kept)
        return self.activities[key].times(micro // least)

    def _seconds(self, inner: _Inner, micro: int, kept: Kept) -> Seconds | None:
        """None where nobody knows what is computed, or how long that takes."""
        key = (inner.within, micro, kept)
        if key not in self.seconds:
            spec = kept_so(_batched(inner.spec, micro, 1), kept)
            try:
                self.seconds[key] = seconds_of(spec, self.task.work(spec), self.task.pace)
            except UnknownRate:
                self.seconds[key] = None
        return self.seconds[key]

    def _table(
        self, inner: _Inner, left: int, way: Through, units: frozenset[UnitSize], *, many: bool
    ) -> _DataTable:
        """The legal choices of the data axes beside others."""
        key = (inner.shape, left, way, units, many)
        if key in self.tables:
            return self.tables[key]
        parts = []
        for axes in self.choices:
            for degrees in degrees_over(len(axes), left):
                ways = self._ways(axes, inner, way, many=many)
                indices = self._indices(ways, degrees, inner, units)
                if len(indices):
                    columns = ways.columns(degrees, inner.sizes, inner.ranks)
                    parts.append((ways, degrees, indices, columns))
        self.tables[key] = _DataTable(parts)
        return self.tables[key]

    def _indices(
        self, ways: Ways, degrees: tuple[int, ...], inner: _Inner, units: frozenset[UnitSize]
    ) -> Any:
        """Which of the ways are legal with these degrees, and obey what is asked of them."""
        np, where, base = numpy(), self.task.where, self.task.base
        if not ways.ways:
            return np.zeros(0, dtype=int)
        if not where.admits(Part.RANKS, chosen(base, (ways.choice(0, degrees),))):
            return np.zeros(0, dtype=int)
        fine = ways.of_units(units)
        if inner.within:
            shards = ways.row_shards(degrees)
            for number in np.unique(shards):
                if not self.legality.shards(inner.within, int(number)):
                    fine &= shards != number
        return np.flatnonzero(fine)

    def _ways(self, axes: tuple[Axis, ...], inner: _Inner, way: Through, *, many: bool) -> Ways:
        key = (axes, bool(inner.shape), way, many)
        if key not in self.ways:
            beside, base = (THROUGH[way], *inner.within), self.task.base
            self.ways[key] = Ways(
                self.wires,
                [
                    way_of(base, choice, beside)
                    for choice in self.choices[axes]
                    if self.legality.data(choice, inner.within, way, many=many)
                    and self.task.where.admits(Part.DATA, chosen(base, (choice,)))
                ],
            )
        return self.ways[key]


def _batched(spec: Spec, micro: int, number: int) -> Spec:
    return replace(spec, batch=replace(spec.batch, micro=micro, accumulate=number))
