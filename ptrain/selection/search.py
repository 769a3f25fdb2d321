"""The search: every legal product of choices, scored in closed form, the best of them kept.

One block of candidates has one cut of its blocks, one flow, one micro-batch and one way to keep
activations; within it are all choices of the data axes, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.derivation.estimate import own_facts
from ptrain.facts.model import ModelFacts
from ptrain.facts.operators import ModelWork
from ptrain.rates.pace import Pace
from ptrain.selection.arrays import numpy
from ptrain.selection.flows import Flows
from ptrain.selection.profile import (
    Activity,
    Seconds,
    Sizes,
    activity_of,
    nodes_of,
    seconds_of,
    sizes_of,
)
from ptrain.selection.rows import Machine, columns, forms_of, row_of
from ptrain.selection.score import Links, Step, compute_seconds, peaks, step_seconds
from ptrain.selection.space import (
    KEPT,
    Candidate,
    Flow,
    Legality,
    flow_of,
    inner_products,
    kept_so,
    micro_batches,
    outer_products,
    row_shards,
    with_batch,
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
    the closed form; `least` needs least memory of all."""

    scored: int = 0
    fitting: int = 0
    least: Scored | None = None


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
    micro-batches' work `work` tells."""

    base: Spec
    devices: int
    pace: Pace
    work: Work
    objective: Objective = Objective.TIME
    where: Where = field(default_factory=Where)

    @property
    def room(self) -> float:
        """Bytes that a device has."""
        cluster = self.base.cluster
        return float(cluster.device_memory) if cluster else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Candidates that differ in their choices of the data axes alone."""

    within: tuple[AxisChoice, ...]
    pipeline: AxisChoice
    micro: int
    kept: Kept
    choices: Sequence[AxisChoice]
    indices: Any
    peaks: Any
    seconds: Any

    def scored(self, place: int) -> Scored:
        """Return one of them."""
        return Scored(
            candidate=Candidate(
                within=self.within,
                pipeline=self.pipeline,
                data=self.choices[int(self.indices[place])],
                micro=self.micro,
                kept=self.kept,
            ),
            peak=float(self.peaks[place]),
            seconds=float(self.seconds[place]),
        )


def search(task: Task) -> Found:
    """Return the best of all legal candidates."""
    keeper = _Keeper(task)
    for block in _Search(task).blocks():
        keeper.take(block)
    return keeper.found()


class _Keeper:
    """Remembers the best of each block, and forgets what others are better than."""

    def __init__(self, task: Task) -> None:
        self.task, self.tally = task, Tally()
        self.best: list[tuple[float, float, _Block, int]] = []
        self.bound = float("inf")
        self.front: dict[int, tuple[float, _Block, int]] = {}

    def take(self, block: _Block) -> None:
        np, task = numpy(), self.task
        self.tally.scored += len(block.peaks)
        self._least(block)
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

    def _least(self, block: _Block) -> None:
        place = int(block.peaks.argmin()) if len(block.peaks) else None
        least = self.tally.least
        if place is not None and (least is None or block.peaks[place] < least.peak):
            self.tally.least = block.scored(place)

    def _bands(self, block: _Block, places: Any) -> None:
        """The fastest of each band of memory."""
        np = numpy()
        most = self.task.room if self.task.room < float("inf") else float(block.peaks.max())
        bands = (block.peaks[places] / (most * _SLACK) * _BANDS).astype(int)
        order = np.argsort(block.seconds[places], kind="stable")
        _, first = np.unique(bands[order], return_index=True)
        for at in order[first]:
            seconds, band = float(block.seconds[places[at]]), int(bands[at])
            if band not in self.front or seconds < self.front[band][0]:
                self.front[band] = (seconds, block, int(places[at]))

    def _forget(self) -> None:
        self.best.sort(key=lambda entry: entry[:2])
        del self.best[_KEPT:]
        self.bound = self.best[-1][0]

    def found(self) -> Found:
        self._forget() if self.best else None
        return Found(
            best=tuple(block.scored(place) for _, _, block, place in self.best),
            front=tuple(
                block.scored(place) for _, (_, block, place) in sorted(self.front.items())
            ),
            tally=self.tally,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataTable:
    """The choices of the data axes for some ranks, and their rows as arrays."""

    choices: Sequence[AxisChoice]
    columns: dict[str, Any]


class _Search:
    """Loops over all that a block has in common, and asks everything once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.facts: ModelFacts = own_facts(replace(task.base, unit=UnitSize()))
        self.legality = Legality(task.base)
        self.flows = Flows(task.base, self.facts)
        self.machine = Machine(task.base, task.pace)
        self.tables: dict[tuple[object, ...], _DataTable] = {}
        self.activities: dict[tuple[object, ...], Activity] = {}

    def blocks(self) -> Iterator[_Block]:
        task = self.task
        for ranks, within in inner_products(task.base, task.devices):
            spec = chosen(task.base, within)
            if task.devices % ranks or not task.where.admits(Part.WITHIN, spec):
                continue
            sizes = sizes_of(spec, self.facts)
            for _, left, pipelines, datas in outer_products(task.base, task.devices // ranks):
                flows = self._flows(pipelines)
                for micro, number in micro_batches(task.base, left):
                    batched = with_batch(replace(task.base, factors=()), micro)
                    accumulated = replace(batched.batch, accumulate=number)
                    batched = replace(batched, batch=accumulated)
                    if task.where.admits(Part.BATCH, batched):
                        yield from self._of_batch(
                            (ranks, within, spec, sizes), (left, flows, datas), micro, number
                        )

    def _flows(self, pipelines: Any) -> list[AxisChoice]:
        return [
            choice
            for choice in pipelines
            if self.task.where.admits(Part.PIPELINE, chosen(self.task.base, (choice,)))
        ]

    def _of_batch(self, inner: Any, outer: Any, micro: int, number: int) -> Iterator[_Block]:
        ranks, within, spec, sizes = inner
        left, flows, datas = outer
        sized = replace(spec, batch=replace(spec.batch, micro=micro, accumulate=number))
        for kept in KEPT:
            kept_spec = kept_so(sized, kept)
            if not self.task.where.admits(Part.KEPT, kept_spec):
                continue
            usable = [
                choice
                for choice in flows
                if self.legality.within(within, kept, flow_of(choice))
                and self.legality.pipeline(choice, number)
            ]
            if not usable:
                continue
            activity = self._activity(within, spec, micro, kept)
            seconds = seconds_of(kept_spec, self.task.work(kept_spec), self.task.pace)
            for choice in usable:
                table = self._table(
                    (ranks, within, sizes), (left, datas), choice, many=number > 1
                )
                if table.choices:
                    yield self._block(
                        (within, sizes, activity, seconds), choice, table, (micro, number, kept)
                    )

    def _block(self, inner: Any, choice: AxisChoice, table: _DataTable, batch: Any) -> _Block:
        within, sizes, activity, seconds = inner
        micro, number, kept = batch
        step: Step = self.flows.step(choice, number)
        busy = max((compute_seconds(place, seconds) for place in step.places), key=sum)
        stride = self.task.devices // choice.degree(Axis.PP)
        links = Links(
            idle=self.flows.idle(choice, step, seconds, busy),
            crossing=self._crossing(activity, stride) if step.is_pipeline else 0.0,
            is_apart=self.task.pace.overlaps,
        )
        return _Block(
            within=within,
            pipeline=choice,
            micro=micro,
            kept=kept,
            choices=table.choices,
            indices=numpy().arange(len(table.choices)),
            peaks=peaks(table.columns, step, sizes, activity),
            seconds=step_seconds(table.columns, step, sizes, seconds, links),
        )

    def _crossing(self, activity: Activity, stride: int) -> float:
        from_node = nodes_of(self.task.base, 2, stride)
        return self.machine.send(from_node, activity.hidden)

    def _activity(self, within: Any, spec: Spec, micro: int, kept: Kept) -> Activity:
        """Sizes grow with the samples from two on; one alone saves less."""
        least = min(micro, 2)
        key = (within, least, kept)
        if key not in self.activities:
            sized = replace(spec, batch=replace(spec.batch, micro=least))
            self.activities[key] = activity_of(sized, kept)
        return self.activities[key].times(micro // least)

    def _table(self, inner: Any, outer: Any, flow: AxisChoice, *, many: bool) -> _DataTable:
        """The legal choices of the data axes beside a flow."""
        ranks, within, sizes = inner
        left, datas = outer
        way, halving = flow_of(flow), flow.degree(Axis.PP) > 1
        cut = tuple((c.factors[0].axis, c.factors[0].degree) for c in within if c.factors)
        key = (cut, left, way, many)
        if key in self.tables:
            return self.tables[key]
        legality, where = self.legality, self.task.where
        choices, rows = [], []
        for choice in datas:
            if not legality.data(choice, is_cut=bool(cut), flow=way, many=many):
                continue
            if cut and not legality.shards(within, row_shards(choice)):
                continue
            if where.constraints and not where.admits(Part.DATA, chosen(self.task.base, (choice,))):
                continue
            form = forms_of(self.task.base, (choice, flow, *within) if halving else (choice, *within))
            choices.append(choice)
            rows.append(row_of(self.machine, choice, sizes, ranks, form))
        np = numpy()
        arrays = {name: np.array(column) for name, column in columns(rows).items()}
        table = _DataTable(choices=choices, columns=arrays)
        self.tables[key] = table
        return table


__all__ = ["Flow", "Found", "Objective", "Scored", "Seconds", "Sizes", "Tally", "Task", "search"]
