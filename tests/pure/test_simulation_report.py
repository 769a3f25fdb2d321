"""The figures of a simulation as text and as a picture, for hand-written figures."""

import pytest

from ptrain.charts.memory import course_sheet
from ptrain.cost import (
    Collective,
    Column,
    Estimate,
    Footprint,
    Operations,
    Peak,
    Phase,
    State,
    Traffic,
    TrafficKey,
)
from ptrain.report.simulation import (
    LiveStorages,
    MemoryHistory,
    MemorySample,
    RankReport,
    agreement_sentence,
    peak_table,
    phase_table,
    rank_heading,
    simulation_screen,
)

PARAMETERS, ACTIVATIONS = 0, 3  # places in a moment's bytes


def moment(event: int, phase: Phase, size: int, micro_batch: int = 0) -> MemorySample:
    sizes = [0] * len(State)
    sizes[PARAMETERS], sizes[ACTIVATIONS] = 10, size
    return MemorySample(
        event=event, phase=phase, micro_batch=micro_batch, device_bytes=tuple(sizes)
    )


def course(*sizes: int) -> MemoryHistory:
    """Forward up to the middle, then backward."""
    half = len(sizes) // 2
    moments = tuple(
        moment(event, Phase.FORWARD if event < half else Phase.BACKWARD, size)
        for event, size in enumerate(sizes)
    )
    highest = max(moments, key=lambda each: each.total)
    held = (
        LiveStorages(
            what="blocks.*.mlp", state=State.ACTIVATIONS, device_bytes=highest.total - 10, tensors=7
        ),
        LiveStorages(what="parameters", state=State.PARAMETERS, device_bytes=10, tensors=2),
    )
    return MemoryHistory(rank=3, moments=moments, peak=highest, held=held)


def traffic(calls: int) -> Traffic:
    key = TrafficKey(
        axes=("dp_shard",),
        collective=Collective.ALL_GATHER,
        state=State.PARAMETERS,
        phase=Phase.FORWARD,
    )
    return Traffic(key=key, calls=calls, payload_bytes=8 * calls, sent_bytes=7 * calls)


def estimate(column: Column, *, size: int = 10, calls: int = 4) -> Estimate:
    return Estimate(
        column=column,
        world_size=8,
        memory=(Footprint(state=State.PARAMETERS, rank=3, device_bytes=size),),
        peak=(Peak(phase=Phase.FORWARD, rank=3, device_bytes=90),),
        traffic=(traffic(calls),),
        operations=(Operations(rank=3, forward=2000, backward=4000),),
    )


def report(**changes: int) -> RankReport:
    return RankReport(
        rank=3,
        device="",
        alike=(3, 4, 5),
        exact=estimate(Column.EXACT),
        simulated=estimate(Column.SIMULATED, **changes),
        course=course(0, 80, 70, 5),
        seconds={"interpret": 0.5, "steps": 1.0},
    )


def test_equal_columns_are_reported_without_a_verdict() -> None:
    text = simulation_screen(report(), "mine")
    assert text.startswith("mine · rank 3 of 8, like ranks [4 5] · simulated in 1.5 s")
    assert "8 of 8 figures are equal" in text
    assert "verdict" not in text and "holds" not in text


def test_a_difference_is_in_its_row_and_in_the_count() -> None:
    found = report(size=12, calls=5)
    assert "+2 B (+20.00%)" in simulation_screen(found, "mine")
    names = {check.name for check in found.differing}
    assert "memory parameters rank 3" in names and len(names) == 4
    assert agreement_sentence(found) == "4 of 8 figures are equal"


def test_a_missing_prediction_is_reported() -> None:
    found = report()
    untold = {"peak": "not traced", "activations": "not traced"}
    lacking = RankReport(
        **{
            **{name: getattr(found, name) for name in RankReport.__slots__},
            "exact": Estimate(column=Column.EXACT, world_size=8, undefined=untold),
        }
    )
    assert agreement_sentence(lacking).endswith("not predicted: activations, peak")


def test_a_rehearsal_names_its_device() -> None:
    found = report()
    fields = {name: getattr(found, name) for name in RankReport.__slots__}
    there = RankReport(**{**fields, "device": "cuda:0", "alike": (3,)})
    assert rank_heading(there, "mine") == "mine · rank 3 of 8 · rehearsed on cuda:0 in 1.5 s"


def test_other_operations_than_derived_are_figures_that_differ() -> None:
    found = report()
    fields = {name: getattr(found, name) for name in RankReport.__slots__}
    fewer = estimate(Column.EXACT)
    object.__setattr__(fewer, "operations", (Operations(rank=3, forward=1, backward=4000),))
    other = RankReport(**{**fields, "exact": fewer})
    assert [check.name for check in other.differing] == ["operations forward rank 3"]
    (row,) = [
        line
        for line in simulation_screen(other, "mine").splitlines()
        if "operations forward" in line
    ]
    assert row.split()[2:-1] == ["1", "FLOP", "2", "kFLOP", "+1.999", "kFLOP"]
    rows = [
        line
        for line in simulation_screen(found, "mine").splitlines()
        if line.startswith("operations")
    ]
    assert len(rows) == 2 and all(line.endswith(" 0") for line in rows)


def test_each_state_is_listed_at_a_phases_peak() -> None:
    lines = phase_table(course(0, 80, 70, 5)).splitlines()
    assert lines[0].split() == ["memory", "at", "each", "phase's", "peak", "forward", "backward"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows == {
        "parameters": ["10", "B", "10", "B"],
        "activations": ["80", "B", "70", "B"],
        "all": ["90", "B", "80", "B"],
    }


def test_a_peak_is_listed_and_its_many_small_kinds_are_added_up() -> None:
    few = course(0, 80, 70, 5)
    assert peak_table(few).splitlines()[0] == "peak 90 B in forward, micro-batch 0"
    kinds = tuple(
        LiveStorages(what=f"kind {n}", state=State.OTHER, device_bytes=100 - n, tensors=2)
        for n in range(25)
    )
    many = MemoryHistory(rank=3, moments=few.moments, peak=few.peak, held=kinds)
    assert peak_table(many).splitlines()[-1].split() == ["5", "more", "kinds", "390", "B", "10"]


def test_the_account_of_a_rank_is_that_of_its_place_along_tp() -> None:
    exact = Estimate(
        column=Column.EXACT,
        world_size=2,
        memory=tuple(
            Footprint(state=State.PARAMETERS, rank=rank, device_bytes=rank) for rank in (0, 1)
        ),
        traffic=(traffic(1), traffic(2)),
        accounts=((traffic(1),), (traffic(2),)),
        account_of=(0, 1),
    )
    found = exact.of_rank(1)
    assert found.traffic == (traffic(2),)
    assert [row.rank for row in found.memory] == [1]


def test_a_picture_has_the_highest_moment_of_each_column_and_every_pass() -> None:
    sizes = [*range(2000), 5000, *range(2000, 0, -1)]
    sheet = course_sheet(course(*sizes))
    highest = [each.y for each in sheet.rectangles if each.colour == "#f0e442"]
    grid = [each.y for each in sheet.rectangles if each.colour == "#cccccc"]
    assert max(grid) - min(highest) == pytest.approx(240), "the peak has the full height"
    words = {each.text for each in sheet.texts}
    assert {"forward 0", "backward 0", "parameters", "activations", "0", "4 KiB"} <= words


def test_a_picture_of_few_moments_fills_its_width() -> None:
    sheet = course_sheet(course(1, 2, 3, 4))
    columns = [each for each in sheet.rectangles if each.colour == "#f0e442"]
    assert len(columns) == 4 + 1, "and the legend's"
    assert columns[3].x + columns[3].width == pytest.approx(sheet.width - 14)


def test_a_line_marks_usable_memory_unless_the_bars_would_be_too_short_to_read() -> None:
    peak = course(1, 2).peak.total
    assert [line.dash for line in course_sheet(course(1, 2), "a", 2 * peak).lines] == [3]
    far = course_sheet(course(1, 2), "a", 9 * peak)
    assert not far.lines and any("outside the picture" in each.text for each in far.texts)


def test_moments_of_equal_sizes_are_one_bar_of_a_picture() -> None:
    bars = [
        each for each in course_sheet(course(1, 1, 2, 2)).rectangles if each.colour == "#f0e442"
    ]
    assert len(bars) == 2 + 1 and bars[0].width == bars[1].width, "the last one is the legend's"
