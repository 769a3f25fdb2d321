"""How a search's candidates go through their stages: what the ranks of a pipeline that differ have,
and how long the schedule leaves them idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.pipeline.catalogue import SCHEDULES, schedule, size_of, stages_of
from ptrain.axes.pipeline.cost import PipelineSize
from ptrain.axes.pipeline.cost import stages_of as stages_of_rank
from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.axes.pipeline.simulate import equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import layers
from ptrain.cost import Collective
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Layers
from ptrain.selection.bound import FlowSeconds, RankShare
from ptrain.selection.profile import Links, PassSums, Sizes
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind

_ROUNDS = 3  # of as many micro-batches as ranks: then a schedule's waits are all there


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFlow:
    """One choice of the pipeline's: ranks, stages on each, and its schedule (None of one rank)."""

    choice: AxisChoice
    ranks: int
    per_rank: int
    schedule: ScheduleName | None

    @property
    def is_serial(self) -> bool:
        """Return True if one rank at a time computes."""
        return self.schedule is not None and SCHEDULES[self.schedule].is_serial

    def size(self, micro_batches: int) -> PipelineSize:
        """Return it with so many micro-batches; a rank alone has one of them at a time."""
        shape = PipelineShape(
            ranks=self.ranks, stages_per_rank=self.per_rank, microbatches=micro_batches
        )
        return size_of(self.schedule or ScheduleName.NAIVE, shape)


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
        key = (flow.schedule, flow.ranks, flow.per_rank, number)
        if key not in self.known:
            self.known[key] = tuple(dict.fromkeys(self._shares(flow, number)))
        return self.known[key]

    def _shares(self, flow: PipelineFlow, number: int) -> Iterator[RankShare]:
        size, counts = flow.size(number), self._counts(flow)
        own = [stages_of_rank(size, rank) for rank in range(flow.ranks)]
        held = [sum(counts[stage] for stage in stages) for stages in own]
        middle = max(range(1, flow.ranks - 1), key=held.__getitem__, default=0)
        for rank in (0, middle, flow.ranks - 1):
            behind, moments = len(counts) - 1 in own[rank], _fullest(_few(size), rank)
            for chunks, lagging in moments or ((size.cost.in_flight(size, rank), 0),):
                is_all_first = chunks >= number * flow.per_rank  # all forwards, then all backwards
                yield RankShare(
                    layers=held[rank],
                    stages=flow.per_rank,
                    front=0 in own[rank],
                    behind=behind,
                    is_staged=flow.schedule is not None,
                    is_split=bool(moments),
                    chunks=chunks,
                    lagging=lagging,
                    later=min(chunks, (number - 1) * flow.per_rank),
                    waiting=(number - 1) * (behind and is_all_first),
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
        self, flow: PipelineFlow, number: int, sums: PassSums, sizes: Sizes, hidden: float
    ) -> FlowSeconds:
        """Return what the rank that computes most takes, whatever is done on the data axes.
        `hidden`: bytes that go from stage to stage."""
        shares = self.shares(flow, number)
        passes = [_passes(share, sums) for share in shares]
        busy = max(passes, key=lambda of_rank: of_rank[0] + of_rank[1])
        share = shares[passes.index(busy)]
        forward, backward, _ = busy
        hook = self.links.pace.hook_seconds(Hook.PIPELINE_PASS) * share.is_staged
        issued = number * (max(host for *_, host in passes) + 2 * share.stages * hook)
        return FlowSeconds(
            number=number,
            layers=share.layers,
            stages=share.stages,
            root=share.root(sizes),
            forward=sums.block[0],
            backward=sums.block[1],
            computing=number * (forward + backward),
            moving=_moving(share, sums),
            idle=self._idle(flow, number, sums, (forward, backward))
            + self._crossing(flow, number, hidden),
            issued=issued * self.links.is_issued,
        )

    def _crossing(self, flow: PipelineFlow, number: int, hidden: float) -> float:
        """Return how long activations and their gradients are awaited that go from stage to
        stage."""
        if flow.schedule is None:
            return 0.0
        times = flow.ranks - 1
        if flow.is_serial:
            times *= number
        elif not self.links.pace.overlaps:  # a rank awaits what it sends itself, too
            times += number * flow.per_rank
        return (
            2 * times * self.links.seconds(Collective.SEND, 2, self.devices // flow.ranks, hidden)
        )

    def _idle(
        self, flow: PipelineFlow, number: int, sums: PassSums, busy: tuple[float, float]
    ) -> float:
        """Return the seconds that the rank which waits most waits in a step, `busy` being the
        forward and backward passes of the longest of a micro-batch: by the literature's formulas
        of equal stages, as far as the others are shorter."""
        name, per_rank = flow.schedule, flow.per_rank
        if name is None or not any(busy):  # or nobody knows the seconds of an operation
            return 0.0
        others = self.num_layers * sum(sums.block[:2]) + sum(sums.front[:2]) + sum(sums.behind[:2])
        others -= sum(busy)
        if flow.is_serial:  # it waits while all others compute
            return number * others
        forward, backward = busy[0] / per_rank, busy[1] / per_rank
        share = sums.weights / sums.block[1] if sums.block[1] else 0.0
        weight = backward * share
        cost = StageCost(forward=forward, input=backward - weight, weight=weight)
        size = flow.size(number)
        form = size.cost.bubble(size, cost, 0)
        idle = _simulated(_few(size)) * (forward + backward) / 3 if form is None else form.idle
        return idle * min(1.0, others / ((flow.ranks - 1) * sum(busy)))


def _few(size: PipelineSize) -> PipelineSize:
    """Return the pipeline with no more micro-batches than it takes until all rounds are alike."""
    return replace(size, microbatches=min(size.microbatches, _ROUNDS * size.ranks))


@cache
def _fullest(size: PipelineSize, rank: int) -> tuple[tuple[int, int], ...]:
    """Return how many chunks a rank has at its fullest moments, and how many of these lack the
    gradients of weights alone; nothing where no backward pass is split. The first stage computes
    both gradients at once."""
    chunks = lagging = 0
    moments, kinds = set[tuple[int, int]](), set[Kind]()
    for step in SCHEDULES[size.schedule].order(size, rank):
        for kind, stage, _ in step.parts:
            kinds.add(kind)
            chunks += (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.WEIGHT))
            lagging += (stage > 0) * ((kind is Kind.INPUT) - (kind is Kind.WEIGHT))
            moments.add((chunks, lagging))
    highest, fullest = -1, list[tuple[int, int]]()
    for some, late in sorted(moments, reverse=True) if Kind.INPUT in kinds else ():
        if late > highest:
            fullest.append((some, late))
            highest = late
    return tuple(fullest)


@cache
def _simulated(size: PipelineSize) -> float:
    """Return what waits in units of a third of a micro-batch's passes on a stage, which are
    equal."""
    planned = schedule(size.schedule, size)
    makespan = simulate(planned, equal_stages(planned)).makespan
    return makespan - 3 * size.microbatches * size.stages_per_rank


def _passes(share: RankShare, sums: PassSums) -> tuple[float, ...]:
    """Return what a rank computes of a micro-batch, forward and backward, and what its host
    issues."""
    parts = zip(sums.block, sums.front, sums.behind, strict=True)
    return tuple(share.layers * a + share.front * b + share.behind * c for a, b, c in parts)


def _moving(share: RankShare, sums: PassSums) -> float:
    """Return for how long a rank waits, in a micro-batch, for activations that leave the device and
    come back: the last block's are back when all have left, and each other's set out with the block
    behind it."""
    out, back = sums.moved
    layers, stages = share.layers, share.stages
    between = share.behind * sum(sums.behind[:2]) + (layers - stages) * sums.block[0]
    slower = max(0.0, back - sums.block[1])
    return max(0.0, layers * out - between) + stages * back + (layers - stages) * slower
