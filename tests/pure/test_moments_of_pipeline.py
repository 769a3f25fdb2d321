"""When a rank of a pipeline is fullest, in closed form, against every pass of the schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from ptrain.axes.pipeline.catalogue import faults, schedule, size_of
from ptrain.axes.pipeline.cost import PipelineSize, stages_of
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.selection import peaks as search
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind
from tests.pure.pipelines import VEES, pipeline, stages_per_rank

_BEGINS = (Kind.BACKWARD, Kind.INPUT)
_GIVES = (Kind.BACKWARD, Kind.WEIGHT)


def passes(planned: Schedule, rank: int, sizes: dict[int, int]) -> Iterator[tuple[bool, float]]:
    """Yield, as each backward pass of a rank begins, whether all of its stages have summed a
    gradient, and what it holds: of each micro-batch its stage's size, and twice that between two
    halves."""
    own = planned.stages_of(rank)
    held, graded = dict.fromkeys(own, 0), dict.fromkeys(own, False)
    for step in planned.orders[rank]:
        for part in step.parts:
            held[part.stage] += part.kind is Kind.FORWARD
        for part in step.parts:
            if part.kind in _BEGINS:
                yield all(graded.values()), sum(held[s] * sizes[s] for s in own)
            held[part.stage] += part.kind is Kind.INPUT
            held[part.stage] -= 2 * (part.kind is Kind.WEIGHT) + (part.kind is Kind.BACKWARD)
            graded[part.stage] |= part.kind in _GIVES


def fullest(pairs: Sequence[tuple[bool, float]]) -> dict[bool, float]:
    """The most that is held before all stages have gradients, and behind that."""
    most = {False: 0.0, True: 0.0}
    for is_graded, held in pairs:
        most[is_graded] = max(most[is_graded], held)
    return most


def sizes_of(name: ScheduleName) -> Iterator[PipelineSize]:
    for ranks in (2, 3, 4, 8):
        for per_rank in stages_per_rank(name):
            for number in (1, 2, 3, 4, 5, 7, 8, 16, 33):
                shape = pipeline(ranks, per_rank, number)
                if not list(faults(name, shape)):
                    yield size_of(name, shape)


@pytest.mark.parametrize("name", ScheduleName)
def test_no_pass_of_a_schedule_is_fuller_than_its_moments_and_one_is_as_full(name):
    draw = random.Random(1)
    for size in sizes_of(name):
        planned = schedule(name, size)
        for rank in range(size.ranks):
            own = stages_of(size, rank)
            sizes = {stage: draw.choice((1, 2, 5)) for stage in own}
            closed = [
                (
                    all(moment.graded),
                    sum(
                        (whole + 2 * half) * sizes[stage]
                        for whole, half, stage in zip(moment.whole, moment.halved, own, strict=True)
                    ),
                )
                for moment in size.cost.moments(size, rank)
            ]
            is_bound = name is ScheduleName.DUALPIPEV and size.microbatches == 2 * size.ranks
            played = fullest(list(passes(planned, rank, sizes)))
            for is_graded, held in fullest(closed).items():
                # with as few micro-batches as can be the first rank of dualpipev has no pair left
                # when all of its stages have gradients
                assert held >= played[is_graded] and (is_bound or held == played[is_graded])


@pytest.mark.parametrize("name", ScheduleName)
def test_the_stage_of_a_moments_pass_holds_its_micro_batch(name):
    for size in sizes_of(name):
        for rank in range(size.ranks):
            for moment in size.cost.moments(size, rank):
                assert moment.whole[moment.on] > 0
                assert moment.is_half is False or name in (ScheduleName.ZERO_BUBBLE, *VEES)


@pytest.mark.parametrize("name", ScheduleName)
def test_with_more_micro_batches_than_a_search_asks_about_a_rank_is_as_full(name):
    draw = random.Random(str(name))
    for ranks in (1, 2, 3, 5, 8, 13):
        for per_rank in stages_per_rank(name):
            counts = [draw.choice((2, 3)) for _ in range(ranks * per_rank)]
            size = size_of(name, pipeline(ranks, per_rank, 16 * ranks))
            fewer = replace(size, microbatches=search.unlike(size))
            assert search.fullest(size, counts) == search.fullest(fewer, counts)
