"""The table of pipeline schedules: order of a rank, cost and requirements of each; and the pipeline
of a spec, its stages per rank and layers per stage.

Stages are balanced by time as if a device only multiplied matrices, at one rate. A matrix of n
elements costs a token 2n operations forward and 4n backward (the gradients of its input and of
itself). The scores of attention cost 4TH forward and 8TH backward for T tokens of width H, as in
Chowdhery et al. 2022 (PaLM), appendix B, although a causal kernel may do half. Embedding look-ups,
norms, other memory-bound operators and communication are free. A tied head multiplies like a
separate one. Only the matrices are known of a model that is not built in, not the scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, assert_never

from ptrain.axes.candidates import AxisChoice, AxisSpace, Written, divisors
from ptrain.axes.pipeline import cost, orders
from ptrain.axes.pipeline.cost import PipelineSize, ScheduleCost
from ptrain.axes.pipeline.schedule import (
    Action,
    Pair,
    PipelineShape,
    Schedule,
    Step,
    looped,
    v_shaped,
)
from ptrain.axes.pipeline.simulate import simulate
from ptrain.errors import BrokenSchedule, Fault, SpecError
from ptrain.facts.parameters import elements_met
from ptrain.facts.stages import Layers, Stage, Tensor, balanced, cut, evenly
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ListedSchedule, Pass, PipelineSpec, ScheduleName, SplitBy
from ptrain.spec.placement import Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec
from ptrain.units import counted

_OF_A_MATRIX, _OF_SCORES = 2 + 4, 4 + 8
_MATRICES = (2, 3)  # dimensions of a matrix, and of the matrices of all experts


def pipeline_of(spec: Spec) -> PipelineShape | None:
    """Ranks, stages on each and micro-batches of a step; None without pp, or where the ranks do
    not divide the stages."""
    ranks = spec.degree(Axis.PP)
    stages = spec.pipeline.stages_over(ranks)
    if ranks == 1 or stages < ranks or stages % ranks:
        return None
    return PipelineShape(
        ranks=ranks, stages_per_rank=stages // ranks, microbatches=spec.batch.accumulate
    )


def stages_text(stages: Sequence[int]) -> str:
    """`stage 1`, `stages 0 and 3`."""
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def stages_of(spec: Spec, model: Layers) -> tuple[Stage, ...]:
    """The stages as `pipeline.split` says, first to last. Raises SpecError where the model has not
    as many layers."""
    stages = spec.pipeline.stages_over(spec.degree(Axis.PP))
    match spec.pipeline.split:
        case SplitBy.PARAMETERS:
            counts = balanced(model.weights, stages, model.ends)
        case SplitBy.TIME:
            weights, ends = count_operations(spec, model)
            counts = balanced(weights, stages, ends)
        case SplitBy.LAYERS:
            counts = evenly(len(model.layers), stages)
        case tuple() as counts:
            pass
        case split:
            assert_never(split)
    return cut(model, counts)


def count_operations(spec: Spec, model: Layers) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Count the operations of one token: of each layer; before the first and after the last."""
    scores = 0
    if isinstance(spec.model, ModelShape):
        scores = _OF_SCORES * spec.batch.sequence * spec.model.hidden
    layers = tuple(_multiplying(spec, layer.tensors) + scores for layer in model.layers)
    tied = dict(model.tied)
    copies = [tensor for tensor in model.front if tensor.name in tied]
    return layers, (0, _multiplying(spec, (*copies, *model.behind)))


def _multiplying(spec: Spec, tensors: Iterable[Tensor]) -> int:
    shape = spec.model
    matrices = [tensor for tensor in tensors if len(tensor.shape) in _MATRICES]
    if not isinstance(shape, ModelShape):
        return sum(_OF_A_MATRIX * matrix.numel for matrix in matrices)
    return sum(_OF_A_MATRIX * elements_met(shape, matrix.name, matrix.numel) for matrix in matrices)


# A schedule that the user lists, pass by pass: proven by the simulator before it runs, or refused
# with the place where it ends.


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
        place = f"action {places[-1] + 1} of {len(order)}" if places else "at no position"
        yield Fault(
            place=_PLACE,
            finding=f"rank {broken.rank}, {place}, {broken.action}: {broken.reason}",
            remedy=(
                "List every micro-batch once forward and once backward (B, or I and later "
                "W) on every stage, and each pass after the passes it needs."
            ),
        )


def faults_of_rows(listed: ListedSchedule, ranks: int) -> Iterator[Fault]:
    """Rows that are not those of so many ranks, each with as many stages as the others."""
    rows, rank_of = len(listed.rows), _ranks(listed)
    missing = [stage for stage in range(listed.stages) if stage not in rank_of]
    counts = Counter(rank_of.values())
    if rows != ranks:
        yield Fault(
            place=_PLACE,
            finding=f"the list has {rows} row{'s' * (rows > 1)}, but pp has {ranks} ranks",
            remedy=f"List one row per rank, or use `mesh.pp={rows}`.",
        )
    elif missing:
        yield Fault(
            place=_PLACE,
            finding=f"stage {missing[0]} is in no row, but stage {listed.stages - 1} is",
            remedy="Number the stages from 0 without gaps.",
        )
    elif len(set(counts.values())) > 1 or len(counts) < ranks:
        of_ranks = ", ".join(str(counts[rank]) for rank in range(ranks))
        yield Fault(
            place=_PLACE,
            finding=f"all ranks need the same number of stages; got {of_ranks}",
            remedy=("List the same number of stages in every row."),
        )


def _sizes(listed: ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    if listed.stages != pipeline.stages:
        yield Fault(
            place="pipeline.stages",
            finding=f"the list has {listed.stages} stages, but the pipeline has {pipeline.stages}",
            remedy="Remove `pipeline.stages`.",
        )
    there, wanted = listed.microbatches, pipeline.microbatches
    if there != wanted:
        yield Fault(
            place=_PLACE,
            finding=f"the list has micro-batches 0 to {there - 1}, but a step has {wanted}",
            remedy=(
                f"List {wanted} micro-batches, or change `batch.global` or `batch.micro` "
                f"to get {there}."
            ),
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


Need = Callable[[ScheduleName, PipelineShape], Iterator[Fault]]


class ScheduleRow(NamedTuple):
    """A schedule: the order of a rank, what it costs, and what it needs.

    `stages` is the only number of stages that a rank may have, None where it may have any;
    `is_serial`: each micro-batch waits for the one before it.
    """

    order: Callable[[PipelineShape, int], Iterator[Step]]
    cost: ScheduleCost
    stages: int | None = None
    needs: tuple[Need, ...] = ()
    is_serial: bool = False


@lru_cache(maxsize=16)  # a command asks for the same one a few times
def schedule(name: ScheduleName | ListedSchedule, pipeline: PipelineShape) -> Schedule:
    """Return the schedule of that name, or the listed one. Raises SpecError where it needs another
    number of stages or micro-batches, and where a list is no schedule."""
    if problems := tuple(faults(name, pipeline)):
        raise SpecError(*problems)
    if isinstance(name, ListedSchedule):
        return as_schedule(name)
    row = SCHEDULES[name]
    return Schedule(
        microbatches=pipeline.microbatches,
        rank_of=(v_shaped if row.cost.is_v_shaped else looped)(pipeline),
        orders=tuple(tuple(row.order(pipeline, rank)) for rank in range(pipeline.ranks)),
    )


def size_of(name: ScheduleName, shape: PipelineShape) -> PipelineSize:
    """Return a pipeline's shape with its schedule, and what that costs."""
    return PipelineSize(
        schedule=name,
        cost=SCHEDULES[name].cost,
        ranks=shape.ranks,
        stages_per_rank=shape.stages_per_rank,
        microbatches=shape.microbatches,
    )


def schedule_of(spec: Spec) -> Schedule:
    """Return the schedule of a legal spec: without pp one micro-batch after the other goes through
    a single stage."""
    if size := pipeline_of(spec):
        return schedule(spec.pipeline.schedule, size)
    alone = PipelineShape(ranks=1, microbatches=spec.batch.accumulate)
    return schedule(ScheduleName.NAIVE, alone)


def faults(name: ScheduleName | ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    """Yield what this pipeline lacks for the schedule."""
    sizes = (pipeline.ranks, pipeline.stages_per_rank, pipeline.microbatches)
    assert min(sizes) >= 1, f"a pipeline of {sizes}"
    if isinstance(name, ListedSchedule):
        yield from faults_of_list(name, pipeline)
        return
    row = SCHEDULES[name]
    if row.stages is not None and pipeline.stages_per_rank != row.stages:
        yield Fault(
            place="pipeline.stages",
            finding=(
                f"{name} needs {counted(row.stages, 'stage')} per rank, but "
                f"{pipeline.stages} stages over pp={pipeline.ranks} are "
                f"{pipeline.stages_per_rank} per rank"
            ),
            remedy=(
                f"Use `pipeline.stages={row.stages * pipeline.ranks}`, or a schedule with "
                "any number of stages per rank: "
                f"{', '.join(other for other in SCHEDULES if takes_any_stages(other))}."
            ),
        )
    for need in row.needs:
        yield from need(name, pipeline)


def takes_any_stages(name: ScheduleName | ListedSchedule) -> bool:
    """Return whether a rank may have any number of stages."""
    return isinstance(name, ScheduleName) and SCHEDULES[name].stages is None


def _fills_the_stages(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    return _at_least(pipeline.stages, "one per stage", (name, ScheduleName.GPIPE), pipeline)


def _fills_the_v(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    return _at_least(2 * pipeline.ranks, "two per rank", (name, ScheduleName.ZBV), pipeline)


def _at_least(
    least: int, why: str, names: tuple[ScheduleName, ScheduleName], pipeline: PipelineShape
) -> Iterator[Fault]:
    """`names`: the schedule that needs them, and one that does not."""
    name, instead = names
    if pipeline.microbatches < least:
        yield Fault(
            place="pipeline.schedule",
            finding=(
                f"{name} needs at least {least} micro-batches per step ({why}); there "
                f"are {pipeline.microbatches}"
            ),
            remedy=(
                f"Raise `batch.global` or lower `batch.micro` to get {least}, or use "
                f"`pipeline.schedule={instead}`."
            ),
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
        finding=(
            f"{name} needs micro-batches in equal rounds of pp={pipeline.ranks} or a few "
            f"more; there are {microbatches}"
        ),
        remedy=f"Change `batch.global` or `batch.micro` to get {fewer} or {more} micro-batches.",
    )


def _are_equal_rounds(microbatches: int, pipeline: PipelineShape) -> bool:
    return microbatches % orders.rounds(microbatches, pipeline.ranks) == 0


SCHEDULES = {
    ScheduleName.NAIVE: ScheduleRow(
        order=orders.naive,
        stages=1,
        cost=ScheduleCost(
            bubble=cost.serial_bubble,
            in_flight=cost.one_in_flight,
        ),
        is_serial=True,
    ),
    ScheduleName.GPIPE: ScheduleRow(
        order=orders.gpipe,
        stages=1,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.all_in_flight,
        ),
    ),
    ScheduleName.ONE_F_ONE_B: ScheduleRow(
        order=orders.one_forward_one_backward,
        stages=1,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.in_flight_of_1f1b,
        ),
        needs=(_fills_the_stages,),
    ),
    ScheduleName.BFS: ScheduleRow(
        order=orders.breadth_first,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.all_in_flight,
        ),
    ),
    ScheduleName.INTERLEAVED: ScheduleRow(
        order=orders.interleaved,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.in_flight_of_interleaved,
        ),
        needs=(_equal_rounds,),
    ),
    ScheduleName.ZERO_BUBBLE: ScheduleRow(
        order=orders.zero_bubble,
        cost=ScheduleCost(
            bubble=cost.zero_bubble,
            in_flight=cost.in_flight_of_zero_bubble,
        ),
        needs=(_equal_rounds,),
    ),
    ScheduleName.ZBV: ScheduleRow(
        order=orders.zbv,
        stages=2,
        cost=ScheduleCost(
            bubble=cost.no_formula,
            in_flight=cost.in_flight_of_zbv,
            is_v_shaped=True,
        ),
    ),
    ScheduleName.DUALPIPEV: ScheduleRow(
        order=orders.dualpipev,
        stages=2,
        cost=ScheduleCost(
            bubble=cost.dualpipev_bubble,
            in_flight=cost.in_flight_of_dualpipev,
            is_v_shaped=True,
        ),
        needs=(_fills_the_v,),
    ),
}


# What the pipeline axis offers to a search: as many stages as there are layers for, every
# schedule, and where one takes any number of stages a rank, two and four too.

_PLACEMENT = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_MORE_STAGES = (2, 4)  # a rank


def _degrees(spec: Spec, devices: int, written: Written) -> Iterator[int]:
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    yield from (degree for degree in divisors(devices) if degree <= layers)


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice(changes=(("pipeline", PipelineSpec()),))
        return
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    offered = (
        ((_PLACEMENT,), (("pipeline", pipeline),))
        for schedule in ScheduleName
        for pipeline in _with_stages(schedule, ranks)
    )
    for (placement,), changes in written.held((Axis.PP,), offered):
        stages = dict(changes)["pipeline"].stages_over(ranks)
        if stages <= layers and stages % ranks == 0:
            factor = Factor(axis=Axis.PP, degree=ranks, placement=placement)
            yield AxisChoice(factors=(factor,), changes=changes)


def _with_stages(schedule: ScheduleName, ranks: int) -> Iterator[PipelineSpec]:
    """The schedule as it is by itself, and with more stages a rank than that."""
    plain = PipelineSpec(schedule=schedule)
    yield plain
    if takes_any_stages(schedule):
        yield from (
            PipelineSpec(schedule=schedule, stages=number * ranks)
            for number in _MORE_STAGES
            if number * ranks > plain.stages_over(ranks)
        )


SPACE = AxisSpace(
    axes=(Axis.PP,), sizes=_degrees, choices=_choices, tuples={Axis.PP: (_PLACEMENT,)}
)
