"""The table of pipeline schedules (order, cost and requirements), and a spec's stages and layers.

Stages can be balanced by time. The balance assumes a device that only multiplies matrices, at one
rate. A matrix of n elements costs a token 2n operations forward and 4n backward (the gradients of
its input and of itself). The scores of attention cost 4TH forward and 8TH backward for T tokens of
width H, as in Chowdhery et al. 2022 (PaLM), appendix B, although a causal kernel may do half.
Embedding look-ups, norms, other memory-bound operators and communication count as free. A tied head
multiplies like a separate one. For a model that is not built in, only the matrices are known, not
the scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, assert_never

from ptrain.axes.candidates import AxisChoice, AxisSpace, FixedChoices, divisors
from ptrain.axes.pipeline import cost, orders
from ptrain.axes.pipeline.cost import PipelineSize, ScheduleCost
from ptrain.axes.pipeline.schedule import (
    Action,
    Pair,
    PipelineShape,
    Schedule,
    Step,
    loop_ranks,
    v_shaped,
)
from ptrain.axes.pipeline.simulate import simulate
from ptrain.errors import BrokenSchedule, Fault, SpecError
from ptrain.facts.parameters import elements_met
from ptrain.facts.stages import (
    Layers,
    Stage,
    Tensor,
    balanced_counts,
    divide_into_stages,
    even_counts,
)
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import ListedSchedule, Pass, PipelineSpec, ScheduleName, SplitBy
from ptrain.spec.placement import Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec
from ptrain.units import with_noun

_PER_ELEMENT, _PER_SCORE = 2 + 4, 4 + 8
_MATRICES = (2, 3)  # dimensions of a matrix, and of the stacked matrices of experts


def pipeline_of(spec: Spec) -> PipelineShape | None:
    """Return ranks, stages per rank and micro-batches of a step.

    Returns None without pp, or if the stages are not a multiple of the ranks.
    """
    ranks = spec.degree(Axis.PP)
    stages = spec.pipeline.stages_over(ranks)
    if ranks == 1 or stages < ranks or stages % ranks:
        return None
    return PipelineShape(
        ranks=ranks, stages_per_rank=stages // ranks, microbatches=spec.batch.accumulate
    )


def stages_text(stages: Sequence[int]) -> str:
    """Return `stage 1` or `stages 0 and 3`."""
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def stages_of(spec: Spec, model: Layers) -> tuple[Stage, ...]:
    """Return the stages by `pipeline.split`, first to last.

    Raises:
        SpecError: The model has fewer layers than the split needs.
    """
    stages = spec.pipeline.stages_over(spec.degree(Axis.PP))
    match spec.pipeline.split:
        case SplitBy.PARAMETERS:
            counts = balanced_counts(model.weights, stages, model.ends)
        case SplitBy.TIME:
            weights, ends = count_operations(spec, model)
            counts = balanced_counts(weights, stages, ends)
        case SplitBy.LAYERS:
            counts = even_counts(len(model.layers), stages)
        case tuple() as counts:
            pass
        case split:
            assert_never(split)
    return divide_into_stages(model, counts)


def count_operations(spec: Spec, model: Layers) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the operations of one token: by layer, and before the first and after the last."""
    scores = 0
    if isinstance(spec.model, ModelShape):
        scores = _PER_SCORE * spec.batch.sequence * spec.model.hidden
    layers = tuple(_matrix_operations(spec, layer.tensors) + scores for layer in model.layers)
    tied = dict(model.tied)
    copies = [tensor for tensor in model.front if tensor.name in tied]
    return layers, (0, _matrix_operations(spec, (*copies, *model.behind)))


def _matrix_operations(spec: Spec, tensors: Iterable[Tensor]) -> int:
    """Return the operations of one token with the matrices among these tensors."""
    shape = spec.model
    matrices = [tensor for tensor in tensors if len(tensor.shape) in _MATRICES]
    if not isinstance(shape, ModelShape):
        return sum(_PER_ELEMENT * matrix.numel for matrix in matrices)
    return sum(_PER_ELEMENT * elements_met(shape, matrix.name, matrix.numel) for matrix in matrices)


# A listed schedule, which the user writes pass by pass. The simulator proves it before it runs, or
# rejects it with the position of the first fault.


_PLACE = "pipeline.schedule"


def as_schedule(listed: ListedSchedule) -> Schedule:
    """Return the schedule of a list in which `faults_of_list` finds no fault."""
    rank_of = _first_ranks(listed)
    return Schedule(
        microbatches=listed.microbatches,
        rank_of=tuple(rank_of[stage] for stage in range(listed.stages)),
        orders=tuple(tuple(map(_as_step, order)) for order in listed.orders),
    )


def faults_of_list(listed: ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    """Yield the faults of a listed schedule for this pipeline.

    These are different numbers of ranks, stages or micro-batches, else the first action that is
    wrong or can never run.
    """
    sizes = [*faults_of_rows(listed, pipeline.ranks), *_size_faults(listed, pipeline)]
    yield from sizes
    if sizes:
        return
    schedule = as_schedule(listed)
    try:
        simulate(schedule)
    except BrokenSchedule as broken:
        order = schedule.orders[broken.rank]
        places = [place for place, step in enumerate(order) if broken.action in (step, *step.parts)]
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
    """Yield the faults of the rows: one per rank is needed, each with equally many stages."""
    rows, rank_of = len(listed.rows), _first_ranks(listed)
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


def _size_faults(listed: ListedSchedule, pipeline: PipelineShape) -> Iterator[Fault]:
    """Yield the faults in the numbers of stages and micro-batches."""
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


def _first_ranks(listed: ListedSchedule) -> dict[int, int]:
    """Return the first rank of each stage; the simulator rejects a second one."""
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(listed.orders):
        for step in order:
            for _, stage, _ in step:
                rank_of.setdefault(stage, rank)
    return rank_of


def _as_step(passes: tuple[Pass, ...]) -> Step:
    """Return a listed entry as an action or a pair."""
    actions = [Action(*fields) for fields in passes]
    return actions[0] if len(actions) == 1 else Pair(*actions)


Need = Callable[[ScheduleName, PipelineShape], Iterator[Fault]]


class ScheduleRow(NamedTuple):
    """A schedule: the order of a rank, its cost and its requirements.

    Attributes:
        order: Yields the steps of a rank.
        cost: Its closed forms.
        stages: The only supported number of stages per rank, None for any.
        needs: Checks of further requirements.
        is_serial: Each micro-batch waits for the one before it.
    """

    order: Callable[[PipelineShape, int], Iterator[Step]]
    cost: ScheduleCost
    stages: int | None = None
    requirements: tuple[Need, ...] = ()
    is_serial: bool = False


@lru_cache(maxsize=16)  # a command needs one schedule several times
def make_schedule(name: ScheduleName | ListedSchedule, pipeline: PipelineShape) -> Schedule:
    """Return a named or listed schedule.

    Raises:
        SpecError: The schedule needs another number of stages or micro-batches, or the list is not
            a schedule.
    """
    if problems := tuple(schedule_faults(name, pipeline)):
        raise SpecError(*problems)
    if isinstance(name, ListedSchedule):
        return as_schedule(name)
    row = SCHEDULES[name]
    return Schedule(
        microbatches=pipeline.microbatches,
        rank_of=(v_shaped if row.cost.is_v_shaped else loop_ranks)(pipeline),
        orders=tuple(tuple(row.order(pipeline, rank)) for rank in range(pipeline.ranks)),
    )


def size_of(name: ScheduleName, shape: PipelineShape) -> PipelineSize:
    """Return a pipeline's shape with a schedule and its cost."""
    return PipelineSize(
        schedule=name,
        cost=SCHEDULES[name].cost,
        ranks=shape.ranks,
        stages_per_rank=shape.stages_per_rank,
        microbatches=shape.microbatches,
    )


def schedule_of(spec: Spec) -> Schedule:
    """Return the schedule of a legal spec; without pp, all micro-batches in turn on one stage."""
    if size := pipeline_of(spec):
        return make_schedule(spec.pipeline.schedule, size)
    alone = PipelineShape(ranks=1, microbatches=spec.batch.accumulate)
    return make_schedule(ScheduleName.NAIVE, alone)


def schedule_faults(
    name: ScheduleName | ListedSchedule, pipeline: PipelineShape
) -> Iterator[Fault]:
    """Yield the requirements of a schedule that this pipeline does not meet."""
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
                f"{name} needs {with_noun(row.stages, 'stage')} per rank, but "
                f"{pipeline.stages} stages over pp={pipeline.ranks} are "
                f"{pipeline.stages_per_rank} per rank"
            ),
            remedy=(
                f"Use `pipeline.stages={row.stages * pipeline.ranks}`, or a schedule with "
                "any number of stages per rank: "
                f"{', '.join(other for other in SCHEDULES if takes_any_stages(other))}."
            ),
        )
    for need in row.requirements:
        yield from need(name, pipeline)


def takes_any_stages(name: ScheduleName | ListedSchedule) -> bool:
    """Return True if the schedule supports any number of stages per rank."""
    return isinstance(name, ScheduleName) and SCHEDULES[name].stages is None


def _require_two_per_rank(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    """Require at least two micro-batches per rank."""
    least = 2 * pipeline.ranks
    if pipeline.microbatches < least:
        yield Fault(
            place="pipeline.schedule",
            finding=(
                f"{name} needs at least {least} micro-batches per step (two per rank); there "
                f"are {pipeline.microbatches}"
            ),
            remedy=(
                f"Raise `batch.global` or lower `batch.micro` to get {least}, or use "
                f"`pipeline.schedule={ScheduleName.ZBV}`."
            ),
        )


def _require_equal_rounds(name: ScheduleName, pipeline: PipelineShape) -> Iterator[Fault]:
    """Require micro-batches in equal rounds."""
    microbatches = pipeline.microbatches
    if _are_equal_rounds(microbatches, pipeline):
        return
    # both searches end at a multiple of p, which has rounds of p each
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
    """Return True if the micro-batches divide into equal rounds."""
    return microbatches % orders.num_rounds(microbatches, pipeline.ranks) == 0


SCHEDULES = {
    ScheduleName.NAIVE: ScheduleRow(
        order=orders.naive_order,
        stages=1,
        cost=ScheduleCost(
            bubble=cost.serial_bubble,
            in_flight=lambda *_: 1,  # one micro-batch at a time
        ),
        is_serial=True,
    ),
    ScheduleName.GPIPE: ScheduleRow(
        order=orders.gpipe_order,
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
    ),
    ScheduleName.BFS: ScheduleRow(
        order=orders.breadth_first,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.all_in_flight,
        ),
    ),
    ScheduleName.INTERLEAVED: ScheduleRow(
        order=orders.interleaved_order,
        cost=ScheduleCost(
            bubble=cost.fill_and_drain,
            in_flight=cost.in_flight_of_interleaved,
        ),
        requirements=(_require_equal_rounds,),
    ),
    ScheduleName.ZERO_BUBBLE: ScheduleRow(
        order=orders.zero_bubble,
        cost=ScheduleCost(
            bubble=cost.zero_bubble,
            in_flight=cost.in_flight_of_zero_bubble,
        ),
        requirements=(_require_equal_rounds,),
    ),
    ScheduleName.ZBV: ScheduleRow(
        order=orders.zbv_order,
        stages=2,
        cost=ScheduleCost(
            bubble=lambda *_: None,  # the literature has no formula
            in_flight=cost.in_flight_of_zbv,
            is_v_shaped=True,
        ),
    ),
    ScheduleName.DUALPIPEV: ScheduleRow(
        order=orders.dualpipev_order,
        stages=2,
        cost=ScheduleCost(
            bubble=cost.dualpipev_bubble,
            in_flight=cost.in_flight_of_dualpipev,
            is_v_shaped=True,
        ),
        requirements=(_require_two_per_rank,),
    ),
}


# The search space of the pipeline axis: at most one stage per layer, every schedule, and two or
# four stages per rank if a schedule supports any number.

_PLACEMENT = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
# Each doubling halves the bubble of interleaved 1F1B and doubles the number of messages.
_MORE_STAGES = (2, 4)  # stages per rank


def _axis_sizes(spec: Spec, devices: int, written: FixedChoices) -> Iterator[int]:
    """Yield the possible numbers of ranks, at most one per layer."""
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    yield from (degree for degree in divisors(devices) if degree <= layers)


def _iter_choices(spec: Spec, ranks: int, written: FixedChoices) -> Iterator[AxisChoice]:
    """Yield every schedule and number of stages for these ranks."""
    if ranks == 1:
        yield AxisChoice(changes=(("pipeline", PipelineSpec()),))
        return
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    offered = (
        ((_PLACEMENT,), (("pipeline", pipeline),))
        for schedule in ScheduleName
        for pipeline in _stage_options(schedule, ranks)
    )
    for (placement,), changes in written.agreeing_options((Axis.PP,), offered):
        stages = dict(changes)["pipeline"].stages_over(ranks)
        if stages <= layers and stages % ranks == 0:
            factor = Factor(axis=Axis.PP, degree=ranks, placement=placement)
            yield AxisChoice(factors=(factor,), changes=changes)


def _stage_options(schedule: ScheduleName, ranks: int) -> Iterator[PipelineSpec]:
    """Yield a schedule with its default number of stages, and with more if it supports them."""
    plain = PipelineSpec(schedule=schedule)
    yield plain
    if takes_any_stages(schedule):
        yield from (
            PipelineSpec(schedule=schedule, stages=number * ranks)
            for number in _MORE_STAGES
            if number * ranks > plain.stages_over(ranks)
        )


SPACE = AxisSpace(
    axes=(Axis.PP,), sizes=_axis_sizes, choices=_iter_choices, tuples={Axis.PP: (_PLACEMENT,)}
)
