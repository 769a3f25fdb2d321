"""`derive`: a spec's cost by the paper's formulas (`paper`) and as it runs (`exact`), and its plan.

Model FLOPs utilization (MFU) follows from the time of a step. A token costs 6N + 12·L·d·s
operations in forward and backward, with 4 instead of 6 for a frozen parameter. N counts parameters
that are not only looked up (embedding, positions), and of experts those that a token visits. L is
the number of layers, d the width of all heads (the mean of queries and values), s the sequence
length. Scores count in full (`full`), or their causal half (`causal`); recomputation does not.

specs/step_times.yaml compares predictions with published results. For each family of specs it has
the interval of the collected steps as multiples of their predictions, with the devices that ran
them, and the best MFU of the collected steps by peak FLOP/s of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isclose
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ptrain.axes.data.form import require_executed
from ptrain.axes.expert.form import routing_assumptions
from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.by_rank import ByRank, distinct, rows_by_rank
from ptrain.cost import (
    PLACED,
    Column,
    Estimate,
    Footprint,
    Peak,
    State,
    StepTime,
    Traffic,
    TrafficKey,
)
from ptrain.derivation import blocks
from ptrain.derivation.clock import LaneSpan
from ptrain.derivation.ghosts.wrapping import startup_bytes
from ptrain.derivation.in_flight import in_flight
from ptrain.derivation.interconnect import placement_warnings
from ptrain.derivation.kernels import kernel_warnings, unclaimed_figures
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.machine import Machine, machine_of
from ptrain.derivation.paper import notes, paper
from ptrain.derivation.pipeline import accounts, fullest_of, resident, split_stages
from ptrain.derivation.work import rank_operations
from ptrain.errors import input_error
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import elements_met
from ptrain.installed import torch_minor
from ptrain.optimizers.groups import require_equal_copies, require_matches
from ptrain.plan.lower import built_in_facts, lower
from ptrain.rates.pace import UnknownRate
from ptrain.spec.cluster import Cluster
from ptrain.spec.dials import Compiled
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.names import load_table
from ptrain.spec.placement import DATA_AXES, Axis, Tier
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
_PROGRAM_TIME = "the host's time to enter a compiled program is not included"
_PROGRAM_OF_CPU = "compiled programs are estimated from CPU programs; a GPU's may fuse others"
_PROVEN = ("2.11", "2.13", "2.14", "2.15")  # torch whose programs are exact in nightly tests
_UNPROVEN = f"compiled programs are predicted with torch {', '.join(_PROVEN)} only, and this is"
_NOT_ON_CPU = "torch's flex_attention has no backward pass on CPUs, where a trace would run"


_OfStep = Callable[[Spec, Plan, ModelFacts, Machine | None], Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation(Worded):
    """Both predictions of one spec, the plan of the exact one, and the facts of the model."""

    paper: Estimate
    exact: Estimate
    plan: Plan
    facts: ModelFacts = field(repr=False, compare=False)

    @property
    def spec(self) -> Spec:
        """The spec of the plan."""
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
        The derivation: `exact` (the figures that ptrain verifies), `paper` (the figures of the
        paper's formulas) and `plan`. Sizes are bytes per rank, times are seconds per step.

    Raises:
        SpecError: The model does not fit the spec, or a value is still `auto`.

    Example:
        >>> import ptrain
        >>> ptrain.derive(ptrain.load("zero3").spec).exact.peak_bytes()
        20408040
    """
    facts = built_in_facts(spec) if facts is None else facts
    plan, estimate = _estimate_legal(spec, facts, machine, _add_time if is_timed else _exact_memory)
    spec = plan.spec
    own = spec.model.ignored if isinstance(spec.model, ModelShape) else ()
    ignored = ", ".join(own or facts.ignored)
    estimate = replace(
        estimate,
        operations=rank_operations(spec, plan),
        warnings=(
            *estimate.warnings,
            *kernel_warnings(spec, estimate.unclaimed, estimate.undefined),
            *([f"fields of the model's config without effect: {ignored}"] if ignored else ()),
        ),
    )
    return Derivation(paper=paper(spec, facts), exact=estimate, plan=plan, facts=facts)


def fullest_alone(spec: Spec, facts: ModelFacts, limit: float = inf) -> Estimate:
    """Return the exact memory of a legal spec, in a fraction of the time of `derive`, for searches
    that check many specs.

    Traffic, operations, notes and step time are left out. In a pipeline, fuller ranks stand for the
    others.

    Raises:
        PeakExceeded: The peak is above `limit`.
    """
    return _estimate_legal(spec, facts, None, partial(_exact_memory, limit=limit, of_memory=True))[
        1
    ]


def exact_alone(
    spec: Spec, facts: ModelFacts, machine: Machine | None, limit: float = inf
) -> Estimate:
    """Return the exact estimate of a legal spec, without operations and the paper's figures.

    Raises:
        PeakExceeded: The peak is above `limit`.
    """
    return _estimate_legal(spec, facts, machine, partial(_add_time, limit=limit))[1]


def step_seconds(spec: Spec, facts: ModelFacts) -> float | None:
    """Return only the step time of a legal spec; None if it is unknown."""
    with suppress(UnknownRate):
        step = _estimate_legal(spec, facts, None, partial(_with_step, of_memory=True))[1].step
        return step.seconds if step else None
    return None


def _estimate_legal(
    spec: Spec, facts: ModelFacts, machine: Machine | None, of_step: _OfStep
) -> tuple[Plan, Estimate]:
    _require_gradients(spec, facts)
    plan = lower(spec, facts)
    spec = plan.spec
    require_executed(spec, plan, facts)
    require_matches(spec.optimizer, facts)
    if plan.pipeline is not None:
        require_equal_copies(spec.optimizer, chain_of(spec, facts).tied)
    estimate = of_step(spec, plan, facts, machine)
    estimate = replace(
        estimate,
        unclaimed=unclaimed_figures(spec, facts),
        assumed=routing_assumptions(spec),
        startup_bytes=startup_bytes(spec, facts),
        builds_whole=bool(facts.built_whole),
    )
    return plan, estimate


def _add_time(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float = inf,
) -> Estimate:
    """Return the estimate with the step time, or with the reason why there is none."""
    why = _NOT_PLAYED
    try:
        estimate = _with_step(spec, plan, facts, machine, limit=limit)
    except UnknownRate as unknown:
        estimate, why = _exact_memory(spec, plan, facts, None, limit=limit), str(unknown)
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
    """Return the exact estimate with the step time, or raise UnknownRate if a rate is missing."""
    machine = machine_of(spec, plan, facts) if machine is None else machine
    if plan.loads is None:
        return _exact_memory(spec, plan, facts, machine, limit=limit, of_memory=of_memory)
    # Memory and traffic follow the stated routing. The time of uneven ranks is unknown, so that of
    # an even routing is given, with a note.
    even = spec.with_fields(routing=None), replace(plan, loads=None)
    step = _exact_memory(*even, facts, machine, of_memory=of_memory).step
    step = step and step._replace(assumed=(*step.assumed, _EVEN_TIME))
    estimate = _exact_memory(spec, plan, facts, None, limit=limit, of_memory=of_memory)
    return replace(estimate, step=step)


def _require_gradients(spec: Spec, facts: ModelFacts) -> None:
    """Raise SpecError if a parameter may have a gradient on one data rank and none on another,
    because the ranks would reduce different sets of gradients."""
    if not facts.unvisited or spec.data_degree == 1:
        return
    first, *others = facts.unvisited
    number = len(others)
    more = f" and {number} parameter{'s' * (number > 1)} more have" if others else " has"
    raise input_error(
        "model",
        f"{first}{more} no gradient on ranks without tokens for it, but data-parallel ranks sum "
        "the gradients of all parameters",
        "Call every expert, even with zero rows, or store all experts in stacked tensors.",
    )


def _exact_memory(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None,
    *,
    limit: float = inf,
    of_memory: bool = False,
) -> Estimate:
    """Return the exact estimate, with bounds if sizes depend on data."""
    # a spec that depends on data fits if its smallest peak does, so none may stop the simulation
    limit = inf if facts.others else limit
    estimate = exact_estimate(spec, plan, facts, machine, limit=limit, of_memory=of_memory)
    others = [
        exact_estimate(spec, plan, other, limit=limit, of_memory=of_memory)
        for other in facts.others
    ]
    return with_bounds(estimate, others, facts.by_data) if others else estimate


def facts_from_shape(spec: Spec) -> ModelFacts | None:
    """Return the facts of a built-in model that is not traced, because tables cover it or it cannot
    be traced; None if the module must be read."""
    if not isinstance(spec.model, ModelShape) or spec.data.function is not None:
        return None
    facts = built_in_facts(spec)
    return facts if is_tabulated(spec) or not_traceable(spec, spec.model) else None


def not_traceable(spec: Spec, shape: ModelShape) -> str:
    """Return why a built-in model cannot be traced as the spec runs it; empty if it can."""
    if spec.compile is not Compiled.NONE and torch_minor() not in _PROVEN:
        return f"{_UNPROVEN} {torch_minor()}"
    return _NOT_ON_CPU if shape.attention is Attention.FLEX else ""


def _undefined_figures(spec: Spec, facts: ModelFacts, reason: str) -> dict[str, str]:
    """Return the figures that are undefined, with the reason: activations and peaks, and traffic if
    the activation modes' copies and repeated collectives are unknown."""
    cause = facts.untraced
    if isinstance(spec.model, ModelShape) and not facts.roles:
        cause = not_traceable(spec, spec.model) or cause
    figures = ("activations", "peak", *(() if blocks.are_known(spec) else ("traffic",)))
    return dict.fromkeys(figures, cause or reason)


def exact_estimate(
    spec: Spec,
    plan: Plan,
    facts: ModelFacts,
    machine: Machine | None = None,
    *,
    limit: float = inf,
    of_memory: bool = False,
) -> Estimate:
    """Return memory by state and rank, peaks by phase, and traffic by axes, collective, state and
    phase.

    Args:
        spec: The spec.
        plan: Its plan.
        facts: Its model.
        machine: Rates to predict the step time. None predicts none.
        limit: Bytes of the largest allowed peak.
        of_memory: Only simulate the fullest ranks, and leave out traffic.

    Raises:
        PeakExceeded: The peak is above `limit`.
    """
    stages, schedule = split_stages(spec, plan, facts), schedule_of(spec)
    memory = resident(spec, plan, stages, schedule)
    estimate = Estimate(column=Column.EXACT, world_size=spec.world_size, memory=memory)
    if (is_tabulated(spec) and not facts.roles) or stages[0].is_traced:
        timing = machine.of_step(spec, plan, facts, schedule) if machine else None
        # the host bytes of a node are sums over ranks, and the slowest rank decides the time
        is_all = not of_memory or timing or spec.activations.tiers != {Tier.DEVICE}
        stands_for = None if is_all else fullest_of(schedule, stages)
        flight = in_flight(spec, schedule, stages, memory, timing, stands_for, limit)
        memory = memory.extend(flight.memory)
        step = flight.step
        if step:
            step = step._replace(assumed=(*step.assumed, *_time_assumptions(spec)))
        estimate = replace(estimate, memory=memory, peak=flight.peaks, step=step)
    else:
        reason = _NOT_TRACED if plan.pipeline is None else _NOT_TRACED_BY_STAGE
        estimate = replace(estimate, undefined=_undefined_figures(spec, facts, reason))
    if of_memory:
        return estimate
    own, account_of = accounts(spec, plan, facts, stages, schedule)
    keys = dict.fromkeys(row.key for rows in own for row in rows)
    traffic = tuple(dict.fromkeys(_of_key(key, rows) for key in keys for rows in own))
    return replace(
        estimate,
        traffic=traffic,
        notes=tuple(notes(stages[0].parts[0][0], facts, traffic, schedule)),
        warnings=tuple(placement_warnings(spec, traffic)),
        accounts=own if len(own) > 1 else (),
        account_of=account_of if len(own) > 1 else (),
    )


def _time_assumptions(spec: Spec) -> Iterator[str]:
    """Yield sentences about the times of fp8 products and of compiled programs."""
    if _is_fp8_derived(spec):
        yield _FP8_TIME
    if spec.compile is not Compiled.NONE:
        yield _PROGRAM_TIME
        if spec.is_for_cuda:
            yield _PROGRAM_OF_CPU


def _is_fp8_derived(spec: Spec) -> bool:
    """Return True if the times of fp8 products are derived from measured bf16 products."""
    rates = spec.cluster.rates if spec.cluster else None
    is_measured = rates is not None and any(row.key[0] is DType.FP8 for row in rates.products)
    return spec.precision.matmul.is_fp8 and not is_measured


def _of_key(key: TrafficKey, rows: Iterable[Traffic]) -> Traffic:
    """Return an account's row of one kind of call, with zeros if its rank has no such call."""
    none = Traffic(key=key, calls=0, payload_bytes=0, sent_bytes=0)
    return next((row for row in rows if row.key == key), none)


# Bounds for a model that selects elements by data: the step is derived at several numbers of
# selected elements. Figures that do not depend on traces (Θ, Ω, G, traffic) are equal in all.

RowT = TypeVar("RowT", Footprint, Peak)

_EXTENTS = (
    "the bounds assume one selected element and all elements; they hold if allocations grow "
    "with the number of selected elements"
)
_OFF_DEVICE = attrgetter("state", "rank", "host_bytes", "file_bytes")
_PASSING = (State.ACTIVATIONS, State.TRANSIENT)


def with_bounds(estimate: Estimate, others: Sequence[Estimate], who: str) -> Estimate:
    """Return an estimate with bounds from `others`, the estimates at other numbers of selected
    elements. Activations, peaks and traffic are undefined if the elements are offloaded or
    communicated. `who` names the modules that select."""
    if any(_offload_key(other) != _offload_key(estimate) for other in others):
        why = f"{who}, and the selected elements are offloaded or communicated"
        undefined = dict.fromkeys(("activations", "peak", "traffic"), why)
        rows = tuple(row for row in estimate.memory if row.state not in _PASSING)
        return replace(estimate, memory=rows, peak=(), undefined=estimate.undefined | undefined)
    columns = (estimate, *others)
    return replace(
        estimate,
        memory=_bound_rows([column.memory for column in columns]),
        peak=_bound_rows([column.peak for column in columns]),
        by_data=dict.fromkeys(("activations", "peak"), f"{who}; {_EXTENTS}"),
    )


def _offload_key(estimate: Estimate) -> object:
    off_device = set(map(_OFF_DEVICE, distinct(estimate.memory)))
    return set(estimate.traffic), estimate.account_of, off_device


def _bound_rows(columns: Sequence[Sequence[RowT]]) -> Sequence[RowT]:
    """Return each rank's rows, which all columns have in the same order, with their bounds."""
    by_rank = [column for column in columns if isinstance(column, ByRank)]
    if len(by_rank) < len(columns):
        return [_bound_row(rows) for rows in zip(*columns, strict=True)]
    ranks = range(max((len(kind_of) for _, kind_of in by_rank[0].parts), default=0))
    return rows_by_rank(
        (tuple(column.kinds_of(rank) for column in by_rank) for rank in ranks),
        lambda kinds: [
            _bound_row(rows) for rows in zip(*map(ByRank.of_kinds, by_rank, kinds), strict=True)
        ],
    )


def _bound_row(rows: Sequence[RowT]) -> RowT:
    sizes = [row.device_bytes for row in rows]
    lower = None if min(sizes) == max(sizes) else min(sizes)
    return replace(rows[0], device_bytes=max(sizes), lower_bytes=lower)


def step_lanes(derivation: Derivation) -> tuple[LaneSpan, ...]:
    """Return the spans of a step: compute and communication of one rank, or the passes of all
    pipeline ranks. Only one of the micro-batches between the first and the last is included.
    Raise UnknownRate if the step time is unknown."""
    spec, facts = derivation.spec, derivation.facts
    spans: list[LaneSpan] = []
    machine = machine_of(spec, derivation.plan, facts)
    derive(spec, facts, machine._replace(plays_all=True, spans=spans))
    return tuple(spans)


# A separate column, because predictions never read a run.
def by_counts(derivation: Derivation, histogram: Histogram, step: int) -> Estimate | None:
    """Return the exact estimate with the token counts of a run's `step` (from 1), or None if the
    prediction assumes no routing."""
    if not derivation.exact.assumed:
        return None
    exact = derive(
        derivation.spec.with_fields(routing=histogram), derivation.facts, is_timed=False
    ).exact
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


_MODEL_AXES = (Axis.TP, Axis.PP)
_ALIKE = 0.02  # relative tolerance of device memory: torch's value varies with the driver
# Operations of a token (module docstring): a product has 2 per parameter, forward once and backward
# twice. Scores and values are two products of s·d, hence 2·2·3. A causal mask leaves half of them.
_OF_A_PARAMETER, _FULL, _CAUSAL = 6, 12, 6
_OF_A_FROZEN = 4  # it has no gradient


class Throughput(NamedTuple):
    """Throughput of the full job. The MFUs are None if the cluster has no `flops`, or for models
    that are not built in."""

    tokens_per_second: float
    mfu_full: float | None = None
    mfu_causal: float | None = None


def predict_throughput(spec: Spec, facts: ModelFacts, step: StepTime) -> Throughput | None:
    """Return the throughput of a step. None if samples are not tokens, or if the step takes no
    time."""
    if (number := step_tokens(spec, facts)) is None or not step.seconds:
        return None
    tokens = number / step.seconds
    flops = spec.cluster.flops * spec.world_size if spec.cluster else 0.0
    if not flops or not isinstance(spec.model, ModelShape):
        return Throughput(tokens_per_second=tokens)
    full = token_operations(spec.model, facts, spec.batch.sequence, is_causal=False)
    causal = full + (_CAUSAL - _FULL) * _score_width(spec.model, spec.batch.sequence)
    return Throughput(
        tokens_per_second=tokens,
        mfu_full=tokens * full / flops,
        mfu_causal=tokens * causal / flops,
    )


def step_tokens(spec: Spec, facts: ModelFacts) -> int | None:
    """Return the tokens of a step on all ranks, or None if samples are not tokens."""
    return spec.batch.tokens if facts.sample_bytes is None else None


def token_operations(
    shape: ModelShape, facts: ModelFacts, sequence: int, *, is_causal: bool
) -> int:
    """Return the floating-point operations of one token, forward and backward."""
    of_parameters = sum(
        (_OF_A_FROZEN if tensor.is_frozen else _OF_A_PARAMETER)
        * elements_met(shape, tensor.name, tensor.num_quantized or tensor.numel)
        for tensor in facts.tensors
        if not _is_looked_up(shape, tensor.name)
    )
    return of_parameters + (_CAUSAL if is_causal else _FULL) * _score_width(shape, sequence)


def _score_width(shape: ModelShape, sequence: int) -> int:
    """Return the sequence length times the width of the heads, summed over all layers."""
    return shape.layers * ((shape.query_width + shape.value_width) // 2) * sequence


def _is_looked_up(shape: ModelShape, name: str) -> bool:
    """Return True if a tensor is only looked up: positions, or an untied embedding."""
    module = name.split(".", maxsplit=1)[0]
    return module == "positions" or (module == "embed" and not shape.tied)


def step_family(spec: Spec) -> str:
    """Return the family of specs whose step times are comparable. Empty if no published step
    belongs to it."""
    if spec.compile is not Compiled.NONE:
        return ""
    has_experts = isinstance(spec.model, ModelShape) and spec.model.experts is not None
    if not spec.is_for_cuda:
        return "" if has_experts else "CPU"
    is_dense = isinstance(spec.model, ModelShape) and not has_experts
    if spec.precision.matmul is not Matmul.NONE:
        return ""
    if not is_dense or spec.precision.effective_layout.parameters is not DType.BF16:
        return ""
    modes = (factor.placement[state] for factor in spec.factors for state in PLACED)
    is_offloaded = any(mode.tier is not Tier.DEVICE for mode in modes)
    axes = {factor.axis for factor in spec.factors if factor.degree > 1}
    has_other_axes = bool(axes - {*DATA_AXES, *_MODEL_AXES})
    if has_other_axes or is_offloaded or spec.activations.tiers != {Tier.DEVICE}:
        return ""
    return "GPU with tp or pp" if axes & {*_MODEL_AXES} else "GPU with data axes"


def published_steps(spec: Spec) -> Mapping[str, Any] | None:
    """Return the interval of the collected steps of a spec's family.

    Returns:
        The interval, with the family's name as `steps`. None if the family has no steps, or if none
        of them ran on devices with the peak FLOP/s and memory of the spec's devices.
    """
    known = _published_rows("intervals").get(step_family(spec))
    if known is None or not spec.is_for_cuda or spec.cluster is None:
        return known
    flops, memory = spec.cluster.flops, spec.cluster.device_memory
    is_known = any(
        flops == row["flops"] and isclose(memory, row["memory"], rel_tol=_ALIKE)
        for row in known["devices"].values()
    )
    return known if is_known else None


def with_interval(spec: Spec, step: StepTime) -> StepTime:
    """Return a step with the interval in seconds that contains nearly all collected steps."""
    known = published_steps(spec)
    interval = (known["low"] * step.seconds, known["high"] * step.seconds) if known else None
    return step._replace(interval=interval)


def best_collected_mfu(cluster: Cluster | None) -> tuple[float, str, str] | None:
    """Return the best MFU of the collected PyTorch steps, the device and the source.

    Only devices with the peak FLOP/s of the cluster's devices count, with full attention scores.
    The result is None if there are none.
    """
    for flops, row in _published_rows("best_mfu").items():
        if cluster is not None and float(flops) == cluster.flops:
            return row["mfu"], row["device"], row["source"]
    return None


def _published_rows(key: str) -> dict[Any, Any]:
    rows: dict[Any, Any] = load_table("step_times.yaml")[key]
    return rows
