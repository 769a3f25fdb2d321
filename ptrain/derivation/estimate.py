"""`derive`: what a spec costs, by the paper (`paper`) and as it runs (`exact`), and its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TypeVar

from ptrain.axes.context.cost import own_kept
from ptrain.axes.context.cost import sent as sent_over_context
from ptrain.axes.data.form import require_executed
from ptrain.axes.expert.cost import sent as sent_to_experts
from ptrain.axes.expert.form import assumed
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.by_rank import ByRank, distinct, rows_by_rank
from ptrain.cost import (
    Column,
    Estimate,
    Footprint,
    Peak,
    State,
    StepTime,
    Traffic,
    TrafficKey,
    add_traffic,
)
from ptrain.derivation import blocks, memory, tensor
from ptrain.derivation.activation_moves import activation_row, kept_traffic
from ptrain.derivation.clock import LaneSpan
from ptrain.derivation.ghosts.clipping import norm
from ptrain.derivation.ghosts.table import wrapping
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.interconnect import warnings
from ptrain.derivation.layers import drops_in_parts, is_tabulated
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.memory import resident, startup_bytes
from ptrain.derivation.notes import notes, pipeline_notes
from ptrain.derivation.operations import operations
from ptrain.derivation.paper import paper
from ptrain.derivation.parts import RanksPart, joined, parts_of_ranks
from ptrain.derivation.tables import setting_of
from ptrain.derivation.timeline import Replay, replay
from ptrain.derivation.workspaces import kernel_warnings, unclaimed
from ptrain.errors import refused
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower, own_facts
from ptrain.rates.pace import UnknownRate
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.wording import Worded

_HOW_TO_TRACE = (
    "Run `ptrain predict`, which traces the model; in Python, use `derive(spec, read_facts(spec))`"
)
_NOT_TRACED_BY_STAGE = f"these facts have no trace of the stages' activations: {_HOW_TO_TRACE}"
_NOT_TRACED = f"these facts have no trace of the model's activations: {_HOW_TO_TRACE}"
_NO_PARTS_ON_GPUS = (
    "no table has the saved tensors of dropout on GPUs with sharded layers or operators"
)
_NOT_PLAYED = "its step depends on the activations of the model, which are unknown"
_EVEN_TIME = "balanced routing is assumed: the time of uneven routing is not predicted"
_NOT_ON_CPU = "torch's flex_attention has no backward pass on CPUs, where a trace would run"


_OfStep = Callable[[Spec, Plan, ModelFacts, Machine | None], Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation(Worded):
    """Both predictions of one spec, and the plan that the second one is about. `facts` are those
    that it was derived from."""

    paper: Estimate
    exact: Estimate
    plan: Plan
    facts: ModelFacts = field(repr=False, compare=False)

    @property
    def spec(self) -> Spec:
        """What was derived."""
        return self.plan.spec


def derive(
    spec: Spec,
    facts: ModelFacts | None = None,
    machine: Machine | None = None,
    *,
    is_timed: bool = True,
) -> Derivation:
    """Predict memory, traffic and step time of a legal spec.

    Args:
        spec: The spec (`ptrain.load(...).spec`).
        facts: Names, shapes and traces of the model. Built-in models need none; for any other
            model, read them with `ptrain.read_facts`.
        machine: Speeds to use instead of those of the spec's cluster.
        is_timed: Predict the step time too.

    Returns:
        The derivation: `exact` (the figures ptrain stands for), `paper` (the figures of the
        paper's formulas) and `plan`. Sizes are bytes per rank, times are seconds per step.

    Raises:
        SpecError: The model does not fit the spec, or a value is still `auto`.

    Example:
        >>> import ptrain
        >>> ptrain.derive(ptrain.load("zero3").spec).exact.peak_bytes()
        20408040
    """
    facts = own_facts(spec) if facts is None else facts
    plan, estimate = _estimated(spec, facts, machine, _timed if is_timed else _exact)
    spec = plan.spec
    own = spec.model.ignored if isinstance(spec.model, ModelShape) else ()
    ignored = ", ".join(own or facts.ignored)
    estimate = replace(
        estimate,
        operations=operations(spec, plan),
        warnings=(
            *estimate.warnings,
            *kernel_warnings(spec, estimate.unclaimed, estimate.undefined),
            *([f"fields of the model's config without effect: {ignored}"] if ignored else ()),
        ),
    )
    return Derivation(paper=paper(spec, facts), exact=estimate, plan=plan, facts=facts)


def fullest_alone(spec: Spec, facts: ModelFacts, limit: float = inf) -> Estimate:
    """Return of a legal spec's derivation what is exact of memory, in a fraction of its time, for
    who asks of many specs whether they fit: without traffic, operations, words and a step's time,
    and of the ranks of a pipeline others stand for those that are no fuller. Raises TooLarge
    once the peak is above `limit`."""
    limit = inf if facts.others else limit  # of several peaks the least decides
    return _estimated(spec, facts, None, partial(_exact, limit=limit))[1]


def step_seconds(spec: Spec, facts: ModelFacts) -> float | None:
    """Return of a legal spec's derivation the time of a step alone; None where it is unknown."""
    with suppress(UnknownRate):
        step = _estimated(spec, facts, None, partial(_with_step, limit=inf))[1].step
        return step.seconds if step else None
    return None


def _estimated(
    spec: Spec, facts: ModelFacts, machine: Machine | None, of_step: _OfStep
) -> tuple[Plan, Estimate]:
    _require_gradients(spec, facts)
    plan = lower(spec, facts)
    spec = plan.spec
    require_executed(spec, plan, facts)
    estimate = of_step(spec, plan, facts, machine)
    estimate = replace(
        estimate,
        unclaimed=unclaimed(spec, facts),
        assumed=assumed(spec),
        startup_bytes=startup_bytes(spec, facts),
        builds_whole=bool(facts.built_whole),
    )
    return plan, estimate


def _timed(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
) -> Estimate:
    """With the step's time, or why there is none."""
    why = _NOT_PLAYED
    try:
        estimate = _with_step(spec, plan, facts, machine)
    except UnknownRate as unknown:
        estimate, why = _exact(spec, plan, facts, None), str(unknown)
    if estimate.step is not None:
        return estimate
    return replace(estimate, undefined={**estimate.undefined, "step_seconds": why})


def _with_step(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float | None = None,
) -> Estimate:
    """With a `limit` without traffic. Raises UnknownRate where a rate is missing."""
    machine = machine_of(spec, plan, facts) if machine is None else machine
    if plan.loads is None:
        return _exact(spec, plan, facts, machine, limit=limit)
    even = spec.but(routing=None), replace(plan, loads=None)
    step = _exact(*even, facts, machine, limit=limit).step
    step = step and step._replace(assumed=(*step.assumed, _EVEN_TIME))
    return replace(_exact(spec, plan, facts, None, limit=limit), step=step)


def _require_gradients(spec: Spec, facts: ModelFacts) -> None:
    """Raises SpecError for parameters that may have a gradient on one data rank and on another
    none: what they then sum would not fit together."""
    if not facts.unvisited or spec.data_degree == 1:
        return
    first, *others = facts.unvisited
    number = len(others)
    more = f" and {number} parameter{'s' * (number > 1)} more have" if others else " has"
    finding = f"{first}{more} no gradient on ranks without tokens for it, but "
    finding += "data-parallel ranks sum the gradients of all parameters"
    raise refused(
        "model",
        finding,
        "Call every expert, even with zero rows, or store all experts in stacked tensors.",
    )


def _exact(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float | None = None,
) -> Estimate:
    """Where sizes depend on data, their bounds."""
    estimate = exact(spec, plan, facts, machine, limit=limit)
    others = [exact(spec, plan, other, limit=limit) for other in facts.others]
    return bounded(estimate, others, facts.by_data) if others else estimate


def facts_from_shape(spec: Spec) -> ModelFacts | None:
    """The facts of a built-in model whose activations tables tell, or that cannot be traced: then
    nothing is said of them. None where the model itself is to be read."""
    if not isinstance(spec.model, ModelShape) or spec.data.function is not None:
        return None
    facts = own_facts(spec)
    return facts if is_tabulated(spec) or _not_traceable(spec.model, spec) else None


def _not_traceable(shape: ModelShape, spec: Spec) -> str:
    """Why nobody traces a built-in model; nothing where somebody does."""
    if shape.attention is Attention.FLEX:
        return _NOT_ON_CPU
    return _NO_PARTS_ON_GPUS if drops_in_parts(spec) else ""


def _untold(spec: Spec, facts: ModelFacts, reason: str) -> dict[str, str]:
    """Return by figure why nothing is said of it: of activations and peaks, and of traffic where it
    is not known what the modes of activations move and send again."""
    cause = facts.untraced
    if isinstance(spec.model, ModelShape) and not facts.roles:
        cause = _not_traceable(spec.model, spec)
    figures = ("activations", "peak", *(() if _is_moved_known(spec) else ("traffic",)))
    return dict.fromkeys(figures, cause or reason)


def _is_moved_known(spec: Spec) -> bool:
    """Whether tables tell what the modes of activations move and send again."""
    kept = spec.activations.of(spec.model.layers) if isinstance(spec.model, ModelShape) else ()
    is_plain = all(mode.is_plain for mode in kept)
    return blocks.are_known(spec) and (is_plain or not drops_in_parts(spec))


def exact(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None = None,
    *,
    limit: float | None = None,
) -> Estimate:
    """Memory per state and rank, peaks per phase, traffic per axes x collective x state x phase.
    Of a `machine` the step's time, too. With a `limit` the memory of the fullest ranks is asked
    about, and nothing else; raises TooLarge for a peak above it."""
    if plan.pipeline is not None:
        return _exact_stages(spec, plan, facts, machine, limit=limit)
    ranks = parts_of_ranks(spec, plan, facts)
    of_part = partial(_exact_part, spec, plan, machine=machine, limit=limit)
    estimate = joined(spec, ranks, [*map(of_part, ranks.parts)])
    if limit is not None:
        return estimate
    operators = add_traffic(
        (
            *tensor.sent(spec, plan, facts),
            *_over_context(spec, plan, facts),
            *memory.summed(spec, plan, [facts]),
        )
    )
    traffic = _with(estimate.traffic, operators)
    return replace(
        estimate,
        traffic=traffic,
        notes=tuple(notes(spec, plan, facts, traffic)),
        warnings=tuple(warnings(spec, traffic)),
        accounts=tuple(_with(rows, operators) for rows in estimate.accounts),
    )


def _over_context(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[Traffic]:
    if isinstance(spec.model, ModelShape):
        yield from sent_over_context(spec, plan, spec.activations.of(spec.model.layers))
    elif facts.attending is not None:
        yield from sent_over_context(spec, plan, *own_kept(spec, facts.blocks, facts.attending))


def _with(rows: Iterable[Traffic], operators: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """Return what a rank sends: `rows`, with what its `operators` send of the same key added, then
    the other rows of the operators."""
    traffic: list[Traffic] = []
    sent_too = {row.key: row for row in operators}
    for row in rows:
        too = sent_too.get(row.key)
        traffic += add_traffic((row, too)) if too else (row,)
    keys = {row.key for row in traffic}
    return (*traffic, *(row for row in operators if row.key not in keys))


def _exact_stages(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float | None,
) -> Estimate:
    """Each rank's rows from its stages; of traffic a row for each account, where they differ."""
    from ptrain.derivation import pipeline
    from ptrain.derivation.in_flight import fullest_of, in_flight

    stages = pipeline.staged(spec, plan, facts)
    most = inf if limit is None else limit
    schedule = schedule_of(spec)
    memory = pipeline.resident(spec, plan, stages)
    peaks: Sequence[Peak] = ()
    undefined: dict[str, str] = {}
    step: StepTime | None = None
    is_counted = plan.loads is None or bool(facts.stage_rows)
    if is_tabulated(spec) or (facts.stage_passes and is_counted):
        timing = machine.of_pipeline(spec, plan, facts, schedule) if machine else None
        # a host counts all, and the time of a step depends on all
        is_all = limit is None or timing or spec.activations.tiers != {Tier.DEVICE}
        stands_for = None if is_all else fullest_of(schedule, stages)
        flight = in_flight(spec, schedule, stages, memory, timing, stands_for, most)
        step = flight.step
        memory, peaks = memory.and_then(flight.memory), flight.peaks
    else:
        undefined = _untold(spec, facts, _NOT_TRACED_BY_STAGE)
    estimate = Estimate(
        column=Column.EXACT,
        world_size=spec.world_size,
        memory=memory,
        peak=peaks,
        undefined=undefined,
        step=step,
    )
    if limit is not None:
        return estimate
    accounts, account_of = pipeline.accounts(spec, plan, facts, stages, schedule)
    keys = dict.fromkeys(row.key for rows in accounts for row in rows)
    traffic = tuple(dict.fromkeys(_of_key(key, rows) for key in keys for rows in accounts))
    return replace(
        estimate,
        traffic=traffic,
        notes=tuple(pipeline_notes(plan, facts, schedule)),
        warnings=tuple(warnings(spec, traffic)),
        accounts=accounts,
        account_of=account_of,
    )


def _of_key(key: TrafficKey, rows: Iterable[Traffic]) -> Traffic:
    """What an account says of one kind of call, which its rank may have none of."""
    none = Traffic(key=key, calls=0, payload_bytes=0, sent_bytes=0)
    return next((row for row in rows if row.key == key), none)


def _exact_part(
    spec: Spec, plan: Plan, part: RanksPart, machine: Machine | None, *, limit: float | None
) -> Estimate:
    """Of the ranks that have this part of the model, without what its operators send but to
    experts."""
    facts, index = part.facts, part.index
    most = inf if limit is None else limit
    ghost = wrapping(spec, plan, facts)
    memory = resident(ghost)
    estimate = Estimate(column=Column.EXACT, world_size=spec.world_size, memory=memory)
    played = None
    if facts.timeline is None and not (is_tabulated(spec) and not facts.roles):
        estimate = replace(estimate, undefined=_untold(spec, facts, _NOT_TRACED))
    else:
        timing = machine.of_part(spec, plan, index) if machine else None
        played = replay(ghost, memory, tensor.cut_of(spec, plan, index), timing, most)
        memory = _with_passing(spec, memory, played)
        estimate = replace(estimate, memory=memory, peak=played.peaks, step=played.step)
    if limit is not None:
        return estimate
    traffic = _with(sent(ghost), add_traffic(sent_to_experts(spec, plan, loads=part.loads)))
    more = _of_kept(spec, plan, played) if played else _of_untraced_blocks(spec, plan, index)
    return replace(estimate, traffic=add_traffic((*traffic, *more)))


def _of_kept(spec: Spec, plan: Plan, played: Replay) -> Iterator[Traffic]:
    """Yield what the modes of activations move and send again, of each micro-batch."""
    times = 1 if len(played.timelines) > 1 else None
    for timeline in played.timelines:
        yield from kept_traffic(spec, plan, timeline.moved, timeline.repeated, times)


def _of_untraced_blocks(spec: Spec, plan: Plan, index: int) -> Iterable[Traffic]:
    """Return what the blocks' modes move and send again, where tables tell."""
    shape = spec.model
    if not isinstance(shape, ModelShape) or not blocks.are_known(spec):
        return ()
    kept = spec.activations.of(shape.layers)
    if all(mode.is_plain for mode in kept):
        return ()
    setting = setting_of(spec, tensor.cut_of(spec, plan, index))
    return kept_traffic(spec, plan, blocks.moved(setting, kept), blocks.repeated(setting, kept))


def _with_passing(spec: Spec, memory: ByRank[Footprint], played: Replay) -> ByRank[Footprint]:
    """The rows of each rank, and what lives at the end of the last forward only."""
    passing = (
        activation_row(0, played.saved.saved_bytes, played.saved.moved),
        Footprint(state=State.TRANSIENT, rank=0, device_bytes=played.transient_bytes),
    )
    return memory.and_then(ByRank(([passing], [0] * spec.world_size)))


# Bounds in place of sizes, for a model that selects by data: the same step derived at several
# extents of what is selected, of which the least and the largest figure are taken, row by row.
# What does not depend on the traces (Θ, Ω, G, traffic) is alike in all, and stays exact.


RowT = TypeVar("RowT", Footprint, Peak)

_EXTENTS = (
    "the bounds assume one selected element and all elements; they hold if allocations grow "
    "with the number of selected elements"
)
_OFF_DEVICE = attrgetter("state", "rank", "host_bytes", "file_bytes")
_PASSING = (State.ACTIVATIONS, State.TRANSIENT)


def bounded(estimate: Estimate, others: Sequence[Estimate], who: str) -> Estimate:
    """Return `estimate` with bounds of what differs in `others`, the same step at other extents;
    `who` selects by data. Where what is sent or leaves the device differs, nothing is said."""
    if any(_moved(other) != _moved(estimate) for other in others):
        why = f"{who}, and the selected elements are offloaded or communicated"
        undefined = dict.fromkeys(("activations", "peak", "traffic"), why)
        rows = tuple(row for row in estimate.memory if row.state not in _PASSING)
        return replace(estimate, memory=rows, peak=(), undefined=estimate.undefined | undefined)
    columns = (estimate, *others)
    return replace(
        estimate,
        memory=_between([column.memory for column in columns]),
        peak=_between([column.peak for column in columns]),
        by_data=dict.fromkeys(("activations", "peak"), f"{who}; {_EXTENTS}"),
    )


def _moved(estimate: Estimate) -> object:
    off_device = set(map(_OFF_DEVICE, distinct(estimate.memory)))
    return set(estimate.traffic), estimate.account_of, off_device


def _between(columns: Sequence[Sequence[RowT]]) -> Sequence[RowT]:
    """Return each rank's rows, which all columns have in the same order, with their bounds."""
    by_rank = [column for column in columns if isinstance(column, ByRank)]
    if len(by_rank) < len(columns):
        return [_bounds(rows) for rows in zip(*columns, strict=True)]
    ranks = range(max((len(kind_of) for _, kind_of in by_rank[0].parts), default=0))
    return rows_by_rank(
        (tuple(column.kinds_of(rank) for column in by_rank) for rank in ranks),
        lambda kinds: [
            _bounds(rows) for rows in zip(*map(ByRank.of_kinds, by_rank, kinds), strict=True)
        ],
    )


def _bounds(rows: Sequence[RowT]) -> RowT:
    sizes = [row.device_bytes for row in rows]
    lower = None if min(sizes) == max(sizes) else min(sizes)
    return replace(rows[0], device_bytes=max(sizes), lower_bytes=lower)


# Traffic of one steady step, call by call: the `exact` column of Theorem 2.
#
# Theorem 2 as printed forgets that a rank which updates a part of what it stores must gather the
# rest; here every collective that the plan's wrap issues is counted, with its padding.


def sent(ghost: Wrapping) -> tuple[Traffic, ...]:
    """Return what every rank sends: once (setup) and in each step."""
    return add_traffic((*ghost.sent(None), *norm(ghost)))


# A step's lanes: what a rank does when, and what moves beside it; of a pipeline, what every rank
# does.


def step_lanes(derivation: Derivation) -> tuple[LaneSpan, ...]:
    """Return the spans of a step whose time was predicted, every block by itself. Of micro-batches
    between the first and the last there is one. Raises UnknownRate where there is no time."""
    spec, facts = derivation.spec, derivation.facts
    spans: list[LaneSpan] = []
    machine = machine_of(spec, derivation.plan, facts)
    derive(spec, facts, machine._replace(plays_all=True, spans=spans))
    return tuple(spans)


# What a run's own routing makes of the prediction: the formula of where tokens go, with the counts
# of the step that was measured. It says nothing before a run, and is kept apart from what does.


def by_counts(derivation: Derivation, histogram: Histogram, step: int) -> Estimate | None:
    """Return the exact column with the counts of a run's `step` (from 1) in place of what it
    assumes; None where it assumes nothing of where tokens go."""
    if not derivation.exact.assumed:
        return None
    exact = derive(derivation.spec.but(routing=histogram), derivation.facts, is_timed=False).exact
    return replace(
        exact,
        column=Column.COUNTED,
        assumed={},
        counted=dict.fromkeys(
            exact.assumed,
            f"from the token counts of the run's routers in step {step}, on every rank",
        ),
        step=derivation.exact.step,
        undefined={**derivation.exact.undefined, **exact.undefined},
    )
