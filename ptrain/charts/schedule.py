"""Pictures of time: a pipeline's schedule, and the timeline of a predicted step.

A schedule has a row for each rank and a box for each action; idle time is white. A step has a row
for the rank (in a pipeline, for every rank) and one for each lane of communication. This module
does not import torch.

Time runs to the right, and the first rank is on top. The two halves of a combined forward-backward
action run concurrently and are drawn above each other at half height. A unit of time is as wide as
the numbers in the boxes need. Beyond `_MOST` points of width, the boxes shrink and lose their
numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from ptrain.axes.pipeline.schedule import Action, Schedule, StageCost
from ptrain.axes.pipeline.simulate import MEANINGS, Simulation, bubble_text, simulate
from ptrain.charts.sheet import (
    EDGE,
    GREY,
    HEAD,
    LIGHT,
    LINE,
    SMALL,
    TIME,
    TITLE,
    WHITE,
    WIDE,
    Label,
    Rectangle,
    Sheet,
    ink_on,
    round_step,
    round_ticks,
    shades,
    text_width,
)
from ptrain.cost import Collective, Phase, Spent, TimeKey
from ptrain.derivation.clock import LaneSpan
from ptrain.derivation.estimate import Derivation, step_lanes
from ptrain.report.step_time import critical_path
from ptrain.timeline import Kind
from ptrain.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The box of one action.

    Attributes:
        shade: The position of the action's stage among the stages of its rank.
        start: The start in the simulation's units of time.
        end: The end in the same units.
        top: The upper edge in rows.
        bottom: The lower edge in rows.
    """

    action: Action
    rank: int
    shade: int
    start: float
    end: float
    top: float
    bottom: float

    @property
    def length(self) -> float:
        """The duration in the simulation's units of time."""
        return self.end - self.start

    @property
    def is_half(self) -> bool:
        """True if the action is half of a combined action."""
        return self.bottom - self.top < 1


def schedule_boxes(schedule: Schedule, simulation: Simulation) -> Iterator[Box]:
    """Yield the boxes of a schedule, rank by rank in the order of execution.

    Args:
        schedule: The schedule, for the stages of each rank.
        simulation: Its simulation, for the start and the end of each action.
    """
    for rank, spans in enumerate(simulation.timeline):
        stages = schedule.stages_of(rank)
        for span in spans:
            parts = span.step.parts
            for place, action in enumerate(parts):
                yield Box(
                    action=action,
                    rank=rank,
                    shade=stages.index(action.stage),
                    start=span.start,
                    end=span.end,
                    top=rank + place / len(parts),
                    bottom=rank + (place + 1) / len(parts),
                )


_LEAST, _MOST = 560.0, 2880.0  # limits of the rows' width: 8 inches, 40 inches
_ROW, _GAP = 30.0, 3.0  # the height of a rank's row, and the blank part of it
_TALLEST = 14400.0  # the height of all rows: 30000 dots, and a PNG may have 65535 (matplotlib)
_LARGEST, _WANTED, _SMALLEST = 9.0, 7.0, 5.0  # font sizes of the numbers in boxes
_STAGE = 0.75  # font size of the stage's number over the micro-batch's
_AIR = 2.0  # blank on both sides of a number, in total
_TICK = 34.0  # the smallest distance between numbers of the axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The heading of a picture: the names of the spec and of its schedule."""

    spec: str
    schedule: str


def schedule_sheet(heading: Heading, schedule: Schedule) -> Sheet:
    """Return the picture of a schedule.

    All stages take the same time: F = I = W = 1 and B = 2, like the drawing of the schedule as
    text.

    Args:
        heading: The names for the title.
        schedule: The schedule to simulate and draw.
    """
    simulation = simulate(schedule)
    all_boxes = tuple(schedule_boxes(schedule, simulation))
    scale = _Scale.fit_to_schedule(schedule, simulation, all_boxes)
    makespan = simulation.makespan
    sheet = Sheet(title=heading.spec, width=scale.x_position(makespan) + EDGE, height=EDGE)
    sheet.write(_heading_labels(heading, schedule, simulation))
    sheet.height += HEAD
    top = sheet.height
    sheet.rectangles += _row_lines(schedule.ranks, scale, top, makespan)
    sheet.texts += _row_names(schedule, scale, top)
    for box in all_boxes:
        sheet.rectangles.append(_box_rectangle(box, scale, top))
        sheet.texts += _number_labels(box, scale, top)
    sheet.height += schedule.ranks * scale.row
    _add_axis(sheet, scale, makespan, _used_kinds(all_boxes))
    _add_legend(sheet, scale, all_boxes)
    sheet.height += EDGE
    return sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The scale of a picture of a schedule, in points.

    Attributes:
        left: The horizontal position of time 0.
        unit: The width of a unit of time.
        row: The height of a rank's row.
        size: The font size of the numbers in boxes.
    """

    left: float
    unit: float
    row: float
    size: float
    shades: int  # stages of a rank

    @classmethod
    def fit_to_schedule(
        cls, schedule: Schedule, simulation: Simulation, every: Sequence[Box]
    ) -> _Scale:
        """Return the scale on which the widest number fits its box, within limits of the width."""
        several = schedule.stages > schedule.ranks
        letters = max(_label_width(box, 1, several=several) / box.length for box in every)
        makespan = simulation.makespan
        # As wide as numbers of the wanted size need, within the limits of the rows' width.
        unit = min(max(letters * _WANTED + _AIR, _LEAST / makespan), _MOST / makespan)
        return cls(
            left=EDGE + max(_name_width(schedule, rank) for rank in range(schedule.ranks)) + 6,
            unit=unit,
            row=min(_ROW, _TALLEST / schedule.ranks),
            size=min(_LARGEST, max(_SMALLEST, (unit - _AIR) / letters)),
            shades=schedule.stages // schedule.ranks,
        )

    @property
    def has_several_stages(self) -> bool:
        """True if ranks have several stages."""
        return self.shades > 1

    def x_position(self, time: float) -> float:
        """Return the horizontal position of a time."""
        return self.left + time * self.unit


def _heading_labels(
    heading: Heading, schedule: Schedule, simulation: Simulation
) -> Iterator[Label]:
    """Yield the lines above the rows."""
    yield Label(text=heading.spec, x=EDGE, y=0, size=TITLE, is_bold=True)
    sizes = (
        heading.schedule,
        f"ranks: {schedule.ranks}",
        f"stages: {schedule.stages}, {schedule.stages // schedule.ranks} per rank",
        f"micro-batches: {schedule.microbatches}",
    )
    yield Label(text=" · ".join(sizes), x=EDGE, y=0, size=HEAD)
    yield Label(text=f"bubble {bubble_text(simulation)}", x=EDGE, y=0, size=HEAD, colour=GREY)


def _row_lines(ranks: int, scale: _Scale, top: float, makespan: float) -> Iterator[Rectangle]:
    """Yield a line above each row and below the last, so that idle ranks have a visible row."""
    for rank in range(ranks + 1):
        yield Rectangle(
            x=scale.left,
            y=top + rank * scale.row - 0.25,
            width=makespan * scale.unit,
            height=0.5,
            colour=LIGHT,
        )


def _row_names(schedule: Schedule, scale: _Scale, top: float) -> Iterator[Label]:
    """Yield the names of the rows, as many as there is space for."""
    interval = max(1, round(HEAD * 2 * LINE / scale.row))
    for rank in range(0, schedule.ranks, interval):
        middle = top + (rank + 0.5) * scale.row
        x = scale.left - 6
        if not scale.has_several_stages:
            yield Label(text=f"rank {rank}", x=x, y=middle, size=HEAD, align="right")
            continue
        yield Label(text=f"rank {rank}", x=x, y=middle - 5, size=HEAD, align="right")
        stages = _stages_text(schedule, rank)
        yield Label(text=stages, x=x, y=middle + 6, size=SMALL, colour=GREY, align="right")


def _name_width(schedule: Schedule, rank: int) -> float:
    """Return the width of a row's name."""
    name = text_width(f"rank {rank}", HEAD)
    if schedule.stages == schedule.ranks:
        return name
    return max(name, text_width(_stages_text(schedule, rank), SMALL))


def _stages_text(schedule: Schedule, rank: int) -> str:
    """Return the stages of a rank as text: `stages 0, 4`, or `stages 0, 4 … 28`."""
    names = [str(stage) for stage in schedule.stages_of(rank)]
    if len(names) > 4:
        names = [*names[:1], f"{names[1]} … {names[-1]}"]
    return f"stages {', '.join(names)}"


def _box_rectangle(box: Box, scale: _Scale, top: float) -> Rectangle:
    """Return the rectangle of a box."""
    above, below = top + box.rank * scale.row, top + (box.rank + 1) * scale.row
    gap = _GAP * scale.row / _ROW
    high = (below - above - gap) * (box.bottom - box.top)
    return Rectangle(
        x=scale.x_position(box.start),
        y=above + gap / 2 + (box.top - box.rank) * (below - above - gap),
        width=box.length * scale.unit,
        height=high,
        colour=shades(box.action.kind, scale.shades)[box.shade],
        edge_width=min(0.8, 0.08 * scale.unit),
    )


def _number_labels(box: Box, scale: _Scale, top: float) -> Iterator[Label]:
    """Yield the micro-batch in a box, and the stage if ranks have several.

    The stage is below the micro-batch, or next to it in half a box. A box that is too small has no
    text.
    """
    place = _box_rectangle(box, scale, top)
    lines = _box_label(box, scale.size, several=scale.has_several_stages)
    widest = max(text_width(text, size) for text, size in lines)
    heights = [size * 1.1 for _, size in lines]
    # 1e-6 allows for rounding: the scale makes the widest number fit exactly.
    if widest + _AIR > place.width + 1e-6 or sum(heights) > place.height:
        return
    y = place.y + (place.height - sum(heights)) / 2
    for (text, size), height in zip(lines, heights, strict=True):
        yield Label(
            text=text,
            x=place.x + place.width / 2,
            y=y + height / 2,
            size=size,
            colour=ink_on(place.colour),
            align="center",
        )
        y += height


def _box_label(box: Box, size: float, *, several: bool) -> list[tuple[str, float]]:
    """Return the lines of text in a box, with their font sizes.

    Args:
        box: The box.
        size: The font size of the micro-batch.
        several: Ranks have several stages, so the stage is named.
    """
    microbatch, stage = str(box.action.microbatch), f"s{box.action.stage}"
    if not several:
        return [(microbatch, size)]
    if box.is_half:
        return [(f"{microbatch} {stage}", size)]
    return [(microbatch, size), (stage, _STAGE * size)]


def _label_width(box: Box, size: float, *, several: bool) -> float:
    """Return the width of the text in a box."""
    return max(text_width(text, font) for text, font in _box_label(box, size, several=several))


def _used_kinds(every: Sequence[Box]) -> list[Kind]:
    """Return the kinds of actions that a schedule has."""
    used = {box.action.kind for box in every}
    return [kind for kind in Kind if kind in used]


def _add_axis(sheet: Sheet, scale: _Scale, makespan: float, kinds: Sequence[Kind]) -> None:
    """Add the axis of time, with the durations of the kinds of actions."""
    top = sheet.height
    step = max(1, round(round_step(_TICK / scale.unit)))
    for time in range(0, int(makespan) + 1, step):
        x = scale.x_position(time)
        sheet.rectangles.append(
            Rectangle(x=x - 0.25, y=top, width=0.5, height=4, colour=GREY, edge=GREY)
        )
        sheet.texts.append(Label(text=str(time), x=x, y=top + 10, size=SMALL, align="center"))
    sheet.height += 10 + SMALL
    cost = StageCost()
    units = ", ".join(f"{kind} = {cost.duration(kind):g}" for kind in kinds)
    sheet.write(
        [Label(text=f"time in units of one forward pass ({units})", x=scale.left, y=0, size=HEAD)]
    )
    sheet.height += SMALL


def _add_legend(sheet: Sheet, scale: _Scale, every: Sequence[Box]) -> None:
    """Add the legend: samples of colours with their meanings, then the meaning of the numbers."""
    names = {shades(kind, scale.shades)[0]: MEANINGS[kind] for kind in _used_kinds(every)}
    sheet.height += SMALL
    sheet.add_legend(EDGE, {**names, WHITE: "idle"}, SMALL)
    sheet.height += SMALL / 2
    notes = " · ".join(_note_texts(sheet, scale, every))
    sheet.write([Label(text=notes, x=EDGE, y=0, size=SMALL, colour=GREY)])


def _note_texts(sheet: Sheet, scale: _Scale, every: Sequence[Box]) -> Iterator[str]:
    """Yield the meaning of the numbers and of half boxes."""
    yield "number: micro-batch"
    if scale.has_several_stages:
        yield "s: stage; later stages of a rank are lighter"
    if any(box.is_half for box in every):
        yield "two in one box: side by side"
    if not all(any(_number_labels(box, scale, 0)) for box in every):
        yield "narrow boxes have no number"


_LANE, _BETWEEN = 26.0, 6.0
_NARROWEST = 0.15  # points; narrower spans are not drawn
_TICKS_APART = 60.0  # points for each number of the axis of seconds, at least

# Okabe and Ito's colours (2008); grey for wrappers and other collectives.
_MEANINGS = {
    "forward": "#56b4e9",
    "backward": "#e8d020",
    "update": "#009e73",
    "wrappers": "#777777",
    "gather": "#0072b2",
    "reduction": "#d55e00",
    "copy": "#cc79a7",
    "other collective": "#999999",
}
_REDUCTIONS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def timeline_sheet(derivation: Derivation, width: float = WIDE) -> Sheet:
    """Return the timeline of a predicted step.

    Args:
        derivation: A derivation with a step time.
        width: The width of the sheet in points.
    """
    step, spec = derivation.exact.step, derivation.spec
    assert step is not None, "the caller checks that there is a step time"
    # `step_lanes` has the first, the second and the last micro-batch of a rank without a pipeline.
    repeats = 0 if derivation.plan.pipeline else max(0, spec.batch.accumulate - 3)
    unplaced = step.seconds_in(Spent.LAUNCHES) + step.seconds_in(Spent.STRAGGLERS)
    spans = step_lanes(derivation)
    return step_sheet(
        spec.name, critical_path(step), spans, repeats=repeats, unplaced=unplaced, width=width
    )


def step_sheet(
    title: str,
    note: str,
    spans: Sequence[LaneSpan],
    *,
    repeats: int = 0,
    unplaced: float = 0,
    width: float = WIDE,
) -> Sheet:
    """Return the timeline of a step.

    If the rank has several micro-batches, the first part shows the phases of the full step, and the
    second one the lanes of a single micro-batch, in which the operations can be told apart.

    Args:
        title: The name of the spec.
        note: A line below the title.
        spans: The spans of all lanes, in order of time within a lane.
        repeats: The number of micro-batches that equal the second one and are not in `spans`.
        unplaced: The seconds of the step that have no place in time.
        width: The width of the sheet in points.
    """
    title = f"{title}: timeline of a predicted step"
    sheet = Sheet(title=title, width=width, height=EDGE)
    lost = f"not drawn: {format_seconds(unplaced)} of host launches and stragglers"
    sheet.add_heading(title, note, *[lost] * (unplaced > 0))
    starts, shown = _micro_batch_starts(spans), spans
    if len(starts) > 1:
        full = [*_repeat_spans(spans, starts, repeats)]
        number = len(starts) + repeats
        _add_lanes(sheet, f"the step: {number} micro-batches and the update", full, is_coarse=True)
        first, last = starts[1], starts[2] if len(starts) > 2 else inf
        shown = [
            span._replace(start=max(span.start, first) - first, end=min(span.end, last) - first)
            for span in spans
            if span.end > first and span.start < last
        ]
        same = f", and {repeats} more like it" if repeats else ""
        _add_lanes(sheet, f"micro-batch 1 of 0 to {number - 1}{same}", shown)
    else:
        _add_lanes(sheet, "the step", spans)
    _add_lane_legend(sheet, spans)
    sheet.height += EDGE
    return sheet


def _micro_batch_starts(spans: Sequence[LaneSpan]) -> list[float]:
    """Return the start of each micro-batch of a rank; empty for a pipeline, whose ranks overlap."""
    starts, phase = [], None
    for span in spans:
        if span.lane is None and span.key.phase in (Phase.FORWARD, Phase.BACKWARD):
            if span.key.phase is Phase.FORWARD and phase is not Phase.FORWARD:
                starts.append(span.start)
            phase = span.key.phase
    return starts


def _repeat_spans(
    spans: Sequence[LaneSpan], starts: Sequence[float], repeats: int
) -> Iterator[LaneSpan]:
    """Yield the rank's spans of the full step, with the second micro-batch repeated."""
    own = [span for span in spans if span.lane is None]
    cut, length = (starts[2], starts[2] - starts[1]) if repeats else (inf, 0.0)
    shifted = [
        *((span, 0.0) for span in own if span.start < cut),
        *(
            (span, turn * length)
            for turn in range(1, repeats + 1)
            for span in own
            if starts[1] <= span.start < cut
        ),
        *((span, repeats * length) for span in own if span.start >= cut),
    ]
    for span, shift in shifted:
        yield span._replace(start=span.start + shift, end=span.end + shift)


def _add_lanes(
    sheet: Sheet, name: str, spans: Sequence[LaneSpan], *, is_coarse: bool = False
) -> None:
    """Add a part of the timeline with its axis.

    Args:
        sheet: The sheet.
        name: The name of the part.
        spans: Its spans; the axis begins at 0.
        is_coarse: Draw phases without the waits and wrappers within them.
    """
    lanes = [*dict.fromkeys(span.lane for span in spans)]
    lanes.sort(key=lambda lane: (lane is not None, lane if isinstance(lane, int) else -1))
    end = max(span.end for span in spans)
    left = EDGE + max(text_width(_lane_name(lane), HEAD) for lane in lanes) + 6
    sheet.write([Label(text=f"{name}: {format_seconds(end)}", x=EDGE, y=0, size=HEAD)])
    sheet.height += 3
    scale = (sheet.width - EDGE - left) / end
    for lane in lanes:
        middle = sheet.height + _LANE / 2
        label = Label(text=_lane_name(lane), x=left - 6, y=middle, size=HEAD, align="right")
        sheet.texts.append(label)
        merge = _merge_phases if is_coarse else _merge_spans
        parts = merge([span for span in spans if span.lane == lane])
        sheet.rectangles += _lane_rectangles(parts, left, sheet.height, (scale, end))
        sheet.height += _LANE
    for time, text in round_ticks(end, TIME, max(2, int((sheet.width - left) / _TICKS_APART))):
        x = left + time * scale
        box = Rectangle(x=x - 0.25, y=sheet.height, width=0.5, height=4, colour=GREY)
        sheet.rectangles.append(box)
        number = Label(text=text, x=x, y=sheet.height + 10, size=SMALL, align="center")
        sheet.texts.append(number.clamp_between(left - 4, sheet.width))
    sheet.height += 10 + 2 * SMALL


def _lane_name(lane: Hashable) -> str:
    """Return the name of a lane: a rank, a place along pp, or the axes of communication."""
    match lane:
        case None:
            return "rank"
        case int():
            return f"pp {lane}"
        case tuple():
            return "+".join(lane)
        case _:
            return str(lane)


Stretch = tuple[float, float, str]  # start and end in seconds, and the meaning of the colour


def _lane_rectangles(
    parts: Iterable[Stretch], left: float, y: float, scale: tuple[float, float]
) -> Iterator[Rectangle]:
    """Yield the rectangles of a lane; `scale` is points per second, and the axis in seconds."""
    unit, end = scale
    yield Rectangle(x=left, y=y + _LANE - 0.25, width=end * unit, height=0.5, colour=LIGHT)
    for start, until, meaning in parts:
        if (until - start) * unit >= _NARROWEST:
            yield Rectangle(
                x=left + start * unit,
                y=y + _BETWEEN / 2,
                width=(until - start) * unit,
                height=_LANE - _BETWEEN,
                colour=_MEANINGS[meaning],
            )


def _merge_phases(spans: Sequence[LaneSpan]) -> Iterator[Stretch]:
    """Yield the phases of a rank's spans, from the start of a phase to the start of the next."""
    for phase, members in groupby(spans, key=lambda span: span.key.phase):
        of_phase = [*members]
        if str(phase) in _MEANINGS:
            yield of_phase[0].start, max(span.end for span in of_phase), str(phase)


def _merge_spans(spans: Sequence[LaneSpan]) -> Iterator[Stretch]:
    """Yield the start, end and meaning of spans; consecutive spans with one meaning are merged."""
    start = end = 0.0
    meaning: str | None = None
    for span in spans:
        span_meaning = _span_meaning(span)
        if span_meaning == meaning and span.start <= end:
            end = max(end, span.end)
            continue
        if meaning is not None:
            yield start, end, meaning
        start, end, meaning = span.start, span.end, span_meaning
    if meaning is not None:
        yield start, end, meaning


def _span_meaning(span: LaneSpan) -> str | None:
    """Return the meaning of a span; None for the waiting of a rank, which is white."""
    key = span.key
    is_own = span.lane is None or isinstance(span.lane, int)
    match key.spent:
        case Spent.COMPUTE:
            return "forward" if key.phase is Phase.FORWARD else "backward"
        case Spent.UPDATE:
            return "update"
        case Spent.WRAPPERS:
            return "wrappers"
        case _:
            return None if is_own else _traffic_meaning(key)


def _traffic_meaning(key: TimeKey) -> str:
    """Return the meaning of a span of communication."""
    if key.spent is Spent.COPIES:
        return "copy"
    if key.collective in _REDUCTIONS:
        return "reduction"
    return "gather" if key.collective is Collective.ALL_GATHER else "other collective"


def _add_lane_legend(sheet: Sheet, spans: Sequence[LaneSpan]) -> None:
    """Add the legend of the meanings that occur."""
    used = {_span_meaning(span) for span in spans} | {"waiting"}
    meanings = {**_MEANINGS, "waiting": WHITE}
    names = {colour: meaning for meaning, colour in meanings.items() if meaning in used}
    sheet.add_legend(EDGE, names, SMALL)
