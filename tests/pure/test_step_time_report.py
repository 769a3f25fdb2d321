"""The step time in output, records and charts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ptrain.charts.schedule import step_sheet, timeline_sheet
from ptrain.cli.main import main
from ptrain.cost import (
    Blocked,
    Collective,
    Column,
    Estimate,
    Phase,
    Spent,
    StepTime,
    TimeKey,
    TimeRow,
)
from ptrain.derivation.clock import LaneSpan
from ptrain.derivation.estimate import Derivation, derive, predict_throughput, token_operations
from ptrain.derivation.machine import Machine
from ptrain.report.predict import prediction_of, prediction_screen
from ptrain.report.record import result_record, verdict_line
from ptrain.report.recorded import decode_record
from ptrain.report.step_time import critical_path, time_lines, time_table
from ptrain.spec.load import load
from ptrain.units import format_seconds
from tests.pure.hand_made_paces import HandPace, model

AXES = ("dp_shard",)
GATHERS = TimeKey(Spent.COLLECTIVES, Phase.FORWARD, AXES, Collective.ALL_GATHER)
SUMS = TimeKey(Spent.COLLECTIVES, Phase.BACKWARD, AXES, Collective.REDUCE_SCATTER)


def step_of(**seconds: float) -> StepTime:
    """A step that computes for 0.7 s; `gathers` of 0.9 s are exposed in part."""
    rows = [TimeRow(key=TimeKey(Spent.COMPUTE, Phase.FORWARD), seconds=0.7)]
    for name, taken in seconds.items():
        match name:
            case "gathers":
                rows.append(TimeRow(key=GATHERS, seconds=taken, moving=0.9))
            case "reductions":
                rows.append(TimeRow(key=SUMS, seconds=taken, moving=taken))
            case _:
                rows.append(TimeRow(key=TimeKey(Spent(name), Phase.UPDATE), seconds=taken))
    return StepTime(rows=tuple(rows))


def derive_with_step(*overrides: str, **figures: Any) -> Derivation:
    spec = load("zero3", ["cluster.preset=h100-8", *overrides]).spec
    work = model(10, 20, layers=spec.model.layers)
    machine = Machine(pace=HandPace(sent=1e-6, **figures), work=lambda _: work)
    return derive(spec, machine=machine)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (
            {"gathers": 0.31, "update": 0.19},
            "overhead in 1.20 s: 310 ms exposed dp_shard all-gathers, 190 ms",
        ),
        ({"bubble": 0.3}, "overhead in 1.00 s: 300 ms pipeline bubble"),
        ({"gathers": 0.0}, "all of 700 ms is computing; 900 ms of communication overlaps"),
        ({}, "all of 700 ms is computing"),
    ],
)
def test_the_overheads_of_a_step_are_listed_in_a_sentence(seconds, text):
    assert critical_path(step_of(**seconds)).startswith(text)


def test_a_prediction_has_a_block_whose_parts_add_up_to_the_step():
    derivation = derive_with_step()
    step = derivation.exact.step
    text = prediction_screen(prediction_of(derivation, offer=False))
    block = text[text.index("time per step") :].split("\n\n")[0].splitlines()
    named = {line.rsplit("  ")[0].strip(): line for line in block}
    assert any(line.startswith("exposed dp_shard") for line in block)
    assert format_seconds(step.seconds) in next(line for line in block if line.startswith("step "))
    assert "█" in block[1] and len(named) == len(block)
    assert step.seconds == pytest.approx(sum(step.seconds_in(spent) for spent in Spent))
    assert "tokens/s" in text and "no step time" not in text


def test_without_rates_the_block_gives_the_reason_if_a_cluster_is_named():
    named, unnamed = (load("zero3", over).spec for over in ([], ["cluster=null"]))
    assert named.cluster is not None and unnamed.cluster is None
    (line, _) = time_lines(derive(named))
    assert line.startswith("no step time: the cluster laptop has no rates")
    assert time_lines(derive(unnamed)) == []


def test_a_step_is_in_the_record_and_reads_back():
    estimate = derive_with_step("overlap=none").exact
    result = json.loads(
        json.dumps(result_record("zero3", (estimate,), step_seconds={"measured": 2.5}))
    )
    predicted, measured = result["step_seconds"]
    assert predicted["value"] == pytest.approx(estimate.step.seconds)
    assert sum(predicted["parts"].values()) == pytest.approx(predicted["value"])
    assert sum(predicted["phases"].values()) == pytest.approx(predicted["value"])
    assert predicted["exposed"] == [
        {
            "axes": ["dp_shard"],
            "seconds": pytest.approx(estimate.step.exposed_seconds()["dp_shard",]),
        }
    ]
    assert measured == {"column": "measured", "value": 2.5}
    back = decode_record(result)
    assert back.estimates[Column.EXACT].step == estimate.step
    assert back.step_seconds == 2.5


def test_measured_seconds_are_shown_next_to_predicted_ones_without_a_verdict():
    exact = Estimate(column=Column.EXACT, world_size=2, step=step_of(gathers=0.3, reductions=0.2))
    waits = tuple(Blocked(axes=AXES, rank=rank, seconds=0.4 + rank / 10) for rank in (0, 1))
    measured = Estimate(column=Column.MEASURED, world_size=2, blocked=waits)
    _, step, waiting = time_table(exact, measured, 1.5).splitlines()
    assert step.split()[1:] == ["1.20", "s", "1.50", "s", "+25.0%"]
    assert waiting.split()[1:] == ["dp_shard", "500", "ms", "500", "ms", "+0.0%"]
    bubble = TimeRow(key=TimeKey(Spent.BUBBLE, Phase.BACKWARD, ("pp",)), seconds=0.25)
    piped = replace(exact, step=StepTime(rows=(bubble,)))
    idle = time_table(
        piped, replace(measured, blocked=(Blocked(axes=("pp",), rank=0, seconds=0.2),)), 1
    )
    assert idle.splitlines()[2].split()[1:] == ["pp", "250", "ms", "200", "ms", "-20.0%"]
    assert time_table(replace(exact, step=None), measured, 1.5) == ""
    assert "step_seconds" not in verdict_line([], torch="2.13.0", untold=["step_seconds"])


def test_tokens_per_second_and_utilization_follow_from_the_operations():
    """6N + 12Lds for full attention, 6N + 6Lds for causal attention; N without the embedding."""
    derivation = derive_with_step()
    shape, spec = derivation.spec.model, derivation.spec
    numel = derivation.facts.numel - shape.vocab * shape.hidden
    scores = shape.layers * shape.hidden * spec.batch.sequence
    whole, causal = (
        token_operations(shape, derivation.facts, spec.batch.sequence, is_causal=is_causal)
        for is_causal in (False, True)
    )
    assert (whole, causal) == (6 * numel + 12 * scores, 6 * numel + 6 * scores)
    pace = predict_throughput(spec, derivation.facts, derivation.exact.step)
    tokens = spec.batch.global_samples * spec.batch.sequence / derivation.exact.step.seconds
    assert pace.tokens_per_second == pytest.approx(tokens)
    assert pace.mfu_full == pytest.approx(tokens * whole / (2 * 989e12))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2424.2, "2424 s"),
        (12.34, "12.3 s"),
        (1.204, "1.20 s"),
        (0.9999, "1.00 s"),
        (0.31, "310 ms"),
        (0.00456, "4.56 ms"),
        (0.0000789, "78.9 µs"),
    ],
)
def test_seconds_have_three_digits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("zero3", "ddp"), "draws one spec; got several"),
        (("zero3", "batch.micro=1,2"), "draws one spec; got several"),
        (("zero3",), "the step time is unknown: the cluster laptop has no rates"),
    ],
)
def test_a_timeline_is_drawn_for_one_spec_with_a_known_time(words, text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["predict", *words, "--timeline", str(tmp_path / "step.svg")]) == 2
    error = capsys.readouterr()
    assert f"--timeline: {text}" in error.err and not error.out
    assert main(["predict", *words, "--timeline", str(tmp_path / "step.gif")]) == 2
    assert not [*tmp_path.iterdir()]


def test_a_timeline_is_written_with_the_prediction(tmp_path, capsys):
    path = tmp_path / "step.svg"
    for name in ("zero3", "pp-1f1b"):
        words = [name, "cluster.preset=h100-8", "--timeline", str(path)]
        assert main(["predict", *words]) == 0
        assert capsys.readouterr().out.splitlines()[-3] == f"timeline {path}"
        assert "<svg" in path.read_text(encoding="utf-8")


def test_a_chart_has_a_row_for_each_lane_and_white_where_the_rank_waits():
    computes = TimeKey(Spent.COMPUTE, Phase.FORWARD)
    spans = [
        LaneSpan(AXES, GATHERS, 0.0, 2.0),
        LaneSpan(None, GATHERS, 0.0, 2.0),
        LaneSpan(None, computes, 2.0, 3.0),
        LaneSpan(None, computes, 3.0, 4.0),
    ]
    sheet = step_sheet("a step", "note", spans)
    texts = [label.text for label in sheet.texts]
    assert {"rank", "dp_shard", "forward", "gather", "waiting", "4 s"} <= set(texts)
    assert all(label.left >= 0 and label.left + label.width <= sheet.width for label in sheet.texts)
    gathers, forward = (
        [box for box in sheet.rectangles if box.colour == colour and box.height == 20.0]
        for colour in ("#0072b2", "#56b4e9")
    )
    assert len(gathers) == len(forward) == 1, "consecutive spans of one meaning are one box"
    assert forward[0].width == pytest.approx(gathers[0].width)
    assert forward[0].x == pytest.approx(gathers[0].x + gathers[0].width)


def test_the_axis_of_a_timeline_ends_with_the_step_and_one_micro_batch_is_enlarged():
    derivation = derive(load("8b-zero3").spec)
    sheet = timeline_sheet(derivation)
    texts = [label.text for label in sheet.texts]
    seconds = format_seconds(derivation.exact.step.seconds)
    assert f"the step: 8 micro-batches and the update: {seconds}" in texts
    assert any(text.startswith("micro-batch 1 of 0 to 7, and 5 more like it") for text in texts)
    coarse = [box for box in sheet.rectangles if box.height == 20.0][: 2 * 8 + 1]
    assert [box.colour for box in coarse] == ["#56b4e9", "#e8d020"] * 8 + ["#009e73"]
