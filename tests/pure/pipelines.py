"""Pipelines of every size that each schedule takes, for the tests of schedules."""

from __future__ import annotations

from ptrain.axes.pipeline.catalogue import schedule_faults, size_of
from ptrain.axes.pipeline.cost import PipelineSize
from ptrain.axes.pipeline.schedule import PipelineShape, Schedule, StageCost
from ptrain.axes.pipeline.simulate import Costs, equal_stages
from ptrain.axes.pipeline.stage_facts import count_in_flight
from ptrain.spec.pipeline import ScheduleName
from ptrain.steps.step import Pipeline

ONE_STAGE = (ScheduleName.NAIVE, ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B)
VEES = (ScheduleName.ZBV, ScheduleName.DUALPIPEV)


def pipeline(ranks: int, stages_per_rank: int, microbatches: int) -> PipelineShape:
    return PipelineShape(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches)


def stages_per_rank(name: ScheduleName) -> tuple[int, ...]:
    if name in VEES:
        return (2,)
    return (1,) if name in ONE_STAGE else (1, 2, 3)


GRID = [
    (name, pipeline(ranks, per_rank, microbatches))
    for name in ScheduleName
    for per_rank in stages_per_rank(name)
    for ranks in (1, 2, 3, 4)
    for microbatches in (1, 2, 3, 4, 5, 6, 8, 10, 12)
    if not list(schedule_faults(name, pipeline(ranks, per_rank, microbatches)))
]
BY_NAME = {name: [size for other, size in GRID if other is name] for name in ScheduleName}


def size_of_step(step: Pipeline, microbatches: int) -> PipelineSize:
    """The size of a plan's pipeline; there are no closed forms of a list of one's own."""
    assert isinstance(step.schedule, ScheduleName), "a schedule with a name"
    ranks = 1 + max(step.rank_of)
    return size_of(step.schedule, pipeline(ranks, step.stages // ranks, microbatches))


def costs_of(made: Schedule, cost: StageCost, **more: float) -> Costs:
    return equal_stages(made, cost)._replace(**more)


def most_held(schedule: Schedule, rank: int, sizes: dict[int, int] | None = None) -> int:
    """The most that a rank holds at once: micro-batches over all of its stages; with `sizes`, by
    stage, of one micro-batch's activations, in their unit."""
    return max(
        sum(count * (sizes[stage] if sizes else 1) for stage, count in counts.items())
        for counts in count_in_flight(schedule, rank)
    )
