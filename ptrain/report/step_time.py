"""The step time as text: its parts as bars, and its largest overheads in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.codec import encode
from ptrain.cost import Collective, Column, Estimate, Phase, Spent, StepTime
from ptrain.derivation.estimate import (
    Derivation,
    Throughput,
    best_collected_mfu,
    predict_throughput,
    published_steps,
)
from ptrain.report.table import (
    Importance,
    TableColumn,
    difference_columns,
    make_columns,
    name_column,
    render_table,
    text_or_dash,
)
from ptrain.spec.spec import Spec
from ptrain.units import format_count, format_seconds, group_by_key, sum_by_key

_BAR = 24  # columns of the longest bar
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
_OTHER_PARTS = (
    Spent.INTERFERENCE,
    Spent.WRAPPERS,
    Spent.LAUNCHES,
    Spent.UPDATE,
    Spent.BUBBLE,
    Spent.STRAGGLERS,
)
_NAMED = 2  # parts that a sentence names

_CALLS = {
    Collective.ALL_GATHER: "all-gathers",
    Collective.REDUCE_SCATTER: "reduce-scatters",
    Collective.ALL_REDUCE: "all-reduces",
    Collective.ALL_TO_ALL: "all-to-alls",
    Collective.BROADCAST: "broadcasts",
    Collective.SEND: "sends",
}

Part = tuple[str, float, float]  # name, seconds of the step, seconds of communication


def time_lines(derivation: Derivation) -> list[str]:
    """Return the block of times: parts, phases, overheads and assumptions.

    Args:
        derivation: A derived spec. If it names a cluster and no time is predicted, the result is
            the reason; without a cluster it is empty.
    """
    step, why = derivation.exact.step, untimed_reason(derivation)
    if step is None:
        return [f"no step time: {why}", ""] if why else []
    return [
        _time_parts_table(step),
        critical_path(step),
        *_interval_lines(derivation.spec, step),
        *_mfu_lines(derivation),
        *(f"assumed: {sentence}" for sentence in step.assumed),
        "",
    ]


def _interval_lines(spec: Spec, step: StepTime) -> list[str]:
    """Return the interval of published step times in seconds, or a statement that there is none."""
    published = published_steps(spec)
    if step.interval is None or published is None:
        return ["no published steps of such a model, dtype, mesh and device to compare with"]
    low, high = step.interval
    parts = f"{low / step.seconds:.2f} to {high / step.seconds:.2f} times the predicted time"
    return [f"{published['steps']}: {format_seconds(low)} to {format_seconds(high)} ({parts})"]


def untimed_reason(derivation: Derivation) -> str:
    """Return the reason why no step time is predicted; empty if it is, or without a cluster."""
    has_cluster = derivation.spec.cluster is not None
    return derivation.exact.undefined.get("step_seconds", "") if has_cluster else ""


def critical_path(step: StepTime) -> str:
    """Return the largest overheads of a step as a sentence.

    An example is `overhead in 1.20 s: 310 ms exposed dp_shard all-gathers`. Parts below 0.5 % of
    the step are left out.
    """
    total = format_seconds(step.seconds)
    parts = sorted(_step_overheads(step), key=lambda part: -part[1])
    # Parts below half a percent are not worth naming.
    if large := [part for part in parts if part[1] >= 0.005 * step.seconds][:_NAMED]:
        named = ", ".join(f"{format_seconds(seconds)} {name}" for name, seconds in large)
        return f"overhead in {total}: {named}"
    moving = [row for row in step.rows if row.moving and row.key.spent is not Spent.LAUNCHES]
    overlapped = sum(row.moving - row.seconds for row in moving)
    rest = f"; {format_seconds(overlapped)} of communication overlaps" if overlapped > 0 else ""
    return f"all of {total} is computing{rest}"


def pace_parts(spec: Spec, seconds: float | None, pace: Throughput | None) -> list[str]:
    """Return the figures that are predicted: step time, tokens/s, tokens/s per device, and MFU.

    An example is `3.69 s/step`, `71k tokens/s`, `8.88k tokens/s/GPU`, `MFU 46.2%`.

    Args:
        spec: The spec, for its number and kind of devices.
        seconds: The step time; None if it is not predicted.
        pace: The throughput; None if it is not predicted.
    """
    parts = [] if seconds is None else [f"{format_seconds(seconds)}/step"]
    if pace is not None:
        per_device = format_count(pace.tokens_per_second / spec.world_size)
        parts.append(f"{format_count(pace.tokens_per_second)} tokens/s")
        parts.append(f"{per_device} tokens/s/{device_name(spec)}")
        parts += [f"MFU {pace.mfu_full:.1%}"] if pace.mfu_full is not None else []
    return parts


def job_pace(derivation: Derivation) -> Throughput | None:
    """Return the tokens per second of the job and its MFU; None if no time is predicted."""
    step = derivation.exact.step
    return None if step is None else predict_throughput(derivation.spec, derivation.facts, step)


def device_name(spec: Spec) -> str:
    """Return `GPU`, or `rank` for a spec that does not run on GPUs."""
    return "GPU" if spec.is_for_cuda else "rank"


def time_row(column: Column, step: StepTime) -> dict[str, object]:
    """Return the record's row of a step: seconds in total, by phase and by part, and all rows.

    Args:
        column: The column of the record, `exact` for example.
        step: The predicted step time.
    """
    return {
        "column": str(column),
        "value": step.seconds,
        "phases": {str(phase): step.of_phase(phase) for phase in _PHASES},
        "parts": {str(spent): step.seconds_in(spent) for spent in Spent},
        "exposed": [
            {"axes": list(axes), "seconds": seconds}
            for axes, seconds in step.exposed_seconds().items()
        ],
        **encode(step),
    }


def time_table(exact: Estimate, measured: Estimate, step_seconds: float | None) -> str:
    """Return a table of predicted and measured seconds per step.

    It has a row for the step, and one for exposed communication over each group of axes, pipeline
    bubbles included.

    Args:
        exact: The prediction. Without a step time the table is empty.
        measured: The measurement. A group of axes has the longest wait of all ranks.
        step_seconds: The measured time of a step; None: a dash.
    """
    if (step := exact.step) is None:
        return ""
    blocked = group_by_key((row.axes, row.seconds) for row in measured.blocked)
    waits = {axes: max(seconds) for axes, seconds in blocked.items()}
    exposed = step.exposed_seconds(idle=True)
    rows = [_time_cells("step", step.seconds, step_seconds)]
    rows += [
        _time_cells(f"exposed {'+'.join(axes)}", exposed.get(axes), waits.get(axes))
        for axes in sorted({*exposed, *waits})
    ]
    return render_table(make_columns(rows, *difference_columns("time per step")))


def _time_cells(what: str, predicted: float | None, measured: float | None) -> tuple[str, ...]:
    """Return a row with a predicted time, a measured time, and their relative difference."""
    difference = f"{measured / predicted - 1:+.1%}" if predicted and measured is not None else ""
    cells = (text_or_dash(seconds, format_seconds) for seconds in (predicted, measured))
    return what, *cells, difference


def _time_parts_table(step: StepTime) -> str:
    """Return the table of a predicted step: its parts, the total, and its phases."""
    parts = [*step_parts(step)]
    longest = max((seconds for _, seconds, _ in parts), default=0.0)
    rows = [*parts, ("step", step.seconds, 0.0)]
    rows += [(f"in {phase}", taken, 0.0) for phase in _PHASES if (taken := step.of_phase(phase))]
    overlapped = [
        # A difference that rounds to nothing in the table is not shown.
        format_seconds(moving - seconds) if moving > seconds * 1.0005 else ""
        for _, seconds, moving in rows
    ]
    bars = ["█" * round(_BAR * seconds / longest) if longest else "" for _, seconds, _ in parts]
    columns = [
        name_column("time per step", [name for name, _, _ in rows]),
        TableColumn(
            "predicted", Importance.RESULT, [format_seconds(seconds) for _, seconds, _ in rows]
        ),
        TableColumn("overlapped" if any(overlapped) else "", Importance.DETAIL, overlapped),
        TableColumn("", Importance.PICTURE, bars + [""] * (len(rows) - len(parts)), left=True),
    ]
    return render_table(columns)


def step_parts(step: StepTime) -> Iterator[Part]:
    """Yield the parts of a step, computing first; communication by axes.

    Args:
        step: The predicted step time.

    Yields:
        A name, the seconds that the step takes longer, and the seconds of a transfer.
    """
    yield "compute", step.seconds_in(Spent.COMPUTE), 0.0
    moved: dict[str, tuple[float, float]] = {}
    for row in step.rows:
        if row.key.spent in (Spent.COLLECTIVES, Spent.COPIES):
            name = f"exposed {'+'.join(row.key.axes)}" if row.key.axes else "exposed copies"
            seconds, moving = moved.get(name, (0.0, 0.0))
            moved[name] = seconds + row.seconds, moving + row.moving
    # Communication that is fully overlapped is listed too, with 0 s exposed.
    for name, (seconds, moving) in moved.items():
        if moving:
            yield name, seconds, moving
    for spent in _OTHER_PARTS:
        spent_rows = [row for row in step.rows if row.key.spent is spent]
        seconds, moving = (
            sum(getattr(row, name) for row in spent_rows) for name in ("seconds", "moving")
        )
        if seconds or moving:
            yield str(spent), seconds, moving


def _step_overheads(step: StepTime) -> Iterator[tuple[str, float]]:
    """Yield the parts of a step other than computing, with their seconds."""
    exposed = sum_by_key(
        (
            f"exposed {'+'.join(row.key.axes)} {_CALLS.get(row.key.collective, 'collectives')}",
            row.seconds,
        )
        for row in step.rows
        if row.key.spent is Spent.COLLECTIVES and row.key.collective is not None
    )
    yield from exposed.items()
    yield "exposed copies between tiers", step.seconds_in(Spent.COPIES)
    yield "wrappers", step.seconds_in(Spent.WRAPPERS)
    yield "host launches", step.seconds_in(Spent.LAUNCHES)
    yield "optimizer update", step.seconds_in(Spent.UPDATE)
    yield "pipeline bubble", step.seconds_in(Spent.BUBBLE)
    yield "compute slowed by collectives", step.seconds_in(Spent.INTERFERENCE)
    yield "stragglers and congestion", step.seconds_in(Spent.STRAGGLERS)


def _mfu_lines(derivation: Derivation) -> list[str]:
    """Return the MFU in both conventions: a causal mask halves the operations of attention."""
    pace = job_pace(derivation)
    if pace is None or pace.mfu_full is None or pace.mfu_causal is None:
        return []
    lines = [
        f"MFU {pace.mfu_full:.1%} counts full attention; with a causal mask {pace.mfu_causal:.1%}"
    ]
    if (best := best_collected_mfu(derivation.spec.cluster)) is not None:
        mfu, device, source = best
        lines.append(
            f"best of the collected PyTorch steps on devices with this peak ({device}): "
            f"MFU {mfu:.1%} ({source})"
        )
        if pace.mfu_full > mfu:
            lines.append("warning: the predicted MFU is above the best of the collected steps")
    return lines
