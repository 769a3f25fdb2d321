"""The schedules by name: how each is made, and what it needs of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from ptrain.axes.pipeline import loops, vees
from ptrain.axes.pipeline.form import pipeline_of
from ptrain.axes.pipeline.schedule import PipelineShape, Schedule, Step, looped, v_shaped
from ptrain.axes.pipeline.user_schedule import as_schedule, faults_of_list
from ptrain.errors import Fault, SpecError
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.schedule_file import ListedSchedule
from ptrain.spec.spec import Spec
from ptrain.units import counted

Need = Callable[[ScheduleName, PipelineShape], Iterator[Fault]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    order: Callable[[PipelineShape, int], Iterator[Step]]
    rank_of: Callable[[PipelineShape], tuple[int, ...]]
    needs: tuple[Need, ...]


@lru_cache(maxsize=16)  # a command asks for the same one a few times
def schedule(name: ScheduleName | ListedSchedule, pipeline: PipelineShape) -> Schedule:
    """Return the schedule of that name, or the listed one. Raises SpecError where it needs another
    number of stages or micro-batches, and where a list is no schedule."""
    problems = tuple(faults(name, pipeline))
    if problems:
        raise SpecError(*problems)
    if isinstance(name, ListedSchedule):
        return as_schedule(name)
    recipe = _RECIPES[name]
    return Schedule(
        microbatches=pipeline.microbatches,
        rank_of=recipe.rank_of(pipeline),
        orders=tuple(tuple(recipe.order(pipeline, rank)) for rank in range(pipeline.ranks)),
    )


def schedule_of(spec: Spec) -> Schedule:
    """Return the schedule of a legal spec with pp."""
    size = pipeline_of(spec)
    assert size is not None, "a spec with pp"
    return schedule(spec.pipeline.schedule, size)


def faults(name: ScheduleName | ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    """Yield what this pipeline lacks for the schedule."""
    sizes = (pipeline.ranks, pipeline.stages_per_rank, pipeline.microbatches)
    assert min(sizes) >= 1, f"a pipeline of {sizes}"
    if isinstance(name, ListedSchedule):
        yield from faults_of_list(name, pipeline)
        return
    for need in _RECIPES[name].needs:
        yield from need(name, pipeline)


def takes_any_stages(name: ScheduleName | ListedSchedule) -> bool:
    """Return whether a rank may have any number of stages."""
    return name in _ANY_STAGES


def _stages_per_rank(number: int) -> Need:
    def need(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
        if pipeline.stages_per_rank != number:
            yield Fault(
                place="pipeline.stages",
                finding=f"{name} has {counted(number, 'stage')} a rank, and "
                f"{pipeline.stages} over pp={pipeline.ranks} are {pipeline.stages_per_rank}",
                remedy=f"write {number * pipeline.ranks}, or a schedule over any number a rank: "
                f"{', '.join(_ANY_STAGES)}",
            )

    return need


def _fills_the_stages(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    return _at_least(pipeline.stages, "as many as stages", (name, ScheduleName.GPIPE), pipeline)


def _fills_the_v(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    return _at_least(2 * pipeline.ranks, "two a rank", (name, ScheduleName.ZBV), pipeline)


def _at_least(
    least: int, why: str, names: tuple[ScheduleName, ScheduleName], pipeline: PipelineShape
) -> Iterator[Fault]:
    """`names`: the schedule that needs them, and one that does not."""
    name, instead = names
    if pipeline.microbatches < least:
        yield Fault(
            place="pipeline.schedule",
            finding=f"{name} needs {least} micro-batches a step ({why}), and there are "
            f"{pipeline.microbatches}",
            remedy=f"raise batch.global or lower batch.micro until there are {least}, or write "
            f"{instead}",
        )


def _equal_rounds(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    microbatches = pipeline.microbatches
    if _are_equal_rounds(microbatches, pipeline):
        return
    # both walks end at a multiple of p, with rounds of p each
    fewer = next(m for m in range(microbatches, 0, -1) if _are_equal_rounds(m, pipeline))
    more = next(m for m in count(microbatches) if _are_equal_rounds(m, pipeline))
    yield Fault(
        place="pipeline.schedule",
        finding=f"{name} takes the micro-batches in equal rounds of pp={pipeline.ranks} or a few "
        f"more, and there are {microbatches}",
        remedy=f"make them {fewer} or {more}, by batch.global or batch.micro",
    )


def _are_equal_rounds(microbatches: int, pipeline: PipelineShape) -> bool:
    return microbatches % loops.rounds(microbatches, pipeline.ranks) == 0


_ANY_STAGES = (ScheduleName.BFS, ScheduleName.INTERLEAVED, ScheduleName.ZERO_BUBBLE)

_RECIPES = {
    ScheduleName.NAIVE: _Recipe(
        order=loops.naive,
        rank_of=looped,
        needs=(_stages_per_rank(1),),
    ),
    ScheduleName.GPIPE: _Recipe(
        order=loops.gpipe,
        rank_of=looped,
        needs=(_stages_per_rank(1),),
    ),
    ScheduleName.ONE_F_ONE_B: _Recipe(
        order=loops.one_forward_one_backward,
        rank_of=looped,
        needs=(_stages_per_rank(1), _fills_the_stages),
    ),
    ScheduleName.BFS: _Recipe(order=loops.breadth_first, rank_of=looped, needs=()),
    ScheduleName.INTERLEAVED: _Recipe(
        order=loops.interleaved, rank_of=looped, needs=(_equal_rounds,)
    ),
    ScheduleName.ZERO_BUBBLE: _Recipe(
        order=loops.zero_bubble, rank_of=looped, needs=(_equal_rounds,)
    ),
    ScheduleName.ZBV: _Recipe(order=vees.zbv, rank_of=v_shaped, needs=(_stages_per_rank(2),)),
    ScheduleName.DUALPIPEV: _Recipe(
        order=vees.dualpipev,
        rank_of=v_shaped,
        needs=(_stages_per_rank(2), _fills_the_v),
    ),
}
