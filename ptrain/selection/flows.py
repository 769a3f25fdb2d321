"""How a search's candidates cut their blocks and go through their stages: what the ranks of a
pipeline that differ have, and how long the schedule leaves them idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.expert.cost import rows_bytes
from ptrain.axes.pipeline.catalogue import SCHEDULES, schedule, size_of, stages_of
from ptrain.axes.pipeline.cost import PipelineSize, Relation
from ptrain.axes.pipeline.cost import stages_of as stages_of_rank
from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.axes.pipeline.simulate import equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import layers
from ptrain.cost import Collective
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Layers
from ptrain.selection.bound import FlowSeconds, RankShare
from ptrain.selection.profile import (
    Activity,
    IssueSeconds,
    Links,
    Seconds,
    Sizes,
    activity_of,
    exchange_seconds,
    with_rows,
)
from ptrain.selection.space import Through, batched, through_of
from ptrain.selection.task import SearchTask
from ptrain.spec.activations import Kept
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.rates import Hook, OperatorKind
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
    links: Links
    devices: int
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    known: dict[tuple[object, ...], tuple[RankShare, ...]] = field(default_factory=dict)
    waits: dict[tuple[object, ...], float] = field(default_factory=dict)

    @cached_property
    def _layers(self) -> Layers:
        return layers(self.base, self.facts)

    @cached_property
    def num_layers(self) -> int:
        """Return the layers of the model."""
        return len(self._layers.layers)

    def shares(self, flow: PipelineFlow, number: int) -> tuple[RankShare, ...]:
        """Return what unlike ranks have, of so many micro-batches: the first, the one with
        most layers in the middle, and the last."""
        key = (*flow.shape, number)
        if key not in self.known:
            self.known[key] = tuple(dict.fromkeys(self._shares(flow, number)))
        return self.known[key]

    def _shares(self, flow: PipelineFlow, number: int) -> Iterator[RankShare]:
        size, counts = flow.size(number), self._counts(flow)
        total, is_split = number * flow.per_rank, through_of(flow.choice) is Through.HALVES
        is_split &= not (flow.schedule and SCHEDULES[flow.schedule].is_mostly_whole)
        own = [stages_of_rank(size, rank) for rank in range(flow.ranks)]
        held = [sum(counts[stage] for stage in stages) for stages in own]
        middle = max(range(1, flow.ranks - 1), key=held.__getitem__, default=0)
        for rank in (0, middle, flow.ranks - 1):
            chunks = size.cost.in_flight(size, rank)
            behind = len(counts) - 1 in own[rank]
            yield RankShare(
                layers=held[rank],
                own=max(counts[stage] for stage in own[rank]),
                stages=flow.per_rank,
                front=0 in own[rank],
                behind=behind,
                is_staged=flow.schedule is not None,
                chunks=chunks,
                later=min(chunks, total - flow.per_rank),
                halved=min(rank, chunks - 1) if is_split else 0,  # weights lag so far behind
                # a micro-batch that comes to the last stage goes back at once, but where all do
                ends=1.0 if behind and chunks < total else chunks / flow.per_rank,
            )

    def _counts(self, flow: PipelineFlow) -> tuple[int, ...]:
        if flow.schedule is None:
            return (self.num_layers,)
        stages = flow.ranks * flow.per_rank
        if stages not in self.cuts:
            cut = stages_of(chosen(self.base, (flow.choice,)), self._layers)
            self.cuts[stages] = tuple(len(stage.layers) for stage in cut)
        return self.cuts[stages]

    def seconds(
        self, flow: PipelineFlow, number: int, seconds: Seconds, sizes: Sizes, hidden: int
    ) -> FlowSeconds:
        """Return what the rank that computes most takes, whatever is done on the data axes."""
        shares = self.shares(flow, number)
        passes = [_passes(share, seconds) for share in shares]
        busy = max(passes, key=sum)
        share = shares[passes.index(busy)]
        root = share.front * sizes.front
        root += share.behind * (sizes.behind + share.is_staged * sizes.copied)
        layout = self.base.precision.effective
        added, filled = (
            self.links.operator(OperatorKind.POINTWISE, size * root) if root else 0.0
            for size in (3 * layout.parameters.itemsize, layout.reduced.itemsize)
        )
        return FlowSeconds(
            number=number,
            layers=share.layers,
            stages=share.stages,
            root=root,
            block=sizes.block,
            root_added=added,
            root_filled=filled,
            forward=seconds.block[0],
            backward=seconds.block[1],
            computing=number * sum(busy),
            moving=_moving(share, seconds),
            idle=self._idle(flow, number, seconds, busy) + self._crossing(flow, number, hidden),
            issued=self._issued(shares, number, seconds),
        )

    def _issued(self, shares: tuple[RankShare, ...], number: int, seconds: Seconds) -> float:
        """Return how long the host that issues for longest does, but for what it sends."""
        if (issuing := seconds.issuing) is None:
            return 0.0
        most = max(sum(_passes(share, issuing)) for share in shares)
        stages = shares[0].stages * shares[0].is_staged
        hook = self.links.pace.hook_seconds(Hook.PIPELINE_PASS) if stages else 0.0
        return number * (most + 2 * stages * hook)

    def _crossing(self, flow: PipelineFlow, number: int, hidden: int) -> float:
        """Return how long activations and their gradients are awaited that go from stage to
        stage."""
        if flow.schedule is None:
            return 0.0
        once = self.links.seconds(Collective.SEND, 2, self.devices // flow.ranks, hidden)
        return 2 * flow.crossings(number, overlaps=self.links.pace.overlaps) * once

    def _idle(
        self, flow: PipelineFlow, number: int, seconds: Seconds, busy: tuple[float, float]
    ) -> float:
        """Return the seconds that the rank which waits most waits in a step, `busy` being the
        forward and backward passes of the longest of a micro-batch: by the literature's formulas
        of equal stages, as far as the others are shorter."""
        name, per_rank = flow.schedule, flow.per_rank
        if name is None or not any(busy):  # or nobody knows the seconds of an operation
            return 0.0
        others = self.num_layers * sum(seconds.block) + sum(seconds.front) + sum(seconds.behind)
        others -= sum(busy)
        if flow.is_serial:  # it waits while all others compute
            return number * others
        forward, backward = busy[0] / per_rank, busy[1] / per_rank
        share = seconds.weights / seconds.block[1] if seconds.block[1] else 0.0
        weight = backward * share
        cost = StageCost(forward=forward, input=backward - weight, weight=weight)
        size = PipelineShape(ranks=flow.ranks, stages_per_rank=per_rank, microbatches=number)
        form = SCHEDULES[name].cost.bubble(size, cost, 0)
        if form is not None and form.relation is Relation.AT_LEAST and number < flow.ranks:
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


def _passes(share: RankShare, seconds: Seconds | IssueSeconds) -> tuple[float, float]:
    """Return what a rank computes of a micro-batch, forward and backward; or issues."""
    forward, backward = (
        share.layers * seconds.block[way]
        + share.front * seconds.front[way]
        + share.behind * seconds.behind[way]
        for way in (0, 1)
    )
    return forward, backward


def _moving(share: RankShare, seconds: Seconds) -> float:
    """Return for how long a rank waits, in a micro-batch, for activations that leave the device and
    come back: the last block's are back when all have left, and each other's set out with the block
    behind it."""
    out, back = seconds.moved
    layers, stages = share.layers, share.stages
    between = share.behind * sum(seconds.behind) + (layers - stages) * seconds.block[0]
    slower = max(0.0, back - seconds.block[1])
    return max(0.0, layers * out - between) + stages * back + (layers - stages) * slower
