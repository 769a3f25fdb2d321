"""Pictures of memory: one rank's live bytes over a step, and the peaks of a sweep's points.

A step is a stack of the live bytes by state. Its horizontal axis counts allocations and frees,
since fake ranks have no clock. If several moments share a column, the highest is drawn, so that no
peak is lost. A sweep has a bar by state for each point, with a line at usable memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ptrain.charts.bars import Bar, bars_sheet
from ptrain.charts.sheet import (
    BLACK,
    EDGE,
    LIGHT,
    LINE,
    MEMORY,
    SMALL,
    WHITE,
    WIDE,
    Label,
    Polyline,
    Rectangle,
    Sheet,
    round_ticks,
    text_width,
)
from ptrain.cost import PLACED, Estimate, Phase, State
from ptrain.report.predict import answer_line
from ptrain.report.simulation import MemoryHistory, MemorySample
from ptrain.report.sweep import SweepPoint
from ptrain.units import format_memory

# Okabe and Ito's colours (2008), which colour-blind readers can distinguish; grey for other memory.
STATE_COLOURS = {
    State.PARAMETERS: "#0072b2",
    State.OPTIMIZER: "#56b4e9",
    State.GRADIENTS: "#d55e00",
    State.ACTIVATIONS: "#f0e442",
    State.TRANSIENT: "#009e73",
    State.OTHER: "#777777",
}
_HEIGHT = 240.0  # of the area within the axes
_NEAR = 4  # times the peak: usable memory above it would leave the bars too short to read
_COLUMNS = 720  # at most, plus one for each pass, because passes do not share a column
_TICKS = 5


def course_sheet(
    course: MemoryHistory, name: str = "", usable: int | None = None, width: float = WIDE
) -> Sheet:
    """Return the picture of one rank's memory over a step.

    States that last are at the bottom of the stack. Phases are named above it, colours below.

    Args:
        course: The live bytes of the rank.
        name: The name of the spec.
        usable: The bytes that a peak may fill. A line marks them unless they are far above the
            peak.
        width: The width of the sheet in points.
    """
    title = f"{name}: memory of rank {course.rank} over a step".removeprefix(": ")
    sheet = Sheet(title=title, width=width, height=EDGE)
    peak = course.peak
    when = (
        f"peak {format_memory(peak.total)} in {peak.phase}, micro-batch {peak.micro_batch}, after "
        f"{peak.event} of {len(course.moments) - 1} allocations and frees of storages"
    )
    is_near = usable is not None and usable <= _NEAR * peak.total
    sheet.add_heading(title, when, *usable_notes(usable, peak.total))
    sheet.height += 2 * SMALL * LINE
    top, most = sheet.height, max(1, peak.total, (usable or 0) if is_near else 0)
    ticks = round_ticks(most, MEMORY, _TICKS)
    left = EDGE + max(text_width(text, SMALL) for _, text in ticks) + 6
    frame = _Frame(left, top, width - EDGE - left, most)
    for size, text in ticks:
        grid = Rectangle(
            x=left, y=frame.y_position(size), width=frame.width, height=0.5, colour=LIGHT
        )
        sheet.rectangles.append(grid)
        number = Label(text=text, x=left - 4, y=frame.y_position(size), size=SMALL, align="right")
        sheet.texts.append(number)
    columns = list(_column_samples(course.moments))
    sheet.rectangles += _state_bars(columns, frame)
    sheet.rectangles += _pass_boundaries(columns, frame)
    sheet.texts += _phase_labels(columns, frame)
    if is_near and usable is not None:
        points = ((left, frame.y_position(usable)), (width - EDGE, frame.y_position(usable)))
        sheet.lines.append(Polyline(points=points, colour=BLACK, dash=3))
    sheet.height += _HEIGHT + SMALL * LINE
    shown = [state for at, state in enumerate(State) if any(m.device_bytes[at] for m in columns)]
    names = {STATE_COLOURS[state]: STATE_NAMES.get(state, str(state)) for state in shown}
    sheet.add_legend(left, names, SMALL)
    sheet.height += EDGE
    return sheet


class _Frame(NamedTuple):
    """The area within the axes, in points; `most` are the bytes at its upper edge."""

    x: float
    top: float
    width: float
    most: int

    def y_position(self, size: float) -> float:
        """Return the vertical position of a number of bytes."""
        return self.top + _HEIGHT * (1 - size / self.most)


def usable_notes(usable: int | None, most: float) -> list[str]:
    """Return a line on usable memory: that a line marks it, or that it is outside the picture."""
    if usable is None:
        return []
    text = f"usable memory {format_memory(usable)}"
    if usable <= _NEAR * most:
        return [f"dashed: {text}"]
    return [f"{text}, {usable / max(1, most):.3g} times the peak: outside the picture"]


def _column_samples(moments: Sequence[MemorySample]) -> Iterator[MemorySample]:
    """Yield the highest moment of each column; a column has moments of one pass."""

    def column(moment: MemorySample) -> tuple[object, ...]:
        place = moment.event * _COLUMNS // len(moments)
        return place, moment.phase, moment.micro_batch

    for _, moments_of_column in groupby(moments, key=column):
        yield max(moments_of_column, key=lambda moment: moment.total)


def _state_bars(columns: Sequence[MemorySample], frame: _Frame) -> Iterator[Rectangle]:
    """Yield the bars of each state; neighbours with equal place and height are merged."""
    width = frame.width / len(columns)
    for index, state in enumerate(State):
        sizes = [(sum(m.device_bytes[:index]), m.device_bytes[index]) for m in columns]
        place = 0
        for (below, size), equal in groupby(sizes):
            number = len(list(equal))
            if size > 0:
                yield Rectangle(
                    x=frame.x + place * width,
                    y=frame.y_position(below + size),
                    width=number * width,
                    height=frame.y_position(below) - frame.y_position(below + size),
                    colour=STATE_COLOURS[state],
                )
            place += number


def _find_passes(columns: Sequence[MemorySample]) -> Iterator[tuple[int, int, MemorySample]]:
    """Yield the first column, the number of columns and a moment of each pass through a phase."""
    first = 0
    for _, moments in groupby(columns, key=lambda moment: (moment.phase, moment.micro_batch)):
        shown = list(moments)
        yield first, len(shown), shown[0]
        first += len(shown)


def _pass_boundaries(columns: Sequence[MemorySample], frame: _Frame) -> Iterator[Rectangle]:
    """Yield a white line at the beginning of each pass."""
    for first, _, _ in _find_passes(columns):
        x = frame.x + first * frame.width / len(columns) - 0.25
        yield Rectangle(x=x, y=frame.top, width=0.5, height=_HEIGHT, colour=WHITE)


def _phase_labels(columns: Sequence[MemorySample], frame: _Frame) -> Iterator[Label]:
    """Yield a label above each pass: its name, its first letter, or nothing if it is too narrow."""
    width = frame.width / len(columns)
    for first, number, moment in _find_passes(columns):
        pass_name = (
            f"{moment.phase} {moment.micro_batch}" if moment.phase is not Phase.UPDATE else "update"
        )
        for text in (pass_name, pass_name[0]):
            word = Label(
                text=text,
                x=frame.x + (first + number / 2) * width,
                y=frame.top - SMALL * LINE / 2,
                size=SMALL,
                align="center",
            )
            if word.width <= number * width:
                yield word
                break


STATE_NAMES = {State.TRANSIENT: "temporary"}
_LEGEND = {
    **{STATE_COLOURS[state]: str(state) for state in PLACED},
    STATE_COLOURS[State.TRANSIENT]: STATE_NAMES[State.TRANSIENT],
    BLACK: "peak",
}


def sweep_sheet(points: Sequence[SweepPoint], width: float = WIDE) -> Sheet:
    """Return one bar per point; a single point has a bar for each state too.

    A bar stacks the largest size of each state on the device, and temporary tensors up to the peak.
    States need not be largest at the same time, so a stack may exceed its peak. Rejected points and
    unknown peaks have text in place of a bar. Usable memory that is far above all bars is only
    stated.

    Args:
        points: The points of the sweep.
        width: The width of the sheet in points.
    """
    bars = [*map(_point_bar, points)]
    most = max((bar.length for bar in bars), default=0)
    fits = [point.prediction.fit for point in points if point.prediction]
    capacities = sorted({memory.usable_memory for memory in fits if memory.usable_memory})
    notes = [note for size in capacities for note in usable_notes(size, most)]
    title = "predicted peak per rank, by state"
    if len(points) == 1:
        title = f"{points[0].label}: {title}"
        bars += [
            Bar(label=_LEGEND[colour], note=format_memory(size), parts=[(colour, size)])
            for colour, size in bars[0].parts
        ]
    return bars_sheet(
        (title, *(note for note in notes if "outside" in note)),
        bars,
        MEMORY,
        legend=_LEGEND,
        limits=[
            (f"usable memory {format_memory(size)}", size)
            for size in capacities
            if size <= _NEAR * most
        ],
        width=width,
    )


def _point_bar(point: SweepPoint) -> Bar:
    """Return the bar of a point; without parts if the point is rejected or its peak unknown."""
    if (prediction := point.prediction) is None:
        return Bar(label=point.label, note="rejected")
    peak = prediction.fit.peak_bytes
    parts = memory_parts(prediction.derivation.exact, peak) if peak else []
    note = " · ".join(answer_line(prediction).split(" · ")[:2])  # fit and step time
    return Bar(label=point.label, note=note, parts=parts, mark=peak)


def memory_parts(estimate: Estimate, peak: int | None) -> list[tuple[str, int]]:
    """Return the colour and size of each state on the device, and of temporary tensors.

    Args:
        estimate: The bytes of the states.
        peak: The largest bytes of a phase; what exceeds the states is temporary.
    """
    parts = [(STATE_COLOURS[state], estimate.bytes_of(state)) for state in PLACED]
    temporary = max(0, (peak or 0) - sum(size for _, size in parts))
    return [*parts, (STATE_COLOURS[State.TRANSIENT], temporary)]
