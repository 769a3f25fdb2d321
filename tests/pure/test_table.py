"""The table that ends a training."""

from __future__ import annotations

from dataclasses import replace

from ptrain.report.record import compare
from ptrain.report.table import difference, end_table, render, summary
from tests.pure.test_record import EXACT, MEASURED


def test_columns_align_and_no_line_has_trailing_blanks():
    lines = render(("what", "bytes"), [("a", "1"), ("long name", "1000")]).splitlines()
    assert lines == ["what       bytes", "a              1", "long name   1000"]


def test_a_difference_names_bytes_and_percent():
    assert difference(1000, 1000) == "0"
    assert difference(1000, 1010) == "+10 B (+1.00%)"
    assert difference(1000, 990) == "-10 B (-1.00%)"
    assert difference(0, 3) == "+3 B"
    assert difference(None, 3) == "missing"


def test_there_is_a_row_per_state_per_phase_and_per_kind_of_call():
    lines = end_table(EXACT, MEASURED).splitlines()
    assert lines[0].split() == [
        "per", "rank", "and", "step", "predicted", "measured", "difference"
    ]  # fmt: skip
    assert len(lines) == 1 + 6 + 3 + 1
    assert all(line.endswith(" 0") for line in lines[1:])
    assert "all_gather dp_shard, forward (parameters)" in lines[-1]
    assert "3 × · 150 B" in lines[-1]


def test_of_the_ranks_the_largest_is_shown():
    assert "101 B" in end_table(EXACT, MEASURED).splitlines()[1]


def test_the_summary_names_what_fails_and_ends_with_the_verdict():
    wrong = replace(MEASURED, traffic=())
    text = summary(EXACT, wrong, compare(EXACT, wrong), torch="2.13.0")
    assert "missing" in text
    assert "fails: traffic dp_shard all_gather forward parameters calls" in text
    assert text.splitlines()[-2].startswith("21 checks over 2 ranks: ")
    assert text.splitlines()[-1] == "verdict: fails (18 of 21)"
