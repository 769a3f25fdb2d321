"""Pipelines of every size that each schedule takes, for the tests of schedules."""

from __future__ import annotations

from dataclasses import replace

from ptrain.axes.pipeline.catalogue import faults
from ptrain.axes.pipeline.schedule import PipelineShape, Schedule
from ptrain.axes.pipeline.simulate import Costs, StageCost, equal_stages
from ptrain.spec.pipeline import ScheduleName

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
    if not list(faults(name, pipeline(ranks, per_rank, microbatches)))
]
BY_NAME = {name: [size for other, size in GRID if other is name] for name in ScheduleName}


def costs_of(made: Schedule, cost: StageCost, **more: float) -> Costs:
    return replace(equal_stages(made, cost), **more)
