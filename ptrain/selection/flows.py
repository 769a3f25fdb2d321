"""Candidates of a search in blocks (one cut, one flow of micro-batches, one micro-batch and one way
to keep activations each, as arrays): how their model is cut, what the ranks of a pipeline that
differ have, and how long the schedule leaves them idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.expert.cost import rows_bytes
from ptrain.axes.pipeline.catalogue import SCHEDULES, schedule, size_of, stages_of
from ptrain.axes.pipeline.cost import PipelineSize, Relation
from ptrain.axes.pipeline.cost import stages_of as stages_of_rank
from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.axes.pipeline.simulate import equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import layers
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Layers
from ptrain.selection.arrays import Array, Columns, numpy
from ptrain.selection.peaks import (
    MomentRow,
    OpenPairs,
    RankPeaks,
    as_arrays,
    fullest,
    stacked,
    unlike,
)
from ptrain.selection.profile import (
    Activity,
    Seconds,
    Sizes,
    activity_of,
    exchange_seconds,
    with_rows,
)
from ptrain.selection.rows import OF_ISSUE, OF_MEMORY, OF_TIME, Ways
from ptrain.selection.score import FlowMoments
from ptrain.selection.space import Candidate, Through, batched, through_of
from ptrain.selection.task import Scored, SearchTask
from ptrain.spec.activations import Kept
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCut:
    """How blocks are cut: by `ranks` ranks together, over `shared` of which go states of the data
    axes too. The `number` is that of a way to cut; `placed` is a spec with nothing beside it, and
    `spec` the same as it is scored."""

    number: int
    ranks: int
    within: tuple[AxisChoice, ...]
    spec: Spec
    sizes: Sizes
    shape: tuple[tuple[Axis, int], ...]  # what cuts operators, whatever its tuples are
    axes: tuple[Axis, ...]  # all of them
    shared: int
    placed: Spec

    @property
    def key(self) -> tuple[object, ...]:
        """Return what choices of the data axes beside it depend on."""
        return self.shape, self.axes, self.shared, self.sizes.shared_by

    @property
    def sampling(self) -> int:
        """Return how many of its ranks have samples of their own."""
        return self.placed.data_degree

    def activity(self, micro: int, kept: Kept, own: ModelShape | None) -> Activity:
        """Return the bytes of a micro-batch of so many samples, of a model with experts of `own`
        with their rows."""
        sized = replace(self.spec, batch=replace(self.spec.batch, micro=micro))
        activity = activity_of(sized, kept)
        return activity if own is None else with_rows(activity, rows_bytes(sized, own), kept)

    def waits(self, micro: int, kept: Kept, task: SearchTask) -> tuple[float, float]:
        """Return for how long a block waits, forward and backward, for rows of its experts."""
        if task.own is None:
            return 0.0, 0.0
        return exchange_seconds(batched(self.placed, micro, 1), task.own, task.pace, kept)

    @classmethod
    def of(
        cls,
        number: int,
        ranks: int,
        within: tuple[AxisChoice, ...],
        specs: tuple[Spec, Spec],
        sizes: Sizes,
    ) -> InnerCut:
        """Return what these choices say together; `specs` are as it is placed and as it is
        scored."""
        placed, spec = specs
        factors = [(choice.shared, factor) for choice in within for factor in choice.factors]
        return cls(
            number=number,
            ranks=ranks,
            within=within,
            spec=spec,
            placed=placed,
            sizes=sizes,
            shape=tuple((f.axis, f.degree) for shared, f in factors if shared == 1),
            axes=tuple(factor.axis for _, factor in factors),
            shared=prod(choice.shared for choice in within),
        )


def without_shared(degrees: tuple[int, ...], shared: int) -> tuple[int, ...] | None:
    """Return the degrees of the data axes themselves, where the innermost has all the ranks that
    are shared; None where it has not."""
    if shared == 1:
        return degrees
    *outer, last = degrees or (1,)
    return None if last % shared else (*outer, last // shared)


_ROUNDS = 3  # of as many micro-batches as ranks: then a schedule's waits are all there
# The first rank, of those in the middle the one with most layers, the last one.
_PLACES = 3
Row = tuple[int, bool, bool, int]  # the fields of `Places`


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlow:
    """One choice of the pipeline's: ranks, stages on each, and its schedule (None of one rank)."""

    choice: AxisChoice
    ranks: int
    per_rank: int
    schedule: ScheduleName | None

    @property
    def shape(self) -> tuple[ScheduleName | None, int, int]:
        return self.schedule, self.ranks, self.per_rank

    @property
    def is_serial(self) -> bool:
        """Whether each rank computes alone, while all others wait."""
        return self.schedule is not None and SCHEDULES[self.schedule].is_serial

    def size(self, micro_batches: int) -> PipelineSize:
        """Return it with so many micro-batches; a rank alone has one of them at a time."""
        shape = PipelineShape(
            ranks=self.ranks, stages_per_rank=self.per_rank, microbatches=micro_batches
        )
        return size_of(self.schedule or ScheduleName.NAIVE, shape)

    def crossings(self, micro_batches: int, *, overlaps: bool) -> int:
        """Return how often a rank waits for a message forward: of the first micro-batch's way, of
        every one's where each waits for the one before it, and of every one that it sends itself
        where nothing moves beside what is computed."""
        on_the_way = self.ranks - 1
        if self.is_serial:
            return micro_batches * on_the_way
        return on_the_way + (0 if overlaps else micro_batches * self.per_rank)


def flow_of(base: Spec, choice: AxisChoice) -> PipelineFlow:
    """Return a choice as a flow."""
    ranks = choice.degree(Axis.PP)
    if ranks == 1:
        return PipelineFlow(choice=choice, ranks=1, per_rank=1, schedule=None)
    said = chosen(base, (choice,)).pipeline
    assert isinstance(said.schedule, ScheduleName), "a schedule with a name"
    per_rank = said.stages_over(ranks) // ranks
    return PipelineFlow(choice=choice, ranks=ranks, per_rank=per_rank, schedule=said.schedule)


@dataclass(frozen=True)
class PipelineFlows:
    """The flows of one model's candidates; each cut is made once."""

    base: Spec
    facts: ModelFacts
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[tuple[object, ...], list[Row]] = field(default_factory=dict)
    fullest: dict[PipelineSize, tuple[MomentRow, ...]] = field(default_factory=dict)
    tables: dict[tuple[int, ...], FlowMoments] = field(default_factory=dict)
    waits: dict[tuple[object, ...], float] = field(default_factory=dict)

    @cached_property
    def _layers(self) -> Layers:
        return layers(self.base, self.facts)

    @cached_property
    def num_layers(self) -> int:
        """Return the layers of the model."""
        return len(self._layers.layers)

    def places(self, flows: Sequence[PipelineFlow]) -> Array:
        """Return what the ranks have, flow by flow: of each field of `Places` an array."""
        return numpy().array([self._rows(flow) for flow in flows], dtype=float).transpose(2, 0, 1)

    def _rows(self, flow: PipelineFlow) -> list[Row]:
        if flow.shape not in self.rows:
            self.rows[flow.shape] = self._make_rows(flow)
        return self.rows[flow.shape]

    def _make_rows(self, flow: PipelineFlow) -> list[Row]:
        if flow.schedule is None:
            return [(self.num_layers, True, True, 0)] * _PLACES
        counts = self._counts(flow)
        rows: list[Row] = []
        for rank in range(flow.ranks):
            own = stages_of_rank(flow.size(1), rank)
            layers = sum(counts[stage] for stage in own)
            rows.append((layers, 0 in own, len(counts) - 1 in own, flow.per_rank))
        return [rows[0], max(rows[1:-1] or rows[:1]), rows[-1]]

    def moments(self, flows: Sequence[PipelineFlow], micro_batches: int) -> FlowMoments:
        """Return when the ranks may be fullest, flow by flow."""
        rows = tuple(self._moments(flow, micro_batches) for flow in flows)
        key = tuple(map(id, rows))  # which `fullest` keeps
        if key not in self.tables:
            self.tables[key] = as_arrays(rows)
        return self.tables[key]

    def _moments(self, flow: PipelineFlow, micro_batches: int) -> tuple[MomentRow, ...]:
        size = flow.size(micro_batches)
        size = replace(size, microbatches=unlike(size))
        if size not in self.fullest:
            counts = self._counts(flow) if flow.schedule else (self.num_layers,)
            self.fullest[size] = fullest(size, counts)
        return self.fullest[size]

    def _counts(self, flow: PipelineFlow) -> tuple[int, ...]:
        stages = flow.ranks * flow.per_rank
        if stages not in self.cuts:
            cut = stages_of(chosen(self.base, (flow.choice,)), self._layers)
            self.cuts[stages] = tuple(len(stage.layers) for stage in cut)
        return self.cuts[stages]

    def computing(self, seconds: Seconds) -> Any:
        """Return what all ranks compute together of a micro-batch."""
        return self.num_layers * sum(seconds.block) + sum(seconds.front) + sum(seconds.behind)

    def idle(
        self, flow: PipelineFlow, micro_batches: int, seconds: Seconds, busy: tuple[float, float]
    ) -> float:
        """Return the seconds that the rank which waits most waits in a step, `busy` being the
        forward and backward passes of the longest of a micro-batch: by the literature's formulas
        of equal stages, as far as the others are shorter."""
        name, per_rank = flow.schedule, flow.per_rank
        if name is None or not any(busy):  # or nobody knows the seconds of an operation
            return 0.0
        whole: float = self.computing(seconds)
        others = whole - sum(busy)
        if flow.is_serial:  # it waits while all others compute
            return micro_batches * others
        forward, backward = busy[0] / per_rank, busy[1] / per_rank
        share = seconds.weights / seconds.block[1] if seconds.block[1] else 0.0
        weight = backward * share
        cost = StageCost(forward=forward, input=backward - weight, weight=weight)
        size = PipelineShape(ranks=flow.ranks, stages_per_rank=per_rank, microbatches=micro_batches)
        form = SCHEDULES[name].cost.bubble(size, cost, 0)
        if form is not None and form.relation is Relation.AT_LEAST and micro_batches < flow.ranks:
            form = None  # a bound of what waits where the pipeline is never full
        idle = self._simulated(name, size) * (forward + backward) / 3 if form is None else form.idle
        return idle * min(1.0, others / ((flow.ranks - 1) * sum(busy)))

    def _simulated(self, name: ScheduleName, size: PipelineShape) -> float:
        """Return what waits in units of a third of a micro-batch's passes on a stage, which are
        equal; of no more micro-batches than it takes until each waits as the one before."""
        number = min(size.microbatches, _ROUNDS * size.ranks)
        key = (name, size.ranks, size.stages_per_rank, number)
        if key not in self.waits:
            planned = schedule(name, replace(size, microbatches=number))
            makespan = simulate(planned, equal_stages(planned)).makespan
            self.waits[key] = makespan - 3 * number * size.stages_per_rank
        return self.waits[key]


@dataclass(frozen=True)
class FlowGroup:
    """The flows over as many ranks that take as many micro-batches: what they have is asked once,
    of however many blocks."""

    model: PipelineFlows
    flows: Sequence[PipelineFlow]
    micro_batches: int

    @cached_property
    def in_halves(self) -> Array:
        """Return of which flows backward passes are halves, most of them: of dualpipev those are
        whole that are beside forward passes."""
        return numpy().array(
            [
                through_of(flow.choice) is Through.HALVES
                and not (flow.schedule and SCHEDULES[flow.schedule].is_mostly_whole)
                for flow in self.flows
            ]
        )

    @cached_property
    def computes_alone(self) -> Array:
        """Return in which flows each rank computes alone, while all others wait."""
        return numpy().array([flow.is_serial for flow in self.flows])

    @cached_property
    def moments(self) -> FlowMoments:
        """Return when the ranks may be fullest, flow by flow."""
        return self.model.moments(self.flows, self.micro_batches)

    @cached_property
    def places(self) -> Array:
        """Return what the ranks have, flow by flow."""
        return self.model.places(self.flows)


class DataTable:
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
        self._stacked: dict[bool, Any] = {}

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def choice(self, row: int) -> AxisChoice:
        """Return the choice that a row is of."""
        at = int(numpy().searchsorted(self.ends, row, side="right"))
        ways, degrees, indices = self.parts[at]
        start = int(self.ends[at]) - len(indices)
        return ways.choice(int(indices[row - start]), degrees)

    @cached_property
    def memory(self) -> tuple[Columns, Any]:
        """The columns of bytes of rows that differ in these, and which of them each row is like."""
        np = numpy()
        table = np.stack([self.columns[name] for name in OF_MEMORY], axis=1, dtype=np.float32)
        rows = table.view(f"V{table.strides[0]}").reshape(-1).tolist()  # bytes, which compare fast
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        where = np.array([places[row] for row in rows], dtype=int)
        unlike = np.frombuffer(b"".join(places), dtype=np.float32).reshape(-1, len(OF_MEMORY))
        return dict(zip(OF_MEMORY, np.ascontiguousarray(unlike.T), strict=True)), where

    def stacked_memory(self, *, is_many: bool) -> Any:
        """The same columns one below the other, of many micro-batches or of one alone."""
        if is_many not in self._stacked:
            self._stacked[is_many] = stacked(self.memory[0], is_many=is_many)
        return self._stacked[is_many]

    @cached_property
    def times(self) -> Any:
        """The columns of `OF_TIME`, one below the other."""
        return numpy().stack([self.columns[name] for name in OF_TIME])

    @cached_property
    def issues(self) -> Any:
        """These and the columns of `OF_ISSUE`, where hosts are known to take time."""
        return numpy().stack([self.columns[name] for name in (*OF_TIME, *OF_ISSUE)])


class BoundedPeaks:
    """Peaks of a table's rows by flow, where these are at most `most`, or, where none is so small,
    the least of all if that is below `least`; elsewhere they may be endless. Rows of the same bytes
    are asked about once, and no row of a flow with which it has at least more."""

    def __init__(self, table: DataTable, ranks: RankPeaks, most: float, least: float) -> None:
        self.table, self.ranks, self.least = table, ranks, least
        self.bounds = ranks.at_least(table.memory[0])
        self._bound = max(most, min(least, float(self.bounds.min())))
        self._known: Any = None
        self._open = numpy().nonzero(self.bounds <= self._bound)

    @property
    def is_open(self) -> bool:
        """Return whether there are pairs of a row and a flow whose peaks are to be known."""
        return len(self._open[0]) > 0

    @property
    def moments(self) -> int:
        """Return how many moments these have."""
        return int(self.ranks.moments.lengths[self._open[1]].sum())

    def pairs(self) -> OpenPairs:
        """Return these pairs."""
        rows = self.table.stacked_memory(is_many=self.ranks.is_many)
        return OpenPairs(self.ranks, rows, *self._open)

    def learn(self, peaks: Any) -> None:
        """Take in their peaks, and open what may have less than the least of them."""
        np, before = numpy(), self._bound
        if self._known is None:
            self._known = np.full(self.bounds.shape, np.inf, dtype=np.float32)
        self._known[self._open] = peaks
        self._bound = max(before, min(self.least, float(peaks.min())))
        self._open = np.nonzero((self.bounds <= self._bound) & (self.bounds > before))

    @property
    def peaks(self) -> Any:
        """Return what is known by row of the table and by flow; None where nothing is."""
        return None if self._known is None else self._known[self.table.memory[1]]

    @property
    def number(self) -> int:
        """Return how many peaks there are, known or not."""
        return len(self.table) * int(self.bounds.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBlock:
    """Candidates that differ in their flow and in their choices of the data axes alone: `rows` and
    `columns` are whose figures these are."""

    within: tuple[AxisChoice, ...]
    flows: Sequence[PipelineFlow]
    table: DataTable
    micro: int
    kept: Kept
    number: int
    untimed: int
    rows: Any
    columns: Any
    peaks: Any
    seconds: Any
    least: tuple[float, int, int] | None

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
