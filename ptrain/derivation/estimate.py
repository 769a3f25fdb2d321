"""`derive`: what a spec costs, by the paper (`paper`) and as it runs (`exact`), and its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TypeVar

from ptrain.axes.data.form import require_executed
from ptrain.axes.expert.form import assumed
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.by_rank import ByRank, distinct, rows_by_rank
from ptrain.cost import (
    Column,
    Estimate,
    Footprint,
    Peak,
    State,
    Traffic,
    TrafficKey,
)
from ptrain.derivation import blocks
from ptrain.derivation.clock import LaneSpan
from ptrain.derivation.in_flight import in_flight
from ptrain.derivation.interconnect import warnings
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.memory import startup_bytes
from ptrain.derivation.notes import notes
from ptrain.derivation.operations import operations
from ptrain.derivation.paper import paper
from ptrain.derivation.pipeline import accounts, fullest_of, resident, staged
from ptrain.derivation.throughput import with_interval
from ptrain.derivation.workspaces import kernel_warnings, unclaimed
from ptrain.errors import refused
from ptrain.facts.model import ModelFacts
from ptrain.installed import torch_minor
from ptrain.plan.lower import lower, own_facts
from ptrain.rates.pace import UnknownRate
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.placement import CUTTING_AXES, Tier
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.wording import Worded

_HOW_TO_TRACE = (
    "Run `ptrain predict`, which traces the model; in Python, use `derive(spec, read_facts(spec))`"
)
_NOT_TRACED_BY_STAGE = f"these facts have no trace of the stages' activations: {_HOW_TO_TRACE}"
_NOT_TRACED = f"these facts have no trace of the model's activations: {_HOW_TO_TRACE}"
_NOT_PLAYED = "its step depends on the activations of the model, which are unknown"
_FP8_TIME = (
    "fp8 products take half the time of bf16 products, the ratio of peaks in data sheets: the "
    "cluster has no rate for them"
)
_EVEN_TIME = "balanced routing is assumed: the time of uneven routing is not predicted"
_CUT_PROGRAMS = "compiled programs whose operators or tokens are sharded are not predicted yet"
PROGRAMS_OF_GPUS = "compiled programs of GPUs are not predicted yet, which Triton makes"
_PROVEN = ("2.13",)  # versions of torch whose programs were seen to allocate what was predicted
_UNPROVEN = f"compiled programs are predicted with torch {', '.join(_PROVEN)} only, and this is"
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
    return _estimated(spec, facts, None, partial(_exact, limit=limit, of_memory=True))[1]


def exact_alone(
    spec: Spec, facts: ModelFacts, machine: Machine | None, limit: float = inf
) -> Estimate:
    """Return of a legal spec's derivation what is exact, without operations and the paper's
    figures. Raises TooLarge once the peak is above `limit`."""
    return _estimated(spec, facts, machine, partial(_timed, limit=limit))[1]


def step_seconds(spec: Spec, facts: ModelFacts) -> float | None:
    """Return of a legal spec's derivation the time of a step alone; None where it is unknown."""
    with suppress(UnknownRate):
        step = _estimated(spec, facts, None, partial(_with_step, of_memory=True))[1].step
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
    *,
    limit: float = inf,
) -> Estimate:
    """With the step's time, or why there is none."""
    why = _NOT_PLAYED
    try:
        estimate = _with_step(spec, plan, facts, machine, limit=limit)
    except UnknownRate as unknown:
        estimate, why = _exact(spec, plan, facts, None, limit=limit), str(unknown)
    if estimate.step is None:
        return replace(estimate, undefined={**estimate.undefined, "step_seconds": why})
    return replace(estimate, step=with_interval(spec, estimate.step))


def _with_step(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float = inf,
    of_memory: bool = False,
) -> Estimate:
    """As `exact` does. Raises UnknownRate where a rate is missing."""
    machine = machine_of(spec, plan, facts) if machine is None else machine
    if plan.loads is None:
        return _exact(spec, plan, facts, machine, limit=limit, of_memory=of_memory)
    even = spec.but(routing=None), replace(plan, loads=None)
    step = _exact(*even, facts, machine, of_memory=of_memory).step
    step = step and step._replace(assumed=(*step.assumed, _EVEN_TIME))
    estimate = _exact(spec, plan, facts, None, limit=limit, of_memory=of_memory)
    return replace(estimate, step=step)


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
    limit: float = inf,
    of_memory: bool = False,
) -> Estimate:
    """Where sizes depend on data, their bounds."""
    limit = inf if facts.others else limit  # of several peaks the least decides
    estimate = exact(spec, plan, facts, machine, limit=limit, of_memory=of_memory)
    others = [exact(spec, plan, other, limit=limit, of_memory=of_memory) for other in facts.others]
    return bounded(estimate, others, facts.by_data) if others else estimate


def facts_from_shape(spec: Spec) -> ModelFacts | None:
    """The facts of a built-in model whose activations tables tell, or that cannot be traced: then
    nothing is said of them. None where the model itself is to be read."""
    if not isinstance(spec.model, ModelShape) or spec.data.function is not None:
        return None
    facts = own_facts(spec)
    return facts if is_tabulated(spec) or not_traceable(spec, spec.model) else None


def not_traceable(spec: Spec, shape: ModelShape) -> str:
    """Return why a built-in model cannot be traced as the spec runs it; empty if it can."""
    if spec.compile is not Compiled.NONE:
        if spec.is_cut_over(CUTTING_AXES):
            return _CUT_PROGRAMS
        if spec.is_for_cuda:
            return PROGRAMS_OF_GPUS
        if torch_minor() not in _PROVEN:
            return f"{_UNPROVEN} {torch_minor()}"
    return _NOT_ON_CPU if shape.attention is Attention.FLEX else ""


def _untold(spec: Spec, facts: ModelFacts, reason: str) -> dict[str, str]:
    """Return by figure why nothing is said of it: of activations and peaks, and of traffic where it
    is not known what the modes of activations move and send again."""
    cause = facts.untraced
    if isinstance(spec.model, ModelShape) and not facts.roles:
        cause = not_traceable(spec, spec.model) or cause
    figures = ("activations", "peak", *(() if blocks.are_known(spec) else ("traffic",)))
    return dict.fromkeys(figures, cause or reason)


def exact(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None = None,
    *,
    limit: float = inf,
    of_memory: bool = False,
) -> Estimate:
    """Memory per state and rank, peaks per phase, traffic per axes x collective x state x phase.
    Of a `machine` the step's time, too. `of_memory`: of nothing else than the fullest ranks. Raises
    TooLarge for a peak above `limit`. Each rank's rows are those of its stages; of traffic there is
    a row for each account, where they differ."""
    stages, schedule = staged(spec, plan, facts), schedule_of(spec)
    memory = resident(spec, plan, stages, schedule)
    estimate = Estimate(column=Column.EXACT, world_size=spec.world_size, memory=memory)
    if (is_tabulated(spec) and not facts.roles) or stages[0].is_traced:
        timing = machine.of_step(spec, plan, facts, schedule) if machine else None
        # a host counts all, and the time of a step depends on all
        is_all = not of_memory or timing or spec.activations.tiers != {Tier.DEVICE}
        stands_for = None if is_all else fullest_of(schedule, stages)
        flight = in_flight(spec, schedule, stages, memory, timing, stands_for, limit)
        memory = memory.and_then(flight.memory)
        step = flight.step
        if step and _is_fp8_derived(spec):
            step = step._replace(assumed=(*step.assumed, _FP8_TIME))
        estimate = replace(estimate, memory=memory, peak=flight.peaks, step=step)
    else:
        reason = _NOT_TRACED if plan.pipeline is None else _NOT_TRACED_BY_STAGE
        estimate = replace(estimate, undefined=_untold(spec, facts, reason))
    if of_memory:
        return estimate
    own, account_of = accounts(spec, plan, facts, stages, schedule)
    keys = dict.fromkeys(row.key for rows in own for row in rows)
    traffic = tuple(dict.fromkeys(_of_key(key, rows) for key in keys for rows in own))
    return replace(
        estimate,
        traffic=traffic,
        notes=tuple(notes(stages[0].parts[0][0], facts, traffic, schedule)),
        warnings=tuple(warnings(spec, traffic)),
        accounts=own if len(own) > 1 else (),
        account_of=account_of if len(own) > 1 else (),
    )


def _is_fp8_derived(spec: Spec) -> bool:
    """Return True if the times of fp8 products are derived from measured bf16 products."""
    rates = spec.cluster.rates if spec.cluster else None
    is_measured = rates is not None and any(row.key[0] is DType.FP8 for row in rates.products)
    return spec.precision.matmul is not Matmul.NONE and not is_measured


def _of_key(key: TrafficKey, rows: Iterable[Traffic]) -> Traffic:
    """What an account says of one kind of call, which its rank may have none of."""
    none = Traffic(key=key, calls=0, payload_bytes=0, sent_bytes=0)
    return next((row for row in rows if row.key == key), none)


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
