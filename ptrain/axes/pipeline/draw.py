"""A schedule as text: a line per rank, a column per unit of time; its bubble in words."""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.axes.pipeline.schedule import Action, Pair, Schedule
from ptrain.axes.pipeline.simulate import Simulation, Span, simulate
from ptrain.timeline import Kind

WIDTH = 160  # characters, what a wide terminal shows
MEANINGS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward of the inputs",
    Kind.WEIGHT: "W backward of the weights",
}
_IDLE, _LONGER, _LEFT_OUT = ".", "-", "…"


def draw(schedule: Schedule, width: int = WIDTH) -> str:
    """Return the schedule as text, with F = I = W = 1 and B = 2. What does not fit in `width`
    characters is left out in the middle, the same columns on every line; a line has at least its
    first and its last column."""
    simulation = simulate(schedule)
    columns = round(simulation.makespan)
    has_stages = schedule.stages > schedule.ranks
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, heads)) + 2
    cell = 1 + max(
        len(_label(part, has_stages))
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    room = max(3, (width - margin + 1) // cell)
    lines = [_cells(spans, columns, cell, has_stages) for spans in simulation.timeline]
    first, last = room // 2, (room - 1) // 2  # and one for the sign
    left_out = max(0, columns - first - last) if columns > room else 0
    if left_out:
        sign = _LEFT_OUT.ljust(cell)
        lines = [[*cells[:first], sign, *cells[columns - last :]] for cells in lines]
    drawn = [
        f"{head:<{margin}}{''.join(cells)}".rstrip()
        for head, cells in zip(heads, lines, strict=True)
    ]
    return "\n".join((*drawn, _legend(schedule, has_stages, left_out)))


def bubble_text(simulation: Simulation) -> str:
    """Both conventions of the literature, of a schedule with the simulator's equal stages."""
    return (
        f"{simulation.bubble_fraction:.1%} of the step, {simulation.bubble_ratio:.1%} of the "
        "ideal time, for equal stages and backward = 2 x forward"
    )


def _cells(spans: Sequence[Span], columns: int, cell: int, has_stages: bool) -> list[str]:
    """A rank's columns, `cell` characters each."""
    cells = [_IDLE.ljust(cell)] * columns
    for span in spans:
        start, length = round(span.start), round(span.end - span.start)
        label = "&".join(_label(part, has_stages) for part in span.step.parts)
        filler = _LONGER if length > 1 else " "
        text = label.ljust(length * cell - 1, filler) + " "
        cells[start : start + length] = [
            text[at : at + cell] for at in range(0, length * cell, cell)
        ]
    return cells


def _label(action: Action, has_stages: bool) -> str:
    """With one stage a rank, the line says which."""
    return str(action) if has_stages else f"{action.kind}{action.microbatch}"


def _legend(schedule: Schedule, has_stages: bool, left_out: int) -> str:
    steps = [step for order in schedule.orders for step in order]
    kinds = {part.kind for step in steps for part in step.parts}
    parts = [meaning for kind, meaning in MEANINGS.items() if kind in kinds]
    parts.append("stage first, then micro-batch" if has_stages else "each with its micro-batch")
    if any(isinstance(step, Pair) for step in steps):
        parts.append("& side by side")
    parts.append(f"{_IDLE} idle")
    if left_out:
        parts.append(f"{_LEFT_OUT} {left_out} columns")
    return " · ".join(parts)
