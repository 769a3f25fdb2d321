"""The flow of micro-batches through the ranks of a pipeline as a search needs it: what the ranks
that differ have, and what the schedule leaves idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.pipeline.bubble import closed_form
from ptrain.axes.pipeline.catalogue import schedule
from ptrain.axes.pipeline.cost import PipelineSize, chunks_in_flight
from ptrain.axes.pipeline.cost import stages_of as stages_of_rank
from ptrain.axes.pipeline.form import stages_of
from ptrain.axes.pipeline.schedule import PipelineShape
from ptrain.axes.pipeline.simulate import StageCost, equal_stages, simulate
from ptrain.axes.pipeline.stage_facts import layers
from ptrain.facts.model import ModelFacts
from ptrain.selection.profile import Seconds
from ptrain.selection.score import Place, Step
from ptrain.spec.axis import Axis
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec

_ROUNDS = 3  # of as many micro-batches as stages: then a schedule's waits are all there


@dataclass(frozen=True)
class Flows:
    """The flows of one model's candidates; each cut is made once."""

    base: Spec
    facts: ModelFacts
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waits: dict[tuple[object, ...], float] = field(default_factory=dict)

    def step(self, choice: AxisChoice, micro_batches: int) -> Step:
        """Return what the ranks have: without a pipeline one for all."""
        ranks = choice.degree(Axis.PP)
        if ranks == 1:
            number = len(layers(self.base, self.facts).layers)
            whole = Place(layers=number, has_front=True, has_behind=True, in_flight=1)
            return Step(
                places=(whole,), micro_batches=micro_batches, stages_per_rank=1, is_pipeline=False
            )
        spec = chosen(self.base, (choice,))
        stages = spec.pipeline.stages_over(ranks)
        assert isinstance(spec.pipeline.schedule, ScheduleName), "a schedule with a name"
        per_rank, name = stages // ranks, spec.pipeline.schedule
        size = PipelineSize(
            schedule=name, ranks=ranks, stages_per_rank=per_rank, microbatches=micro_batches
        )
        counts = self._counts(spec, stages)
        different = dict.fromkeys((0, 1, ranks // 2, ranks - 1))
        places = [self._place(size, rank, counts) for rank in different]
        return Step(
            places=places,
            micro_batches=micro_batches,
            stages_per_rank=per_rank,
            is_pipeline=True,
        )

    def _counts(self, spec: Spec, stages: int) -> tuple[int, ...]:
        if stages not in self.cuts:
            cut = stages_of(spec, layers(spec, self.facts))
            self.cuts[stages] = tuple(len(stage.layers) for stage in cut)
        return self.cuts[stages]

    @staticmethod
    def _place(size: PipelineSize, rank: int, counts: Sequence[int]) -> Place:
        own = stages_of_rank(size, rank)
        return Place(
            layers=sum(counts[stage] for stage in own),
            has_front=0 in own,
            has_behind=len(counts) - 1 in own,
            in_flight=chunks_in_flight(size, rank) / size.stages_per_rank,
            boundaries=size.stages_per_rank,
        )

    def idle(self, choice: AxisChoice, step: Step, seconds: Seconds, busy: tuple[float, float]) -> float:
        """Return the seconds that the rank which waits most waits in a step, of equal stages that
        take as long as the longest; `busy` are its forward and backward of a micro-batch."""
        spec, ranks = chosen(self.base, (choice,)), choice.degree(Axis.PP)
        if ranks == 1:
            return 0.0
        name = spec.pipeline.schedule
        assert isinstance(name, ScheduleName), "a schedule with a name"
        per_rank = step.stages_per_rank
        forward, backward = busy[0] / per_rank, busy[1] / per_rank
        share = seconds.weights / seconds.block[1] if seconds.block[1] else 0.0
        weight = backward * share
        cost = StageCost(forward=forward, input=backward - weight, weight=weight)
        size = PipelineShape(
            ranks=ranks, stages_per_rank=per_rank, microbatches=step.micro_batches
        )
        form = closed_form(name, size, cost)
        if form is not None:
            return form.idle
        return self._simulated(name, size) * (forward + backward) / 3

    def _simulated(self, name: ScheduleName, size: PipelineShape) -> float:
        """Return what waits in units of a third of a micro-batch's passes on a stage, which are
        equal; of no more micro-batches than it takes until each waits as the one before."""
        number = min(size.microbatches, _ROUNDS * size.ranks)
        key = (name, size.ranks, size.stages_per_rank, number)
        if key not in self.waits:
            shape = PipelineShape(
                ranks=size.ranks, stages_per_rank=size.stages_per_rank, microbatches=number
            )
            planned = schedule(name, shape)
            makespan = simulate(planned, equal_stages(planned)).makespan
            self.waits[key] = makespan - 3 * number * size.stages_per_rank
        return self.waits[key]
