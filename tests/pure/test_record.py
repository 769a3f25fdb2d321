"""The result record and the verdict, for hand-written accounts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.cost import (
    Blocked,
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
    Wire,
)
from ptrain.derivation.interconnect import wire_rows
from ptrain.report.record import compare_estimates, result_record, verdict_line, verdict_word
from ptrain.report.recorded import decode_record
from ptrain.report.summary import training_summary
from ptrain.selection.fit import fit
from ptrain.train.notebook import Run
from tests.pure.build import make_spec

KEY = TrafficKey(
    axes=("dp_shard",),
    collective=Collective.ALL_GATHER,
    state=State.PARAMETERS,
    phase=Phase.FORWARD,
)


def account(column: Column) -> Estimate:
    return Estimate(
        column=column,
        world_size=2,
        memory=tuple(
            Footprint(state=state, rank=rank, device_bytes=100 + rank)
            for rank in range(2)
            for state in State
        ),
        peak=tuple(
            Peak(phase=phase, rank=rank, device_bytes=1000)
            for rank in range(2)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
        ),
        traffic=(Traffic(key=KEY, calls=3, payload_bytes=300, sent_bytes=150),),
    )


EXACT, MEASURED = account(Column.EXACT), account(Column.MEASURED)


def failing(measured: Estimate) -> list[str]:
    return [check.name for check in compare_estimates(EXACT, measured) if not check.holds]


def test_figures_without_a_prediction_have_no_check_and_a_note():
    untold = replace(
        EXACT,
        memory=tuple(
            row for row in EXACT.memory if row.state not in (State.ACTIVATIONS, State.TRANSIENT)
        ),
        peak=(),
        undefined={"activations": "why", "peak": "why"},
    )
    checks = compare_estimates(untold, MEASURED)
    assert verdict_word(checks) == "holds"
    kinds = {check.name.split()[0] for check in checks}
    assert kinds == {"memory", "traffic"}
    assert not [check for check in checks if check.name.startswith("memory activations")]
    line = verdict_line(checks, torch="2.13.0", untold=untold.undefined)
    assert line.endswith("not predicted: activations, peak")
    wrong = replace(MEASURED, memory=MEASURED.memory[1:])
    assert verdict_word(compare_estimates(untold, wrong)) == "fails"


def test_equal_accounts_hold_with_a_check_per_state_and_rank_per_count_and_per_peak():
    checks = compare_estimates(EXACT, MEASURED)
    assert verdict_word(checks) == "holds"
    assert len(checks) == len(State) * 2 + 3 + 3 * 2


def test_no_checks_are_no_verdict():
    assert verdict_word(()) == "fails"


@pytest.mark.parametrize("index", range(len(EXACT.memory)))
def test_one_byte_of_resident_memory_fails_the_verdict(index):
    rows = list(MEASURED.memory)
    rows[index] = replace(rows[index], device_bytes=rows[index].device_bytes + 1)
    name = f"memory {rows[index].state} rank {rows[index].rank}"
    assert failing(replace(MEASURED, memory=tuple(rows))) == [name]


def test_a_byte_on_another_tier_fails_the_verdict():
    rows = (replace(MEASURED.memory[0], host_bytes=1), *MEASURED.memory[1:])
    assert failing(replace(MEASURED, memory=rows)) == ["memory parameters rank 0 host"]


@pytest.mark.parametrize("count", ["calls", "payload_bytes", "sent_bytes"])
def test_one_call_or_byte_of_traffic_fails_the_verdict(count):
    row = MEASURED.traffic[0]
    wrong = replace(row, **{count: getattr(row, count) + 1})
    found = failing(replace(MEASURED, traffic=(wrong,)))
    assert found == [
        f"traffic dp_shard all_gather forward parameters {count.removesuffix('_bytes')}"
    ]


def test_every_ranks_account_of_traffic_must_be_right():
    row = MEASURED.traffic[0]
    wrong = replace(row, calls=4)
    assert len(failing(replace(MEASURED, traffic=(row, wrong)))) == 1
    assert not failing(replace(MEASURED, traffic=(row, row)))


def test_a_row_that_one_side_lacks_fails_the_verdict():
    other = replace(MEASURED.traffic[0], key=replace(KEY, phase=Phase.BACKWARD))
    assert len(failing(replace(MEASURED, traffic=()))) == 3
    assert len(failing(replace(MEASURED, traffic=(*MEASURED.traffic, other)))) == 3
    assert failing(replace(MEASURED, memory=MEASURED.memory[1:])) == ["memory parameters rank 0"]
    assert failing(replace(MEASURED, peak=MEASURED.peak[1:])) == ["peak forward rank 0"]


def test_a_single_ranks_account_is_compared_with_that_rank_only():
    own = replace(
        MEASURED,
        memory=tuple(row for row in MEASURED.memory if row.rank == 1),
        peak=tuple(row for row in MEASURED.peak if row.rank == 1),
    )
    assert not failing(own)


@pytest.mark.parametrize("passed", ["forward", "backward", "again"])
def test_one_operation_fails_the_verdict_where_both_count_them(passed):
    rows = tuple(Operations(rank=rank, forward=6, backward=12, again=4) for rank in range(2))
    exact, measured = replace(EXACT, operations=rows), replace(MEASURED, operations=rows)
    assert verdict_word(compare_estimates(exact, measured)) == "holds"
    wrong = (rows[0], replace(rows[1], **{passed: 5}))
    checks = compare_estimates(exact, replace(measured, operations=wrong))
    assert [check.name for check in checks if not check.holds] == [f"operations {passed} rank 1"]
    lacking = compare_estimates(exact, replace(measured, operations=rows[:1]))
    assert len([check for check in lacking if not check.holds]) == 3
    assert (
        compare_estimates(exact, MEASURED)
        == compare_estimates(EXACT, measured)
        == compare_estimates(EXACT, MEASURED)
    )


@given(st.integers(900, 1100))
def test_the_peak_holds_within_two_percent(size):
    rows = (replace(MEASURED.peak[0], device_bytes=size), *MEASURED.peak[1:])
    holds = not failing(replace(MEASURED, peak=rows))
    assert holds == (980 <= size <= 1020)


def test_the_record_is_json_with_the_fields_of_the_contract():
    checks = compare_estimates(EXACT, MEASURED)
    result = json.loads(
        json.dumps(result_record("tiny", (EXACT, MEASURED), checks=checks, device="cpu"))
    )
    assert {
        "spec", "world_size", "rank", "versions", "device", "memory", "peak", "traffic", "wire",
        "step_seconds", "checks", "verdict",
    } <= set(result)  # fmt: skip
    assert result["versions"]["ptrain"]
    assert (result["world_size"], result["rank"], result["verdict"]) == (2, "max", "holds")
    assert set(result["memory"][0]) == {
        "state", "column", "rank", "device_bytes", "host_bytes", "file_bytes"
    }  # fmt: skip
    assert result["traffic"][0] == {
        "axes": ["dp_shard"],
        "collective": "all_gather",
        "state": "parameters",
        "phase": "forward",
        "column": "exact",
        "calls": 3,
        "payload_bytes": 300,
        "sent_bytes": 150,
    }
    assert {"name", "predicted", "measured", "tolerance", "holds", "why"} == set(
        result["checks"][0]
    )


def test_a_column_without_figures_is_null_with_its_reason():
    paper = Estimate(column=Column.PAPER, world_size=2, undefined={"traffic": "no theorem"})
    assert result_record("tiny", (paper,))["undefined"] == {"paper": {"traffic": "no theorem"}}


def test_a_run_is_not_compared_with_assumptions_about_data_but_fake_ranks_are():
    why = dict.fromkeys(("activations", "peak", "traffic dp_shard all_gather"), "evenly")
    exact = replace(EXACT, assumed=why)
    other = [replace(row, device_bytes=row.device_bytes + 1) for row in MEASURED.peak]
    sent = [replace(row, sent_bytes=row.sent_bytes + 1) for row in MEASURED.traffic]
    run = replace(MEASURED, peak=tuple(other), traffic=tuple(sent))
    checks = compare_estimates(exact, run)
    assert verdict_word(checks) == "holds" and not any("peak" in check.name for check in checks)
    assert any(check.name.endswith("calls") for check in checks)
    line = verdict_line(checks, torch="2.13.0", assumed=exact.assumed)
    assert "not judged, for they assume: activations, peak, traffic dp_shard all_gather" in line
    assert verdict_word(compare_estimates(exact, replace(run, column=Column.SIMULATED))) == "fails"
    assert fit(make_spec({}), exact).peak_bytes is None
    written = json.loads(json.dumps(result_record("tiny", (exact, MEASURED))))
    assert decode_record(written).estimates[Column.EXACT].assumed == why


def test_predictions_from_the_counts_of_a_run_are_compared_and_marked():
    assumes = dict.fromkeys(("activations", "peak", "traffic dp_shard all_gather"), "evenly")
    exact = replace(EXACT, assumed=assumes)
    counts = dict.fromkeys(assumes, "by the routers of step 3")
    counted = replace(EXACT, column=Column.COUNTED, counted=counts)
    checks = compare_estimates(counted, MEASURED)
    assert {check.name for check in checks if check.counted} == {
        *(f"memory activations rank {rank}" for rank in range(2)),
        *(f"peak {phase} rank {rank}" for rank in range(2) for phase in ("forward", "backward")),
        *(f"peak update rank {rank}" for rank in range(2)),
        *(f"traffic dp_shard all_gather forward parameters {what}" for what in ("payload", "sent")),
    }
    line = verdict_line(checks, torch="2.13.0")
    assert "holds (21 of 21) · 10 by the counts of the run" in line
    more = [replace(row, device_bytes=row.device_bytes + 100) for row in MEASURED.peak]
    assert verdict_word(compare_estimates(counted, replace(MEASURED, peak=tuple(more)))) == "fails"
    written = json.loads(
        json.dumps(result_record("tiny", (exact, counted, MEASURED), checks=checks))
    )
    assert written["assumed"] == {"exact": assumes} and written["counted"] == {"counted": counts}
    assert sum("counted" in check for check in written["checks"]) == 10
    reading = decode_record(written)
    assert reading.checks == checks and reading.estimates[Column.EXACT].assumed == assumes
    assert reading.predicted == reading.estimates[Column.COUNTED]
    text = training_summary(reading.predicted, MEASURED, checks, torch="2.13.0")
    assert "peak forward, counted" in text and "counted: activations, peak, traffic dp" in text


def test_exactness_is_not_claimed_for_a_torch_that_no_test_names():
    checks = compare_estimates(EXACT, MEASURED)
    assert verdict_line(checks, torch="2.13.0+cpu") == "verdict: holds (21 of 21)"
    assert verdict_line(checks, torch="2.99.0").endswith("not claimed for torch 2.99.0")


def test_a_record_reads_back_equal():
    checks = compare_estimates(EXACT, MEASURED)
    account = decode_record(
        json.loads(json.dumps(result_record("tiny", (EXACT, MEASURED), checks=checks)))
    )
    assert account.estimates == {Column.EXACT: EXACT, Column.MEASURED: MEASURED}
    assert account.checks == checks


def test_operations_are_in_the_record_and_read_back():
    rows = tuple(Operations(rank=rank, forward=6, backward=12, again=4) for rank in range(2))
    exact = replace(EXACT, operations=rows)
    written = json.loads(json.dumps(result_record("tiny", (exact, MEASURED))))
    assert written["operations"][0] == {
        "column": "exact", "rank": 0, "forward": 6, "backward": 12, "again": 4
    }  # fmt: skip
    assert decode_record(written).estimates == {Column.EXACT: exact, Column.MEASURED: MEASURED}
    del written["operations"]  # an older version's
    assert decode_record(written).estimates == {Column.EXACT: EXACT, Column.MEASURED: MEASURED}


def test_wire_bytes_and_wait_times_read_back_and_print():
    wire = tuple(Wire(axes=KEY.axes, rank=rank, sent_bytes=150) for rank in range(2))
    blocked = tuple(Blocked(axes=KEY.axes, rank=rank, seconds=0.25) for rank in range(2))
    timed = replace(MEASURED, blocked=blocked)
    measured, checks = replace(timed, wire=wire), compare_estimates(EXACT, MEASURED)
    written = json.loads(json.dumps(result_record("tiny", (EXACT, measured), checks=checks)))
    account = decode_record(written)
    assert account.estimates == {Column.EXACT: EXACT, Column.MEASURED: timed}
    assert account.wire == wire_rows(EXACT, measured)
    said = training_summary(EXACT, measured, checks, torch="2.13.0")
    assert "on the wire" in said and "wait per step" in said
    written["versions"]["torch"] = "2.13.0"
    assert str(Run(Path(), written)) == said
