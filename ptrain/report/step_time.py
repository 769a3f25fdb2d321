"""The time of a step as text: its parts as bars, and what it waits for in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.codec import encode
from ptrain.cost import Collective, Column, Estimate, Phase, Spent, StepTime
from ptrain.derivation.estimate import Derivation
from ptrain.derivation.throughput import throughput
from ptrain.report.table import (
    Importance,
    TableColumn,
    difference_columns,
    make_columns,
    name_column,
    or_missing,
    render,
)
from ptrain.units import format_count, format_seconds

_BAR = 24  # columns of the longest bar
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
_NAMED = 2  # parts that a sentence names

_MOVES = {
    Collective.ALL_GATHER: "gathers",
    Collective.REDUCE_SCATTER: "reductions",
    Collective.ALL_REDUCE: "sums",
    Collective.ALL_TO_ALL: "exchanges",
    Collective.BROADCAST: "broadcasts",
    Collective.SEND: "messages",
}

Part = tuple[str, float, float]  # what, seconds of the step, seconds that it moves


def time_lines(derivation: Derivation) -> list[str]:
    """Return the block of a prediction: parts, phases, what is waited for, tokens per second; or
    why there is none, where a cluster is named."""
    step, why = derivation.exact.step, untimed(derivation)
    if step is None:
        return [f"no step time: {why}", ""] if why else []
    return [
        _table(step),
        "",
        f"{critical_path(step)}{_pace(derivation, step)}",
        *(f"assumed: {sentence}" for sentence in step.assumed),
        "",
    ]


def untimed(derivation: Derivation) -> str:
    """Return why a step's time is not predicted; empty where it is, or where no cluster is named:
    then nobody asks."""
    has_cluster = derivation.spec.cluster is not None
    return derivation.exact.undefined.get("step_seconds", "") if has_cluster else ""


def critical_path(step: StepTime) -> str:
    """Return what a step consists of beside what is computed: `0.31 s of 1.20 s wait for dp_shard's
    gathers`."""
    whole = format_seconds(step.seconds)
    parts = sorted(_phrases(step), key=lambda part: -part[1])
    large = [part for part in parts if part[1] >= 0.005 * step.seconds][:_NAMED]
    if not large:
        moving = [row for row in step.rows if row.moving and row.key.spent is not Spent.LAUNCHES]
        hidden = sum(row.moving - row.seconds for row in moving)
        beside = f", {format_seconds(hidden)} of what moves is hidden" if hidden > 0 else ""
        return f"all of {whole} is computed{beside}"
    (phrase, seconds), *others = large
    more = "".join(f", {format_seconds(taken)} {other}" for other, taken in others)
    return f"{format_seconds(seconds)} of {whole} {phrase}{more}"


def time_row(column: Column, step: StepTime) -> dict[str, object]:
    """Return a record's row of a step: its seconds, by phase and by part, and all of its rows."""
    return {
        "column": str(column),
        "value": step.seconds,
        "phases": {str(phase): step.of_phase(phase) for phase in _PHASES},
        "parts": {str(spent): step.spent(spent) for spent in Spent},
        "exposed": [
            {"axes": list(axes), "seconds": seconds} for axes, seconds in step.exposed().items()
        ],
        **encode(step),
    }


def time_table(exact: Estimate, measured: Estimate, step_seconds: float | None) -> str:
    """Return predicted beside measured seconds: of the step, and of the waiting for each axes'
    collectives, a bubble included; empty where no time is predicted. Measured is the one that
    waits most."""
    step = exact.step
    if step is None:
        return ""
    waits: dict[tuple[str, ...], float] = {}
    for row in measured.blocked:
        waits[row.axes] = max(waits.get(row.axes, 0.0), row.seconds)
    exposed = step.exposed(idle=True)
    rows = [_compared("step", step.seconds, step_seconds)]
    rows += [
        _compared(f"waits for {'+'.join(axes)}", exposed.get(axes), waits.get(axes))
        for axes in sorted({*exposed, *waits})
    ]
    return render(make_columns(rows, *difference_columns("time per step")))


def _compared(what: str, predicted: float | None, measured: float | None) -> tuple[str, ...]:
    difference = f"{measured / predicted - 1:+.1%}" if predicted and measured is not None else ""
    cells = (or_missing(seconds, format_seconds) for seconds in (predicted, measured))
    return what, *cells, difference


def _table(step: StepTime) -> str:
    parts = [*_parts(step)]
    longest = max((seconds for _, seconds, _ in parts), default=0.0)
    rows = [*parts, ("step", step.seconds, 0.0)]
    rows += [(f"in {phase}", taken, 0.0) for phase in _PHASES if (taken := step.of_phase(phase))]
    hidden = [
        f"and {format_seconds(moving - seconds)} hidden" if moving > seconds * 1.0005 else ""
        for _, seconds, moving in rows
    ]
    bars = ["█" * round(_BAR * seconds / longest) if longest else "" for _, seconds, _ in parts]
    columns = [
        name_column("time per step", [name for name, _, _ in rows]),
        TableColumn(
            "exact", Importance.RESULT, [format_seconds(seconds) for _, seconds, _ in rows]
        ),
        TableColumn("", Importance.DETAIL, hidden),
        TableColumn("", Importance.PICTURE, bars + [""] * (len(rows) - len(parts)), left=True),
    ]
    return render(columns)


def _parts(step: StepTime) -> Iterator[Part]:
    """Yield what takes time, the model's operators first; what moves by axes."""
    yield "compute", step.spent(Spent.COMPUTE), 0.0
    moved: dict[str, tuple[float, float]] = {}
    for row in step.rows:
        if row.key.spent in (Spent.COLLECTIVES, Spent.COPIES):
            name = f"waits for {'+'.join(row.key.axes)}" if row.key.axes else "waits for copies"
            seconds, moving = moved.get(name, (0.0, 0.0))
            moved[name] = seconds + row.seconds, moving + row.moving
    for name, (seconds, moving) in moved.items():
        if moving:
            yield name, seconds, moving
    for spent in (Spent.WRAPPERS, Spent.LAUNCHES, Spent.UPDATE, Spent.BUBBLE):
        own = [row for row in step.rows if row.key.spent is spent]
        seconds, moving = (sum(getattr(row, name) for row in own) for name in ("seconds", "moving"))
        if seconds or moving:
            yield str(spent), seconds, moving


def _phrases(step: StepTime) -> Iterator[tuple[str, float]]:
    """Yield what the step does but compute, as the end of a sentence."""
    waits: dict[str, float] = {}
    for row in step.rows:
        if row.key.spent is Spent.COLLECTIVES and row.key.collective is not None:
            whose = f"{'+'.join(row.key.axes)}'s {_MOVES.get(row.key.collective, 'collectives')}"
            waits[f"wait for {whose}"] = waits.get(f"wait for {whose}", 0.0) + row.seconds
    yield from waits.items()
    yield "wait for copies between tiers", step.spent(Spent.COPIES)
    yield "go to the wrappers' own work", step.spent(Spent.WRAPPERS)
    yield "wait for the host's launches", step.spent(Spent.LAUNCHES)
    yield "go to the update", step.spent(Spent.UPDATE)
    yield "are the pipeline's bubble", step.spent(Spent.BUBBLE)


def _pace(derivation: Derivation, step: StepTime) -> str:
    """`; 52,000 tokens/s, MFU 41.2 % (causal: 36.0 %)`."""
    pace = throughput(derivation.spec, derivation.facts, step)
    if pace is None:
        return ""
    text = f"; {format_count(pace.tokens_per_second)} tokens/s"
    if pace.mfu_full is not None and pace.mfu_causal is not None:
        text += f", MFU {pace.mfu_full:.1%} with whole attention, {pace.mfu_causal:.1%} causal"
    return text
