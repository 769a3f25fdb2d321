"""The screen of `ptrain predict` for one spec: the answer, then memory, traffic and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from ptrain.axes.context.draw import balance_text
from ptrain.by_rank import distinct, distinct_values
from ptrain.cost import (
    TIERS,
    Estimate,
    Peak,
    Phase,
    State,
    Traffic,
    TrafficKey,
    busiest,
    lower_bytes,
)
from ptrain.derivation.estimate import Derivation
from ptrain.derivation.ghosts.wrapping import ranks_per_node
from ptrain.errors import input_error
from ptrain.facts.parameters import count_weights
from ptrain.optimizers.update import saved_bytes
from ptrain.plan.composition import condition_lines, explain_compositions, ranks_text
from ptrain.report.screen import command_line, fold_line, screen_width
from ptrain.report.step_time import device_name, job_pace, pace_parts, time_lines
from ptrain.report.table import (
    MISSING,
    Importance,
    Largest,
    TableColumn,
    by_data_lines,
    heading,
    largest_bytes,
    lower_bounds,
    make_columns,
    measuring_command,
    memory_span,
    memory_text,
    moved_bytes,
    name_column,
    needs_gpu,
    render_table,
    text_or_dash,
    tier_labels,
    traffic_label,
    traffic_order,
    traffic_text,
)
from ptrain.selection.fit import (
    HOST_UNKNOWN,
    Fit,
    fit,
    host_text,
    peak_text,
    usable_text,
)
from ptrain.selection.preflight import FitAdvice, Reload, Variant, find_changes, find_faster
from ptrain.spec.batch import batch_lines
from ptrain.spec.dials import Compiled
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups
from ptrain.steps.step import Plan
from ptrain.units import format_bytes, format_operations, format_seconds

MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
MODEL_STATES_LABEL = "model states"  # parameters, optimizer state and gradients together
_BAR = 24  # columns of the longest bar


class ReservedMemory(NamedTuple):
    """The memory that CUDA's allocator would reserve on a rank, as text and as a record.

    `record` is by kind of segments; it is None for a spec that is not for GPUs.
    """

    lines: tuple[str, ...]
    record: Mapping[str, object] | None


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class Prediction:
    """A spec with its derivation, and the changes that make it fit or faster.

    Attributes:
        label: The name of the spec among others of a sweep.
        num_parameters: The number of elements of the model's parameters.
        advice: Changes with which the spec fits, if it does not.
        faster: Changes that make a step faster.
        words: The arguments that load the spec, as the user typed them.
        reserving: Reserved memory; None unless it was requested.
    """

    label: str
    spec: Spec
    derivation: Derivation
    num_parameters: int
    advice: FitAdvice = field(default_factory=FitAdvice)
    faster: tuple[Variant, ...] = ()
    words: tuple[str, ...] = ("SPEC",)
    allow_import: bool = False
    reserving: ReservedMemory | None = None

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of the tensors in a checkpoint."""
        return saved_bytes(self.spec, self.derivation.facts)

    @property
    def fit(self) -> Fit:
        """The figures that decide whether the spec fits."""
        return fit(self.spec, self.derivation.exact)

    @property
    def measuring_command(self) -> str:
        """The command that measures the peak if it is not predicted."""
        exact = self.derivation.exact
        return measuring_command(self.spec, exact, self.words, allow_import=self.allow_import)


def prediction_screen(prediction: Prediction, *, explain: bool = False) -> str:
    """Return the screen of one spec; its second line is the answer.

    Args:
        prediction: The spec and its derivation.
        explain: Add the column `paper`, the reasons why the columns differ, and the theorems.
    """
    paper, exact = prediction.derivation.paper, prediction.derivation.exact
    estimates = (paper, exact) if explain else (exact,)
    column = "exact" if explain else "predicted"
    places = place_table(prediction.spec, prediction.derivation.plan, exact)
    title, *rest = fold_line(heading(prediction.spec, prediction.num_parameters), screen_width())
    context = prediction.derivation.plan.context
    return "\n".join(
        [
            title,
            *fold_line(answer_line(prediction), screen_width()),
            *rest,
            *batch_lines(prediction.spec.batch, prediction.spec.data_degree),
            *advice_lines(prediction),
            *faster_lines(prediction),
            "",
            _memory_table(*estimates, title=column),
            *fit_lines(prediction),
            *checkpoint_lines(prediction),
            *startup_lines(prediction),
            *(prediction.reserving.lines if prediction.reserving else ()),
            "",
            *([places, ""] if places else []),
            _traffic_table(*estimates, title=column),
            "",
            *time_lines(prediction.derivation),
            *operations_lines(exact),
            *([f"balance: {balance_text(context)}"] if context else []),
            *by_data_lines(exact),
            *(f"warning: {warning}" for warning in exact.warnings),
            *(explanation_lines(prediction) if explain else ()),
        ]
    ).rstrip("\n")


def prediction_of(
    derivation: Derivation,
    *,
    label: str = "",
    offer: bool = True,
    explain: bool = False,
    reload: Reload | None = None,
    **more: Any,
) -> Prediction:
    """Return the prediction of a derivation, with advice.

    Args:
        derivation: The derived spec.
        label: The name of the spec among others; by default its name.
        offer: Search for changes with which the spec fits, if it does not, and for faster ones.
        explain: Search for faster changes of a pipeline too, which takes long to derive.
        reload: Loads the spec again with overrides; None: no faster changes are searched.
        more: Further fields of the prediction.
    """
    spec, facts, exact = derivation.spec, derivation.facts, derivation.exact
    fitting = fit(spec, exact)
    tries = offer and (explain or spec.degree(Axis.PP) == 1)
    misfit = offer and fitting.peak_bytes is not None and fitting.fits is False
    return Prediction(
        label=label or spec.name,
        spec=spec,
        derivation=derivation,
        num_parameters=count_weights(facts),
        advice=find_changes(spec, facts, exact, reload) if misfit else FitAdvice(),
        faster=find_faster(spec, facts, exact, reload) if tries and reload else (),
        **more,
    )


def require_cuda(predictions: Sequence[Prediction]) -> None:
    """Check that at least one spec is for GPUs, since `--reserved` describes CUDA's allocator.

    Raises:
        SpecError: If none is.
    """
    if not any(prediction.spec.is_for_cuda for prediction in predictions):
        of_specs = "the spec is not" if len(predictions) == 1 else "none of the specs is"
        raise input_error(
            "--reserved",
            f"what is reserved is CUDA's allocator's, and {of_specs} for GPUs",
            "Use `device=cuda`, or a cluster of GPUs.",
        )


def estimate_tables(estimate: Estimate) -> str:
    """Return the tables of a single estimate, predicted or measured."""
    column = str(estimate.column)
    wire = [
        name_column("bytes on the wire", ["+".join(row.axes) for row in estimate.wire]),
        TableColumn(column, cells=[traffic_text(row.sent_bytes) for row in estimate.wire]),
    ]
    undefined = [f"{column} has no {kind}: {why}" for kind, why in estimate.undefined.items()]
    parts = [
        _memory_table(estimate, title=column),
        _traffic_table(estimate, title=column),
        *([render_table(wire)] if estimate.wire else []),
        *(["\n".join(lines)] if (lines := [*operations_lines(estimate), *undefined]) else []),
    ]
    return "\n\n".join(parts)


def model_state_bytes(estimate: Estimate, tier: str = TIERS[0]) -> int | None:
    """Return the bytes of parameters, optimizer state and gradients on one tier.

    Args:
        estimate: A column of any kind.
        tier: The tier, by default the device.

    Returns:
        The sum of the largest rows of the three states; None if the estimate has no rows.
    """
    return _model_states(largest_bytes(estimate.memory), tier)


def _model_states(most: Largest, tier: str) -> int | None:
    """Return the sum of the three model states on a tier; None without rows."""
    return sum(most.get((state, tier), 0) for state in MODEL_STATES) if most else None


def sent_bytes(estimate: Estimate) -> int | None:
    """Return the bytes sent per rank in a steady step; None if the column defines no traffic."""
    return None if "traffic" in estimate.undefined else estimate.sent_bytes()


def operations_lines(estimate: Estimate) -> list[str]:
    """Return the operations of the rank with the most; empty if operations are not predicted."""
    if not estimate.operations:
        return []
    rows = distinct(estimate.operations)
    most = max(rows, key=lambda row: row.forward + row.backward + row.again)
    products = (
        f"{format_operations(most.forward)} forward, {format_operations(most.backward)} backward"
    )
    again = f", {format_operations(most.again)} recomputed" if most.again else ""
    return [f"matrix products per rank and step: {products}{again}"]


def answer_line(prediction: Prediction) -> str:
    """Return the answer: `Fits: 39.5 GiB of 74.12 GiB per GPU · 3.69 s/step · 71k tokens/s · …`."""
    seconds = None if (step := prediction.derivation.exact.step) is None else step.seconds
    pace = pace_parts(prediction.spec, seconds, job_pace(prediction.derivation))
    return " · ".join([_fit_answer(prediction), *pace])


def _fit_answer(prediction: Prediction) -> str:
    """Return the first part of the answer: does it fit, with the peak and the usable memory."""
    fitting, device = prediction.fit, device_name(prediction.spec)
    used = peak_text(fitting)
    if fitting.peak_bytes is None:
        peak = prediction.derivation.exact.peak_bytes()
        used = (
            f"{used} without activations"
            if peak is None
            else f"{memory_text(peak)} (not confirmed)"
        )
    if fitting.usable_memory is None:
        return f"Peak {used} per {device}; no cluster to compare it with"
    measure = f"{used} of {memory_text(fitting.usable_memory)} per {device}"
    if fitting.fits is None:
        return f"Unknown whether it fits: {measure}"
    if fitting.fits:
        return f"{'Fits, but tight' if fitting.is_tight else 'Fits'}: {measure}"
    short = memory_text(max(fitting.short_bytes, fitting.host_short_bytes))
    # Without a peak, or with bounds, the missing memory is a lower bound.
    is_least = fitting.peak_bytes is None or fitting.lower_bytes is not None
    host = f", {host_text(fitting)}" if fitting.host_short_bytes > 0 else ""
    return f"Does not fit by {short}{' or more' * is_least}: {measure}{host}"


def advice_lines(prediction: Prediction) -> list[str]:
    """Return the reason why the answer is unknown, or the changes with which the spec fits."""
    fitting = prediction.fit
    if fitting.fits is False:
        return [] if fitting.peak_bytes is None else _change_lines(prediction.advice)
    if fitting.peak_bytes is None:
        where = " on a GPU" if needs_gpu(prediction.spec, prediction.derivation.exact) else ""
        return [f"  {fitting.why}", f"  to measure the peak{where}: {prediction.measuring_command}"]
    if fitting.device_memory is None:
        return ["  Name a cluster to see whether it fits, for example cluster.preset=h100-8."]
    if fitting.fits is None:
        remedy = () if fitting.is_open else (f"  {HOST_UNKNOWN[1]}",)
        return [f"  {fitting.unknown}", *remedy]
    return []


def faster_lines(prediction: Prediction) -> list[str]:
    """Return a sentence for each setting that would make a step more than 5 % faster."""
    step, device = prediction.derivation.exact.step, device_name(prediction.spec)
    return [
        f"  {variant.command} would be {step.seconds / variant.seconds - 1:.0%} faster and needs "
        f"{memory_text(variant.fit.peak_bytes)} of {memory_text(variant.fit.usable_memory)} "
        f"per {device}{' (tight)' * variant.fit.is_tight}"
        for variant in prediction.faster
        if step is not None and variant.seconds
    ]


def _change_lines(advice: FitAdvice) -> list[str]:
    """Return a table of the changes that fit, or else of the closest one."""
    if not advice.variants:
        return advice.lines
    rows = [
        (
            variant.command,
            {True: "yes", False: "no", None: "unknown"}[variant.fit.fits],
            text_or_dash(variant.seconds, format_seconds),
            memory_text(variant.fit.peak_bytes),
            memory_text(variant.fit.spare_bytes) if variant.fit.fits else MISSING,
        )
        for variant in advice.variants
    ]
    is_fitting = advice.variants[0].fit.fits is not False
    columns = make_columns(
        rows,
        name_column("changes that fit" if is_fitting else "closest change"),
        TableColumn("fits", Importance.RESULT),
        TableColumn("step time"),
        TableColumn("peak"),
        TableColumn("to spare", Importance.DETAIL),
    )
    untraced = f"not tried, because each needs a trace: {', '.join(advice.untraced)}"
    return ["", render_table(columns), *([untraced] if advice.untraced else [])]


def fit_lines(prediction: Prediction) -> list[str]:
    """Return the usable memory with the bytes to spare, and the host memory."""
    fitting, host = prediction.fit, host_text(prediction.fit)
    least = " or more" * (fitting.lower_bytes is not None)
    spare = f"; {memory_text(fitting.spare_bytes)} to spare{least}" if fitting.fits else ""
    return [
        *(
            [usable_text(fitting.device_memory, fitting.reserve_bytes) + spare]
            if fitting.device_memory
            else []
        ),
        *([f"host memory: {host}"] if host else []),
    ]


def checkpoint_lines(prediction: Prediction) -> list[str]:
    """Return the size of a checkpoint, if the spec saves any."""
    saves = prediction.spec.checkpoint.every or prediction.spec.checkpoint.at_end
    size = format_bytes(prediction.checkpoint_bytes)
    return [f"checkpoint: {size} of tensors"] if saves else []


def next_commands(prediction: Prediction) -> list[str]:
    """Return commands for the next step, the shortest last."""
    words, fitting, verb = prediction.words, prediction.fit, "train"
    changes = next((v.overrides for v in prediction.advice.variants if v.fit.fits), ())
    is_eager = prediction.spec.compile is Compiled.NONE
    if fitting.fits is False:
        verb = "predict" if changes else "select"
        changes = changes or (() if is_eager else ("compile=none",))
    elif fitting.device_memory is None:
        verb, changes = "predict", ("cluster.preset=h100-8",)
    elif prediction.spec.is_for_cuda and is_eager:
        verb = "simulate"
    allowed = prediction.allow_import and verb != "select"
    command = command_line(verb, (*words, *changes), allow_import=allowed)
    is_told = fitting.peak_bytes is None and fitting.fits is None
    general = "ptrain help fit-a-model" if fitting.fits is False else f"ptrain {verb} --help"
    return [prediction.measuring_command if is_told else command, general]


def startup_lines(prediction: Prediction) -> list[str]:
    """Return the host memory that a node needs before the first step, and the reason.

    The line is left out for a built-in model whose start-up fits.
    """
    fitting, spec = prediction.fit, prediction.spec
    is_enough = fitting.startup_host_bytes <= (fitting.host_memory or inf)
    if isinstance(spec.model, ModelShape) and is_enough:
        return []
    count = ranks_per_node(spec)
    ranks = f"{count} rank{'s' * (count > 1)}"
    way = f"{ranks} read their parts of the files"
    if why := prediction.derivation.facts.built_whole:
        way = f"{ranks} build the full model: {why}"
    elif spec.model.pretrained is None:
        way = f"{ranks} draw one tensor at a time"
    needed, memory = memory_text(fitting.startup_host_bytes), fitting.host_memory
    room = (
        "per node (host memory unknown)" if memory is None else f"of {memory_text(memory)} per node"
    )
    return [f"host memory at start-up: {needed} {room}; {way}"]


def explanation_lines(prediction: Prediction) -> list[str]:
    """Return the reasons why the columns differ, undefined figures, and the theorems."""
    paper, exact = prediction.derivation.paper, prediction.derivation.exact
    lines = [""]
    if exact.notes:
        lines += ["why exact is not paper", *(f"  {note}" for note in exact.notes)]
    missing = [
        f"  {estimate.column}, {kind}: {reason}"
        for estimate in (paper, exact)
        for kind, reason in estimate.undefined.items()
        if kind != "step_seconds"  # the block of times has a line for it
    ]
    if missing:
        lines += ["figures that a column does not define", *missing]
    return lines + composition_lines(prediction)


def composition_lines(prediction: Prediction) -> list[str]:
    """Return the conditions under which axes compose, for each theorem that has any."""
    lines: list[str] = []
    for title, conditions in explain_compositions(prediction.spec, prediction.derivation.plan):
        lines += [title, *(f"  {line}" for line in condition_lines(conditions))]
    return lines


def _memory_table(*estimates: Estimate, title: str) -> str:
    """Return the table of memory per rank: states by tier, model states, and peaks by phase.

    Each estimate has a column; bars show the last one.
    """
    sizes = [largest_bytes(estimate.memory) for estimate in estimates]
    last = estimates[-1]
    lowers = lower_bounds(last.memory) if last.by_data else {}
    rows = [
        (label, [most.get((state, tier)) for most in sizes], lowers.get((state, tier)))
        for state in State
        for tier, label in tier_labels(state)
        if any(most.get((state, tier)) for most in sizes)
    ]
    bars = [numbers[-1] or 0 for _, numbers, _ in rows]
    # Bars are scaled before the rows of sums and peaks are added, which would dwarf them.
    longest = max((number or 0 for _, numbers, _ in rows for number in numbers), default=0)
    for tier, label in tier_labels(MODEL_STATES_LABEL):
        sums = [_model_states(most, tier) for most in sizes]
        if tier == TIERS[0] or any(sums):
            rows.append((label, sums, None))
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        peaks = [_highest_peak(estimate, phase) for estimate in estimates]
        if any(peaks):
            rows.append((f"peak {phase}", peaks, _highest_peak(last, phase, lower_bytes)))
    bars_text = ["█" * round(_BAR * number / longest) for number in bars]
    columns = [
        name_column("memory per rank", [label for label, _, _ in rows]),
        *(
            TableColumn(
                str(estimate.column), Importance.DETAIL, [memory_text(row[1][at]) for row in rows]
            )
            for at, estimate in enumerate(estimates[:-1])
        ),
        TableColumn(
            title,
            Importance.RESULT,
            [memory_span(lower, numbers[-1]) for _, numbers, lower in rows],
        ),
        TableColumn("", Importance.PICTURE, bars_text + [""] * (len(rows) - len(bars)), left=True),
    ]
    return render_table(columns)


def _highest_peak(
    estimate: Estimate, phase: Phase, of: Callable[[Peak], int] = attrgetter("device_bytes")
) -> int | None:
    """Return the highest peak of a phase, or its highest lower bound; None without rows."""
    return max((of(row) for row in distinct(estimate.peak) if row.phase is phase), default=None)


def _traffic_table(*estimates: Estimate, title: str) -> str:
    """Return the table of traffic, with a row for each kind of call.

    Set-up calls, which run once, are below the sum of a step. The columns calls, payload and copies
    are the last estimate's.
    """
    *others, last = estimates
    accounts = [{row.key: row for row in busiest(estimate.traffic)} for estimate in estimates]
    keys = sorted({key for account in accounts for key in account}, key=traffic_order)
    steady = [key for key in keys if key.phase is not Phase.SETUP]
    rows = [_traffic_row(key, accounts) for key in steady]
    sums = (traffic_text(sent_bytes(estimate)) for estimate in estimates)
    rows.append(("total", *sums, "", ""))
    if copied := last.copied_bytes():
        dashes = [MISSING] * len(others)
        rows.append(("copied between tiers", *dashes, traffic_text(copied), "", ""))
    rows += [_traffic_row(key, accounts) for key in keys if key not in steady]
    heads = [
        name_column("traffic per rank and step"),
        *(TableColumn(str(estimate.column), Importance.DETAIL) for estimate in others),
        TableColumn(title, Importance.RESULT),
        TableColumn("calls"),
        TableColumn("payload", Importance.DETAIL),
    ]
    return render_table(make_columns(rows, *heads))


def _traffic_row(
    key: TrafficKey, accounts: Sequence[Mapping[TrafficKey, Traffic]]
) -> tuple[str, ...]:
    """Return the cells of one kind of call: bytes of each estimate, then calls and payload."""
    rows = [account.get(key) for account in accounts]
    last = rows[-1]
    return (
        traffic_label(key),
        *(traffic_text(moved_bytes(row)) if row else MISSING for row in rows),
        str(last.calls) if last else MISSING,
        format_bytes(last.payload_bytes) if last else MISSING,
    )


def place_table(spec: Spec, plan: Plan, exact: Estimate) -> str:
    """Return a table with a row for each place along pp; empty without pp.

    A row has the ranks of the place, its stages, its number of layers, and its bytes by state and
    the peak, both of its rank with the most.

    Args:
        spec: The resolved spec, for the mesh.
        plan: Its plan, for the stages.
        exact: The prediction of all ranks.
    """
    if (step := plan.pipeline) is None:
        return ""
    places = indices_in_groups(spec, (step.axis,))
    ranks: list[list[int]] = [[] for _ in range(max(places) + 1)]
    for rank, place in enumerate(places):
        ranks[place].append(rank)
    holders = [set(members) for members in ranks]
    memory = [[*distinct_values(exact.memory, members)] for members in holders]
    peaks = [[*distinct_values(exact.peak, members)] for members in holders]
    most, fewest = [*map(largest_bytes, memory)], [*map(lower_bounds, memory)]
    stages = [step.stages_of(place) for place in range(len(ranks))]
    pairs = [*zip(fewest, most, strict=True)]
    columns = [
        name_column(str(step.axis), [str(place) for place in range(len(ranks))]),
        TableColumn("ranks", Importance.DETAIL, [*map(ranks_text, ranks)], left=True),
        TableColumn(
            "stages",
            cells=[" ".join(map(str, members)) for members in stages],
            left=True,
        ),
        TableColumn(
            "layers",
            Importance.DETAIL,
            [str(sum(len(step.layers[stage]) for stage in members)) for members in stages],
        ),
        *(
            TableColumn(
                label,
                cells=[
                    memory_span(low.get((state, tier)), high.get((state, tier)))
                    for low, high in pairs
                ],
            )
            for state in State
            for tier, label in tier_labels(state)
            if any(high.get((state, tier)) for high in most)
        ),
        TableColumn("peak", Importance.RESULT, [_peak_text(members) for members in peaks]),
    ]
    return render_table(columns)


def _peak_text(rows: Sequence[Peak]) -> str:
    """Return the highest peak of some rows as text, with its lower bound if it has one."""
    bounds = max(map(lower_bytes, rows), default=None)
    return memory_span(bounds, max((row.device_bytes for row in rows), default=None))
