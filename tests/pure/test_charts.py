"""The layout of a schedule chart before drawing: boxes, texts and colours."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest

from ptrain.axes.pipeline.catalogue import make_schedule
from ptrain.axes.pipeline.schedule import PipelineShape, Schedule
from ptrain.axes.pipeline.simulate import simulate
from ptrain.charts.schedule import Box, Heading, schedule_boxes, schedule_sheet
from ptrain.charts.sheet import Label, Sheet, ink_on, luminance, shades
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind
from tests.pure.pipelines import GRID, VEES, pipeline

SMALL, LARGE = (2, 4), (8, 32)  # ranks and micro-batches
SIZES = [
    (name, pipeline(ranks, each, microbatches))
    for ranks, microbatches in (SMALL, LARGE)
    for name, each in (
        *((name, 2 if name in VEES else 1) for name in ScheduleName),
        (ScheduleName.INTERLEAVED, 2),
    )
]

# Machado, Oliveira and Fernandes 2009, severity 1: what is left of linear RGB.
SEEN = {
    "by most": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "without red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "without green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "without blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Linear RGB of sRGB to CIE XYZ over the white of D65.
XYZ = (
    (0.433891, 0.376235, 0.189906),
    (0.212673, 0.715152, 0.072175),
    (0.017754, 0.109476, 0.872770),
)


def boxes_of(made: Schedule) -> list[Box]:
    return list(schedule_boxes(made, simulate(made)))


def sheet_of(name: ScheduleName, size: PipelineShape, spec: str = "some-spec") -> Sheet:
    return schedule_sheet(Heading(spec=spec, schedule=name), make_schedule(name, size))


def texts_of(sheet: Sheet) -> list[str]:
    return [each.text for each in sheet.texts]


# -------- boxes


@pytest.mark.parametrize("name", ScheduleName)
def test_every_action_has_one_box_on_its_stages_rank(name):
    for size in [size for other, size in GRID if other is name]:
        made = make_schedule(name, size)
        actions = Counter(part for order in made.orders for step in order for part in step.parts)
        drawn = boxes_of(made)
        assert Counter(box.action for box in drawn) == actions
        for box in drawn:
            assert box.rank == made.rank_of[box.action.stage]
            assert made.stages_of(box.rank)[box.shade] == box.action.stage
            assert box.rank <= box.top < box.bottom <= box.rank + 1


@pytest.mark.parametrize("name", ScheduleName)
def test_boxes_of_a_rank_do_not_overlap(name):
    for size in [size for other, size in GRID if other is name]:
        for one, two in pairwise(boxes_of(make_schedule(name, size))):
            is_beside = one.bottom <= two.top and one.start == two.start
            assert one.rank < two.rank or one.end <= two.start or is_beside


@pytest.mark.parametrize("name", ScheduleName)
def test_the_white_of_the_rows_is_the_simulators_bubble(name):
    for size in [size for other, size in GRID if other is name]:
        made = make_schedule(name, size)
        simulation = simulate(made)
        filled = sum(box.length * (box.bottom - box.top) for box in boxes_of(made))
        white = 1 - filled / (made.ranks * simulation.makespan)
        assert white == pytest.approx(simulation.bubble_fraction, abs=1e-12)


def test_halves_of_a_pair_lie_above_each_other_as_long_as_the_pair():
    made = make_schedule(ScheduleName.DUALPIPEV, pipeline(2, 2, 8))
    halves = [box for box in boxes_of(made) if box.is_half]
    pairs = [step for order in made.orders for step in order if len(step.parts) == 2]
    assert len(halves) == 2 * len(pairs) > 0
    for forward, backward in zip(halves[::2], halves[1::2], strict=True):
        assert (forward.action.kind, backward.action.kind) == (Kind.FORWARD, Kind.BACKWARD)
        assert (forward.start, forward.end) == (backward.start, backward.end)
        assert forward.bottom == backward.top == forward.rank + 0.5


# -------- the sheet


@pytest.mark.parametrize(("name", "size"), SIZES, ids=str)
def test_texts_do_not_overlap_or_leave_the_sheet(name, size):
    sheet = sheet_of(name, size)
    texts = sorted(sheet.texts, key=lambda text: text.left)
    for at, one in enumerate(texts):
        assert one.left >= 0
        assert one.left + one.width <= sheet.width
        assert one.size / 2 <= one.y <= sheet.height - one.size / 2
        for two in texts[at + 1 :]:
            if two.left >= one.left + one.width:
                break
            apart = abs(one.y - two.y)
            assert apart >= (one.size + two.size) / 2, (one, two)


@pytest.mark.parametrize(("name", "size"), SIZES, ids=str)
def test_every_box_has_its_number_until_the_sheet_is_as_long_as_it_may_be(name, size):
    sheet, made = sheet_of(name, size), make_schedule(name, size)
    number = sum(len(step.parts) for order in made.orders for step in order)
    numbered = sum(is_on_a_box(text, sheet) for text in sheet.texts if text.text[0].isdigit())
    if name is ScheduleName.NAIVE and size.microbatches == LARGE[1]:
        assert 0 < numbered < number
        assert "narrow boxes have no number" in texts_of(sheet)[-1]
    else:
        assert numbered == number
        assert "without" not in texts_of(sheet)[-1]


def is_on_a_box(text: Label, sheet: Sheet) -> bool:
    high = text.size / 2
    return any(
        box.x <= text.left
        and text.left + text.width <= box.x + box.width
        and box.y <= text.y - high
        and text.y + high <= box.y + box.height
        for box in sheet.rectangles
    )


def test_a_sheet_grows_with_ranks_and_time_up_to_40_inches():
    sizes = [pipeline(2, 1, 4), pipeline(8, 1, 32), pipeline(8, 1, 128), pipeline(8, 1, 1024)]
    sheets = [sheet_of(ScheduleName.ONE_F_ONE_B, size) for size in sizes]
    assert sheets[0].height < sheets[1].height == sheets[2].height
    assert sheets[0].width < sheets[1].width < sheets[2].width <= sheets[3].width < 41 * 72
    assert sheet_of(ScheduleName.GPIPE, pipeline(1000, 1, 2)).height < 65535 * 72 / 150


def test_a_sheet_names_schedule_model_and_both_bubble_conventions():
    texts = texts_of(sheet_of(ScheduleName.ONE_F_ONE_B, pipeline(8, 1, 32), "my-spec"))
    assert texts[0] == "my-spec"
    assert texts[1] == "1f1b · ranks: 8 · stages: 8, 1 per rank · micro-batches: 32"
    assert texts[2].startswith("bubble 17.9% of the step, 21.9% of the ideal time, for")
    assert [text for text in texts if text.startswith("rank ")] == [f"rank {r}" for r in range(8)]
    assert "time in units of one forward pass (F = 1, B = 2)" in texts
    assert texts[-4:-1] == ["F forward", "B backward", "idle"]


def test_a_sheet_names_the_stages_where_a_rank_has_several():
    texts = texts_of(sheet_of(ScheduleName.DUALPIPEV, pipeline(2, 2, 4)))
    assert {"stages 0, 3", "stages 1, 2", "s3", "3 s0", "1 s3"} <= set(texts)
    assert "two in one box: side by side" in texts[-1]
    texts = texts_of(sheet_of(ScheduleName.INTERLEAVED, pipeline(2, 6, 4)))
    assert "stages 0, 2 … 10" in texts


def test_a_long_name_is_wrapped():
    long = "-".join(["seventy"] * 30)
    texts = texts_of(sheet_of(ScheduleName.GPIPE, pipeline(2, 1, 4), long))
    lines = next(at for at, text in enumerate(texts) if text.startswith("gpipe"))
    assert lines > 1
    assert "".join(texts[:lines]) == long


# -------- colours


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    """Return the CIE L*a*b* colour of an sRGB colour."""
    light = [luminance(f"#{colour[at : at + 2] * 3}") for at in (1, 3, 5)]
    seen = [min(1, max(0, sum(map(float.__mul__, map(float, row), light)))) for row in SEEN[eye]]
    x, y, z = (cube_root(sum(map(float.__mul__, row, map(float, seen)))) for row in XYZ)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def cube_root(value: float) -> float:
    """Return the cube root, linear near 0 as in CIE 1976."""
    return value ** (1 / 3) if value > (6 / 29) ** 3 else value / (3 * (6 / 29) ** 2) + 4 / 29


def distance(one: str, two: str) -> float:
    """Return the CIE 1976 distance for the colour vision that distinguishes the two least; 2.3 is
    just noticeable."""
    return min(
        sum((a - b) ** 2 for a, b in zip(lab(one, eye), lab(two, eye), strict=True)) ** 0.5
        for eye in SEEN
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_colour_blind_readers_distinguish_kinds_and_idle_time(stages):
    for one, two in combinations(Kind, 2):
        for shade in shades(one, stages):
            assert distance(shade, "#ffffff") > 15
            for other in shades(two, stages):
                assert distance(shade, other) > 15, (one, two)


def test_two_stages_of_a_rank_have_distinguishable_shades():
    for kind in Kind:
        assert distance(*shades(kind, 2)) > 10
        assert len(set(shades(kind, 8))) == 8


def test_numbers_contrast_with_every_colour():
    for kind in Kind:
        for colour in shades(kind, 5):
            light, dark = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5
