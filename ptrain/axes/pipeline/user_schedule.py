"""A schedule that the user lists, pass by pass: proven by the simulator before it runs, or refused
with the place where it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ptrain.axes.pipeline.schedule import Action, Pair, PipelineShape, Schedule, Step
from ptrain.axes.pipeline.simulate import simulate
from ptrain.errors import BrokenSchedule, Fault
from ptrain.spec.schedule_file import ListedSchedule, Pass

_PLACE = "pipeline.schedule"


def as_schedule(listed: ListedSchedule) -> Schedule:
    """A list in which `faults_of_list` finds none."""
    rank_of = _ranks(listed)
    return Schedule(
        microbatches=listed.microbatches,
        rank_of=tuple(rank_of[stage] for stage in range(listed.stages)),
        orders=tuple(tuple(map(_step, order)) for order in listed.orders),
    )


def faults_of_list(listed: ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    """Yield why the list is no step of this pipeline: other ranks, stages or micro-batches, or the
    first place that is wrong or that nobody gets past."""
    sizes = [*faults_of_rows(listed, pipeline.ranks), *_sizes(listed, pipeline)]
    yield from sizes
    if sizes:
        return
    schedule = as_schedule(listed)
    try:
        simulate(schedule)
    except BrokenSchedule as broken:
        order = schedule.orders[broken.rank]
        places = [place for place, step in enumerate(order) if _is_of(broken.action, step)]
        place = f"action {places[-1] + 1} of {len(order)}" if places else "in no place"
        yield Fault(
            place=_PLACE,
            finding=f"rank {broken.rank}, {place}, {broken.action}: {broken.reason}",
            remedy="list on every stage each micro-batch once forward and once backward (B, or I "
            "and later W), each pass after those it needs",
        )


def faults_of_rows(listed: ListedSchedule, ranks: int) -> Iterator[Fault]:
    """Rows that are not those of so many ranks, each with as many stages as the others."""
    rows, rank_of = len(listed.rows), _ranks(listed)
    missing = [stage for stage in range(listed.stages) if stage not in rank_of]
    counts = Counter(rank_of.values())
    if rows != ranks:
        yield Fault(
            place=_PLACE,
            finding=f"the list has {rows} row{'s' * (rows > 1)}, and pp={ranks} ranks",
            remedy=f"list a row for each rank, or write mesh.pp={rows}",
        )
    elif missing:
        finding = f"stage {missing[0]} is in no row, and the list has stage {listed.stages - 1}"
        yield Fault(place=_PLACE, finding=finding, remedy="count stages from 0")
    elif len(set(counts.values())) > 1 or len(counts) < ranks:
        of_ranks = ", ".join(str(counts[rank]) for rank in range(ranks))
        finding = f"the ranks have {of_ranks} stages, and each needs as many as the others"
        yield Fault(place=_PLACE, finding=finding, remedy="list as many stages in every row")


def _sizes(listed: ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    if listed.stages != pipeline.stages:
        finding = f"the list has {listed.stages} stages, and the pipeline {pipeline.stages}"
        yield Fault(place="pipeline.stages", finding=finding, remedy="remove pipeline.stages")
    there, wanted = listed.microbatches, pipeline.microbatches
    if there != wanted:
        yield Fault(
            place=_PLACE,
            finding=f"the list's micro-batches are 0 to {there - 1}, and a step has {wanted}",
            remedy=f"list {wanted}, or make them {there} by batch.global or batch.micro",
        )


def _ranks(listed: ListedSchedule) -> dict[int, int]:
    """Return by stage the first rank that has it; the simulator refuses a second one."""
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(listed.orders):
        for step in order:
            for _, stage, _ in step:
                rank_of.setdefault(stage, rank)
    return rank_of


def _step(passes: tuple[Pass, ...]) -> Step:
    actions = [Action(*fields) for fields in passes]
    return actions[0] if len(actions) == 1 else Pair(*actions)


def _is_of(action: object, step: Step) -> bool:
    return action == step or action in step.parts
