"""The table that ends a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import (
    Blocked,
    Collective,
    Estimate,
    Phase,
    State,
    Traffic,
    TrafficKey,
    Wire,
)
from ptrain.report.record import compare_estimates
from ptrain.report.summary import difference_text, end_table, training_summary
from ptrain.report.table import (
    Importance,
    TableColumn,
    difference_columns,
    make_columns,
    name_column,
    render_table,
)
from tests.pure.test_record import EXACT, MEASURED


def test_columns_align_and_no_line_has_trailing_blanks():
    rows = [("a", "1"), ("long name", "1000")]
    lines = render_table(make_columns(rows, name_column("what"), TableColumn("bytes"))).splitlines()
    assert lines == ["what       bytes", "a              1", "long name   1000"]


def test_a_table_without_titles_has_no_title_line():
    assert (
        render_table([name_column("", ["a", "bc"]), TableColumn("", cells=["10", "2"])])
        == "a   10\nbc   2"
    )
    assert (
        render_table(make_columns((), name_column("what"), TableColumn("bytes"))) == "what  bytes"
    )


def test_a_table_that_is_too_wide_drops_the_least_important_columns_and_names_them():
    columns = [
        name_column("what", ["gradients"]),
        TableColumn("paper", Importance.DETAIL, ["12 B"]),
        TableColumn("exact", Importance.RESULT, ["13 B"]),
        TableColumn("", Importance.PICTURE, ["█" * 10], left=True),
        TableColumn("calls", Importance.DETAIL, ["3"]),
    ]
    whole = render_table(columns)
    width = len(whole.splitlines()[0])
    assert render_table(columns, width) == whole and "left out" not in whole
    fewer = render_table(columns, width - 1).splitlines()
    assert fewer[:2] == ["what       paper  exact  calls", "gradients   12 B   13 B      3"]
    assert render_table(columns, 23).splitlines() == [
        "what       paper  exact",
        "gradients   12 B   13 B",
        "1 column left out: calls",
    ]
    assert render_table(columns, 1).splitlines() == [
        "what",
        "gradients",
        "3 columns left out: paper, exact, calls",
    ]


def test_a_table_with_a_width_is_never_wider_than_it_while_a_column_can_go():
    rows = [("all_gather dp_shard", "3 calls, 150 B", "4 calls, 150 B", "+1 call")]
    columns = make_columns(rows, *difference_columns("per rank and step"))
    for width in range(19, 80):
        *lines, last = render_table(columns, width).splitlines()
        lines += [] if "left out" in last else [last]
        assert max(map(len, lines)) <= width
        assert "+1 call" in lines[1] or width < 31  # the difference goes last


def test_a_difference_names_bytes_and_percent():
    assert difference_text(1000, 1000) == "0"
    assert difference_text(1000, 1010) == "+10 B (+1.00%)"
    assert difference_text(1000, 990) == "-10 B (-1.00%)"
    assert difference_text(0, 3) == "+3 B"
    assert difference_text(None, 3) == "missing"


def test_there_is_a_row_per_state_per_phase_and_per_kind_of_call():
    lines = end_table(EXACT, MEASURED).splitlines()
    assert lines[0].split() == [
        "per", "rank", "and", "step", "predicted", "measured", "difference"
    ]  # fmt: skip
    assert len(lines) == 1 + 6 + 3 + 1
    assert all(line.endswith(" 0") for line in lines[1:])
    assert "all_gather dp_shard, forward (parameters)" in lines[-1]
    assert "3 calls, 150 B" in lines[-1]


def test_of_the_ranks_the_largest_is_shown():
    assert "101 B" in end_table(EXACT, MEASURED).splitlines()[1]


def test_a_row_shows_the_rank_with_the_largest_difference():
    smaller = [
        replace(row, device_bytes=90) if row.rank == 0 and row.state is State.PARAMETERS else row
        for row in MEASURED.memory
    ]
    peaks = [replace(MEASURED.peak[0], device_bytes=900), *MEASURED.peak[1:]]
    lines = end_table(EXACT, replace(MEASURED, memory=tuple(smaller), peak=tuple(peaks)))
    rows = {line.split("  ")[0]: line for line in lines.splitlines()}
    assert rows["parameters"].split()[1:] == ["100", "B", "90", "B", "-10", "B", "(-10.00%)"]
    assert rows["optimizer"].endswith(" 0") and "101 B" in rows["optimizer"]
    assert rows["peak forward"].endswith("-100 B (-10.00%)")


@pytest.mark.parametrize(
    ("count", "text"),
    [("calls", "+1 call"), ("payload_bytes", "payload +1 B (+0.33%)"), ("sent_bytes", "+1 B")],
)
def test_a_row_of_traffic_is_of_the_account_that_was_not_derived(count, text):
    """The account that sends most is as derived, and another is not."""
    row = EXACT.traffic[0]
    little = replace(row, sent_bytes=1)
    wrong = replace(little, **{count: getattr(little, count) + 1})
    exact = replace(EXACT, traffic=(row, little))
    line = end_table(exact, replace(MEASURED, traffic=(row, wrong))).splitlines()[-1]
    assert text in line and not line.endswith(" 0")
    assert end_table(exact, exact).splitlines()[-1].endswith("3 calls, 150 B           0")


def test_the_summary_names_failures_and_ends_with_the_verdict():
    wrong = replace(MEASURED, traffic=())
    text = training_summary(EXACT, wrong, compare_estimates(EXACT, wrong), torch="2.13.0")
    assert "missing" in text
    assert "fails: traffic dp_shard all_gather forward parameters calls" in text
    assert text.splitlines()[-2].startswith("21 checks over 2 ranks: ")
    assert text.splitlines()[-1] == "verdict: fails (18 of 21)"


def on_host(exact: Estimate) -> Estimate:
    """Return an account with 7 bytes of optimizer state on the host that are copied twice."""
    key = TrafficKey(
        axes=(),
        collective=Collective.HOST_TO_DEVICE,
        state=State.OPTIMIZER,
        phase=Phase.UPDATE,
    )
    copies = Traffic(key=key, calls=2, payload_bytes=14, sent_bytes=0)
    memory = [
        replace(row, host_bytes=7) if row.state is State.OPTIMIZER else row for row in exact.memory
    ]
    return replace(exact, memory=tuple(memory), traffic=(*exact.traffic, copies))


def test_tiers_have_separate_rows_and_copies_have_no_axes():
    text = end_table(on_host(EXACT), on_host(MEASURED))
    (resident,) = [line for line in text.splitlines() if "on the host" in line]
    assert resident.split() == ["optimizer", "on", "the", "host", "7", "B", "7", "B", "0"]
    (copied,) = [line for line in text.splitlines() if "host_to_device" in line]
    assert copied.startswith("host_to_device, update (optimizer)")
    assert copied.count("2 calls, 14 B") == 2 and copied.endswith(" 0")
    assert on_host(EXACT).copied_bytes() == 14


def test_a_copy_that_only_one_side_has_is_missing_and_fails():
    text = training_summary(
        on_host(EXACT), MEASURED, compare_estimates(on_host(EXACT), MEASURED), torch="2.13.0"
    )
    assert "fails: traffic own host_to_device update optimizer calls" in text
    assert "missing" in text


def test_socket_bytes_are_shown_next_to_backend_bytes():
    assert "on the wire" not in training_summary(EXACT, MEASURED, (), torch="2.13.0")
    axes = EXACT.traffic[0].key.axes
    wire = tuple(Wire(axes=axes, rank=rank, sent_bytes=EXACT.sent_bytes()) for rank in range(2))
    blocked = (Blocked(axes=axes, rank=0, seconds=0.25), Blocked(axes=axes, rank=1, seconds=0.5))
    text = training_summary(
        EXACT, replace(MEASURED, wire=wire, blocked=blocked), (), torch="2.13.0"
    )
    (row,) = [line for line in text.splitlines() if "+0.000%" in line]
    assert row.startswith("dp_shard") and "gloo" in row
    assert "0.250 s" in text and "0.500 s" in text


def test_names_of_differences_continue_before_a_figure_is_left_out():
    rows = [
        ("all_gather dp_shard, forward", "2 calls, 8 B", "2 calls, 8 B", "0"),
        ("a", "1 B", "1 B", "0"),
    ]
    columns = make_columns(rows, *difference_columns("per rank and step"))
    assert render_table(columns, 64).splitlines() == [
        "per rank and step        predicted      measured  difference",
        "all_gather dp_shard,  2 calls, 8 B  2 calls, 8 B           0",
        "  forward",
        "a                              1 B           1 B           0",
    ]
    assert render_table(columns, 200).count("\n") == 2
    assert "left out: predicted, measured" in render_table(columns, 40)
