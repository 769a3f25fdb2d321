"""Pictures of a prediction's and of a run's figures: traffic, time, placement, losses.

All figures come from the derivation or from the record of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.charts.bars import Bar, bars_sheet, curves_sheet
from ptrain.charts.memory import STATE_COLOURS, memory_parts
from ptrain.charts.schedule import Heading, schedule_sheet
from ptrain.charts.sheet import (
    EDGE,
    GREY,
    LIGHT,
    MEMORY,
    SMALL,
    TIME,
    TRAFFIC,
    WIDE,
    Label,
    Rectangle,
    Sheet,
    ink_on,
    place_colour,
    text_width,
)
from ptrain.charts.tokens import tokens_sheet
from ptrain.cost import PLACED, Estimate, Phase, State, busiest
from ptrain.derivation.estimate import Derivation
from ptrain.report.simulation import MemoryHistory
from ptrain.report.step_time import step_parts
from ptrain.report.table import memory_text, moved_bytes
from ptrain.spec.placement import CUT, SAMPLE_AXES, Axis
from ptrain.spec.spec import indices_in_groups, ranks_over
from ptrain.steps.step import Plan
from ptrain.units import format_bytes, format_memory, format_seconds, sum_by_key

# Okabe and Ito's colours (2008), as in the timeline of a step.
_PHASES = {
    Phase.SETUP: "#999999",
    Phase.FORWARD: "#56b4e9",
    Phase.BACKWARD: "#e8d020",
    Phase.UPDATE: "#009e73",
}
_EXPOSED, _OVERLAPPED, _COMPUTE = "#d55e00", "#cccccc", "#56b4e9"
_MOST_HELD = 12  # kinds of storages that are drawn
_CELL, _ROW = 29.0, 15.0  # the smallest width and the height of a rank's cell


def traffic_sheet(name: str, exact: Estimate, width: float = WIDE) -> Sheet:
    """Return the bytes that a rank sends or copies in a step, by axes and phase.

    Args:
        name: The name of the spec or run.
        exact: A column of figures with traffic.
        width: The width of the sheet in points.
    """
    rows = busiest(exact.traffic)
    moved = sum_by_key(
        ((_axes_name(row.key.axes), row.key.phase), moved_bytes(row)) for row in rows
    )
    routes = dict.fromkeys(route for route, _ in moved)
    calls = sum_by_key((_axes_name(row.key.axes), row.calls) for row in rows)
    bars = []
    for route in routes:
        parts = [(_PHASES[phase], moved.get((route, phase), 0)) for phase in Phase]
        total = format_bytes(sum(size for _, size in parts))
        bars.append(Bar(label=route, note=f"{total} in {calls[route]} calls", parts=parts))
    used = {phase for _, phase in moved}
    legend = {_PHASES[phase]: str(phase) for phase in Phase if phase in used}
    title = f"{name}: traffic per rank and step, by axis and phase"
    return bars_sheet((title,), bars, TRAFFIC, legend=legend, width=width)


def _axes_name(axes: Sequence[str]) -> str:
    """Return the name of the axes of a call."""
    return "+".join(axes) or "copies between tiers of a rank"


def time_sheet(name: str, derivation: Derivation, width: float = WIDE) -> Sheet:
    """Return the predicted step time by what a rank does or waits for.

    Args:
        name: The name of the spec.
        derivation: A derivation with a step time.
        width: The width of the sheet in points.
    """
    step = derivation.exact.step
    assert step is not None, "the caller checks that there is a step time"
    bars = []
    for label, seconds, moving in step_parts(step):
        overlapped = max(0.0, moving - seconds)
        texts = [f"{format_seconds(seconds)}, {seconds / step.seconds:.1%} of the step"] * (
            seconds > 0
        )
        texts += [f"{format_seconds(overlapped)} overlapped"] * (overlapped > 0)
        note = "; ".join(texts)
        colour = _COMPUTE if label == "compute" else _EXPOSED
        bars.append(
            Bar(label=label, note=note, parts=[(colour, seconds), (_OVERLAPPED, overlapped)])
        )
    legend = {_COMPUTE: "compute", _EXPOSED: "waits and overheads", _OVERLAPPED: "overlapped"}
    title = f"{name}: time of a step, {format_seconds(step.seconds)}"
    return bars_sheet((title,), bars, TIME, legend=legend, width=width)


def held_sheet(name: str, course: MemoryHistory, width: float = WIDE) -> Sheet:
    """Return the storages that are alive at the peak, by kind: the modules that allocated them.

    Args:
        name: The name of the spec.
        course: The simulated memory of a rank.
        width: The width of the sheet in points.
    """
    bars = [
        Bar(
            label=row.what,
            note=f"{format_memory(row.device_bytes)} in {row.tensors} tensors",
            parts=[(STATE_COLOURS[row.state], row.device_bytes)],
        )
        for row in course.held[:_MOST_HELD]
    ]
    legend = {STATE_COLOURS[row.state]: str(row.state) for row in course.held[:_MOST_HELD]}
    title = f"{name}: memory at the peak of rank {course.rank}, by module"
    note = f"the {len(bars)} largest of {len(course.held)} kinds of storages"
    return bars_sheet((title, note), bars, MEMORY, legend=legend, width=width)


def sources_sheet(name: str, estimates: Mapping[str, Estimate], width: float = WIDE) -> Sheet:
    """Return the memory of a rank by state, with a bar for each source of figures.

    Args:
        name: The name of the run.
        estimates: Columns by name: predicted, simulated, measured.
        width: The width of the sheet in points.
    """
    peaks = {label: estimate.peak_bytes() for label, estimate in estimates.items()}
    bars = [
        Bar(
            label=label,
            note=f"peak {memory_text(peaks[label])}",
            parts=memory_parts(estimate, peaks[label]),
            mark=peaks[label],
        )
        for label, estimate in estimates.items()
    ]
    legend = {STATE_COLOURS[state]: str(state) for state in PLACED}
    legend |= {STATE_COLOURS[State.TRANSIENT]: "temporary"}
    title = f"{name}: memory per rank, {' and '.join(estimates)}"
    return bars_sheet((title,), bars, MEMORY, legend=legend, width=width)


def mesh_sheet(derivation: Derivation, width: float = WIDE) -> Sheet:
    """Return the placement on the mesh: the shard of every state that each rank holds.

    Equal colours in a row are equal shards. Ranks that do not fit are left out.

    Args:
        derivation: A derived spec.
        width: The width of the sheet in points.
    """
    spec = derivation.spec
    name = f"{spec.name}: placement on {spec.world_size} ranks"
    sheet = Sheet(title=name, width=width, height=EDGE)
    columns = min(spec.world_size, int((width - 2 * EDGE) / _CELL))
    number = spec.world_size - columns
    sheet.add_heading(name, *[f"the last {number} ranks are not drawn"] * (number > 0))
    wide = min(2.5 * _CELL, (width - 2 * EDGE) / columns)
    for text, axes in _mesh_rows(derivation):
        sheet.write([Label(text=text, x=EDGE, y=0, size=SMALL, is_bold=True)])
        sheet.height += 2
        number, places = ranks_over(spec, axes), indices_in_groups(spec, axes)
        for rank, place in enumerate(places[:columns]):
            # LIGHT is dark on a dark screen, and GREY is not.
            is_cut = number > 1
            colour, ink = (place_colour(place), "") if is_cut else (LIGHT, GREY)
            words = f"{place + 1}/{number}" if is_cut else "all"
            words = words if text_width(words, SMALL) <= wide else str(place + 1)
            x, y = EDGE + rank * wide, sheet.height
            sheet.rectangles.append(
                Rectangle(x=x, y=y, width=wide, height=_ROW, colour=colour, edge_width=0.8)
            )
            sheet.texts.append(
                Label(text=words, x=x + wide / 2, y=y + _ROW / 2, size=SMALL,
                      colour=ink or ink_on(colour), align="center")
            )  # fmt: skip
        sheet.height += _ROW + 5
    note = "One column per rank. 2/8: the second of eight shards; all: a full copy on every rank."
    sheet.write([Label(text=note, x=EDGE, y=0, size=SMALL, colour=GREY)])
    sheet.height += EDGE / 2
    return sheet


def _mesh_rows(derivation: Derivation) -> Iterator[tuple[str, tuple[Axis, ...]]]:
    """Yield the text of each row, and the axes over which its content is divided."""
    spec, exact = derivation.spec, derivation.exact
    for state in PLACED[:3]:
        modes = [f"{factor.axis} {factor.placement[state]}" for factor in spec.factors]
        size = format_memory(exact.bytes_of(state))
        yield f"{state}: {size} per rank ({', '.join(modes)})", spec.axes_where(state, *CUT)
    if derivation.plan.experts is not None:
        yield "experts, a part of these states", tuple(derivation.plan.experts.axes)
    yield f"samples of the batch: {spec.batch.global_samples}", SAMPLE_AXES


def plan_sheets(plan: Plan) -> Iterator[Sheet]:
    """Yield the pictures that a plan has: its pipeline schedule, and its token shards.

    Args:
        plan: The plan of a spec.
    """
    spec = plan.spec
    if pipeline_of(spec) is not None:
        heading = Heading(spec=spec.name, schedule=str(spec.pipeline.schedule))
        yield schedule_sheet(heading, schedule_of(spec))
    if plan.context is not None:
        yield tokens_sheet(spec.name, plan.context)


def logged_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics; a last row that was cut off is left out.

    Args:
        metrics: The metrics file of a run, with a JSON object on each line.
    """
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


_MOST_POINTS = 400  # of a curve


def logged_curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return the points (step, figure) of a figure in a run's metrics.

    Of many points in a column of the picture the last one is kept.

    Args:
        rows: The rows of the metrics.
        key: The name of the figure, such as `loss`.
    """
    points = {row["step"]: row[key] for row in rows if isinstance(row.get(key), int | float)}
    last = max(points, default=1)
    kept = {step * _MOST_POINTS // last: (step, points[step]) for step in sorted(points)}
    return [*kept.values()]


def training_sheets(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], width: float = WIDE
) -> list[Sheet]:
    """Return the pictures of losses and of throughput over the steps of runs.

    Args:
        runs: The rows of the metrics of each run, by name.
        width: The width of the sheets in points.
    """
    name = ", ".join(runs)
    figures = {
        f"{name}: loss": ("loss", False),
        f"{name}: held-out loss": ("held_out_loss", False),
        f"{name}: tokens per second": ("tokens_per_second", True),
        f"{name}: samples per second": ("samples_per_second", True),
    }
    sheets = []
    for title, (key, is_rate) in figures.items():
        curves = {run: points for run, rows in runs.items() if (points := logged_curve(rows, key))}
        if curves:
            sheets.append(curves_sheet((title,), curves, starts_at_zero=is_rate, width=width))
    return sheets
