"""`ptrain compare BASE HEAD`: differences of two records, limits, and records that cannot be
compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ptrain.cli.main import main
from ptrain.cost import Column, Footprint, State
from ptrain.report.comparison import compare_records, find_violations, parse_limits
from ptrain.report.finding import RootCause, Subject
from ptrain.report.record import Check, result_record
from ptrain.report.recorded import FigureGroup, FigureKind, RecordedTraining, read_trainings
from ptrain.report.verification import as_record as verification_record
from tests.pure.test_record import EXACT, KEY, MEASURED

Printed = Callable[..., str]
CULPRIT = RootCause(
    state=Subject.GRADIENTS,
    axis="dp_shard",
    factor="x 2",
    place="blocks.0",
    step=1,
    ranks=(0, 1),
    sentence="the mean over dp_shard is taken twice",
)


@pytest.fixture
def run_printing(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return the output of a command that must exit with `code`."""

    def run(*words: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        captured = capsys.readouterr()
        return captured.out if code < 2 else captured.err

    return run


def write_record(path: Path, *documents: object) -> Path:
    path.write_text("\n".join(json.dumps(document, indent=1) for document in documents))
    return path


def verification(name: str = "zero3", *, holds: bool = True) -> dict[str, object]:
    check = Check(name="gradients", predicted=0.0, measured=0.1, tolerance=1.0, holds=holds)
    return verification_record(name, (check,), root_cause=None if holds else CULPRIT)


def run_record(*, loss: float = 2.5, seconds: float = 0.5, name: str = "run") -> dict[str, Any]:
    result = result_record(name, (EXACT, MEASURED), step_seconds={"measured": seconds})
    return result | {"run": {"loss": loss, "held_out_loss": None}, "tokens_per_step": 100}


def run_with_row(
    *groups: tuple[FigureKind, dict[str, int | float | None]], name: str = "a"
) -> RecordedTraining:
    return RecordedTraining(
        name=name,
        groups={FigureGroup(kind, "predicted"): figures for kind, figures in groups},
        verdicts={},
    )


def failures(
    base: Iterable[RecordedTraining], head: Iterable[RecordedTraining], text: str
) -> list[str]:
    sides = [{its.name: its for its in side} for side in (base, head)]
    return find_violations(compare_records(*sides, names=("base", "head")), parse_limits(text))


def test_two_specs_are_predicted_and_their_differences_shown(run_printing):
    lines = run_printing("compare", "zero2", "zero3").splitlines()
    assert lines[0] == "zero2 → zero3"
    rows = {line.split("  ")[0]: line for line in lines[2:]}
    assert rows["parameters"].endswith(" 3.07 MiB  1.535 MiB  -1.534 MiB (-50.0%)")
    assert rows["all_gather over dp_shard, calls"].endswith(" 1         40       +39 (+3900.0%)")
    assert "activations" not in rows and lines[-3] == "7 more are equal"


def test_equal_rows_are_shown_on_demand(run_printing):
    text = run_printing("compare", "zero2", "zero3", "--all")
    assert "activations" in text and "are equal" not in text
    assert len(text.splitlines()) == len(run_printing("compare", "zero2", "zero3").splitlines()) + 6


def test_an_override_is_for_both_specs(run_printing):
    text = run_printing("compare", "zero2", "zero3", "mesh.dp_shard=4", "--json")
    (training,) = json.loads(text)["trainings"]
    ranks = next(row for row in training["figures"] if row["name"] == "ranks")
    assert (ranks["base"], ranks["head"]) == (4, 4)


def test_a_spec_is_compared_with_a_printed_record(run_printing, tmp_path):
    file = tmp_path / "base.json"
    file.write_text(run_printing("predict", "zero3", "--json"))
    (training,) = json.loads(run_printing("compare", file, "zero3", "--json"))["trainings"]
    assert training["figures"]
    assert all(row["difference"] == 0 for row in training["figures"])
    assert (
        run_printing("compare", file, "zero3").count(f"\n{len(training['figures'])} are equal\n")
        == 1
    )


def test_a_pipe_of_the_shell_is_a_file(run_printing, tmp_path):
    pipe = tmp_path / "63"
    os.mkfifo(pipe)
    text = json.dumps(run_record())
    writer = Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert "are equal" in run_printing(
        "compare", pipe, write_record(tmp_path / "h.json", run_record())
    )
    writer.join(10)


def test_a_run_folder_is_compared_by_the_figures_of_both_sides(run_printing, tmp_path):
    write_record(tmp_path / "summary.json", run_record(loss=2.5))
    head = write_record(tmp_path / "head.json", run_record(loss=2.0, seconds=0.25))
    text = run_printing("compare", tmp_path, head)
    assert "seconds a step, measured" in text and "-250 ms (-50.0%)" in text
    assert "tokens/s, measured" in text and "+200 (+100.0%)" in text
    assert "loss at the end" in text and "-0.5 (-20.0%)" in text
    prediction = write_record(tmp_path / "p.json", result_record("run", (EXACT,)))
    assert "only in head: measured memory, peak, bytes, calls, time, tokens; loss" in run_printing(
        "compare", prediction, head
    )


def test_documents_of_one_name_in_a_file_are_one_training(run_printing, tmp_path):
    prediction = json.loads(run_printing("predict", "zero3", "--json"))
    base = write_record(tmp_path / "base.json", prediction, verification())
    head = write_record(tmp_path / "head.json", prediction, verification(holds=False))
    text = run_printing("compare", base, head, "--fail-on", "peak=0,verdict", code=1)
    row = next(line for line in text.splitlines() if line.startswith("verdict: "))
    assert row.split("  ")[-1] == "holds → fails" and "holds (1 of 1)" in row
    assert "head: root cause: gradients · axis dp_shard · x 2 · blocks.0" in text
    assert "\nexceeded: zero3: trains like one device: fails (0 of 1)\n" in text


def test_two_records_of_a_kind_with_one_name_stay_two():
    assert [*read_trainings([run_record(), run_record(loss=1.0)], "x")] == ["run", "run (2)"]
    assert [*read_trainings([run_record(), verification("run")], "x")] == ["run"]
    three = [run_record(), verification("run"), run_record(loss=1.0)]
    assert [*read_trainings(three, "x")] == ["run", "run (2)"]


def test_lists_are_paired_by_name_and_unpaired_entries_named(run_printing, tmp_path):
    base = write_record(tmp_path / "base.json", [run_record(name=name) for name in ("a", "b")])
    head = write_record(tmp_path / "head.json", [run_record(name=name) for name in ("b", "c", "d")])
    text = run_printing("compare", base, head)
    assert "\nonly base has 1 record of a\nonly head has 2 records of c, d\n" in text
    failing = run_printing("compare", base, head, "--fail-on", "peak=0", code=1)
    assert "exceeded: a: HEAD has no record of it" in failing


def test_a_row_of_one_side_alone_is_marked():
    base = run_with_row((FigureKind.CALLS, {"all_gather": 3, "send": 1}))
    head = run_with_row((FigureKind.CALLS, {"all_gather": 3, "broadcast": 2}))
    comparison = compare_records({"a": base}, {"a": head}, names=("x", "y"))
    rows = {row.name: (row.base, row.head, row.is_equal) for row in comparison.trainings[0].figures}
    assert rows == {
        "all_gather": (3, 3, True),
        "send": (1, None, False),
        "broadcast": (None, 2, False),
    }


def test_calls_of_several_phases_are_one_row_and_the_largest_rank_counts():
    its = read_trainings([result_record("x", (EXACT,))], "x")["x"].groups
    assert its[FigureGroup(FigureKind.CALLS, "predicted")] == {"all_gather over dp_shard, calls": 3}
    assert its[FigureGroup(FigureKind.BYTES, "predicted")] == {
        f"{KEY.collective} over dp_shard, bytes": 150
    }
    assert its[FigureGroup(FigureKind.MEMORY, "predicted")]["optimizer"] == 101  # of rank 1


def test_states_on_other_tiers_have_separate_rows():
    row = Footprint(state=State.OPTIMIZER, rank=0, device_bytes=0, host_bytes=7, file_bytes=9)
    its = read_trainings([result_record("x", (replace(EXACT, memory=(row,)),))], "x")["x"].groups
    assert its[FigureGroup(FigureKind.MEMORY, "predicted")] == {
        "optimizer on the host": 7,
        "optimizer in files": 9,
    }


@pytest.mark.parametrize(
    ("before", "after", "text", "is_beyond"),
    [
        (100, 101, "peak=1%", False),
        (100, 102, "peak=1%", True),
        (100, 101, "peak=0", True),
        (100, 100, "peak=0%", False),
        (100, 99, "peak=0", False),
        (None, 1, "peak=50%", True),
        (1, None, "peak=0", False),
        (100, math.nan, "peak=50%", True),
    ],
)
def test_a_limit_is_a_share_of_base_that_head_may_be_above_it(before, after, text, is_beyond):
    sides = [
        run_with_row((FigureKind.PEAK, {"other": 1} | ({} if size is None else {"peak": size})))
        for size in (before, after)
    ]
    assert bool(failures(sides[:1], sides[1:], text)) is is_beyond


@pytest.mark.parametrize(("base", "head", "number"), [(5, None, 1), (None, 5, 0)])
def test_a_figure_missing_in_head_exceeds_any_limit(base, head, number):
    sides = [run_with_row((FigureKind.MEMORY, {"activations": value})) for value in (base, head)]
    assert len(failures(sides[:1], sides[1:], "memory=1%")) == number


def test_activations_that_a_record_leaves_out_are_unknown_and_not_nothing():
    its = json.loads(json.dumps(result_record("x", (EXACT,))))
    its["memory"] = [row for row in its["memory"] if row["state"] not in ("activations",)]
    its["undefined"] = {"exact": {"activations": "why"}}
    figures = read_trainings([its], "x")["x"].groups[FigureGroup(FigureKind.MEMORY, "predicted")]
    assert figures["activations"] is None


def test_a_limit_on_a_figure_missing_on_one_side_fails():
    base = run_with_row((FigureKind.CALLS, {"send": 1}), (FigureKind.PEAK, {"peak": 1}))
    head = run_with_row((FigureKind.CALLS, {"send": 1}))
    assert failures([base], [head], "peak=1%") == [
        "a: peak: the two sides have no such figure in common"
    ]


@pytest.mark.parametrize(
    ("words", "finding", "remedy"),
    [
        ([], "takes two records, BASE and HEAD; got 0", "Name two"),
        (["zero3"], "takes two records, BASE and HEAD; got 1", "Name two"),
        (["zero3", "zero2", "ddp"], "got 3", "Name two"),
        (["zero3", "gone.json"], "gone.json: no such file", "a JSON file that a command printed"),
        (["zero3", "nospec"], "there is no spec named 'nospec'", "ptrain specs"),
        (["zero3", "{folder}"], "so it is not a finished run", "Name a run folder"),
        (["zero3", "{text}"], "is not JSON: ", "--json"),
        (["zero3", "{empty}"], "holds no record", "Use a record that a command printed"),
        (["zero3", "{number}"], "a record is a mapping; here is 3", "predict, validate"),
        (["zero3", "{other}"], "it lacks spec, world_size, memory", "predict, validate"),
        (["zero3", "{damaged}"], "it is damaged: ", "predict, validate"),
        (["zero3", "{worded}"], "it is damaged: TypeError loss at the end is 'low'", "predict"),
        (["zero3", "{endless}"], "it is damaged: OverflowError ", "predict, validate"),
        (["zero3", "{digits}"], "is not JSON: ", "--json"),
        (["zero3", "{deep}"], "is not JSON: ", "--json"),
        (["zero3", "{bytes}"], "cannot be read: ", "Name a run folder"),
        (["zero3", "{error}"], "was refused: no such key", "repeat the command"),
        (["zero3", "{refused}"], "b was refused there: why", "Remove this point"),
        (["zero3", "{verification}"], "no figure in common", "compare two predictions"),
        (
            ["{verification}", "{verification}", "a.b=3"],
            "neither BASE nor HEAD is a spec",
            "Remove it",
        ),
        (
            ["zero3", "zero2", "--markdown", "--json"],
            "cannot be combined with --json",
            "Remove one of them",
        ),
        (["zero3", "zero2", "--fail-on", "speed=1%"], "'speed=1%' is not a figure", "peak=1%"),
        (["zero3", "zero2", "--fail-on", "peak=3"], "is not a limit for peak", "peak=1%"),
        (["zero3", "zero2", "--fail-on", "peak=-1%"], "is not a limit for peak", "peak=1%"),
        (["zero3", "zero2", "--fail-on", "peak"], "is not a limit for peak", "peak=1%"),
        (["zero3", "zero2", "--fail-on", "peak=nan%"], "is not a limit for peak", "peak=1%"),
        (["zero3", "zero2", "--fail-on", ","], "no figure is named", "verdict"),
        (["zero3", "zero2", "--fail-on", "loss=1%"], "loss: neither BASE nor HEAD", "Remove"),
        (["zero3", "zero2", "--fail-on", "verdict"], "verdict: neither BASE nor HEAD", "Remove it"),
    ],
)
def test_records_that_cannot_be_compared_give_one_message(
    words, finding, remedy, run_printing, tmp_path
):
    files = {
        "text": "spec: zero3",
        "empty": "[]",
        "number": "3",
        "other": "{}",
        "damaged": json.dumps(run_record() | {"memory": [{"state": 1}]}),
        "worded": json.dumps(run_record() | {"run": {"loss": "low"}}),
        "endless": json.dumps(run_record() | {"run": {"loss": 10**400}}),
        "digits": "1" * 5000,
        "deep": "[" * 100_000,
        "error": json.dumps({"error": "no such key", "exit_code": 2, "faults": []}),
        "refused": json.dumps([{"spec": "b", "refused": "why", "faults": []}]),
        "verification": json.dumps(verification()),
    }
    (tmp_path / "folder").mkdir()
    places = {"folder": tmp_path / "folder"}
    for name, text in files.items():
        places[name] = tmp_path / f"{name}.json"
        places[name].write_text(text)
    places["bytes"] = tmp_path / "bytes.json"
    places["bytes"].write_bytes(b"\xff\xfe\x00")
    message = run_printing("compare", *(word.format(**places) for word in words), code=2)
    assert finding in message and remedy in message
    assert message.count("error:") == 1 and "Traceback" not in message


def test_markdown_is_a_table_in_which_names_are_text(run_printing, tmp_path):
    odd = run_record(name="a|b<i>", loss=2.0)
    base, head = (
        write_record(tmp_path / "b.json", odd),
        write_record(tmp_path / "h.json", run_record()),
    )
    lines = run_printing("compare", base, head, "--markdown").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == r"| a\|b\<i\> → run | base | head | difference |"
    assert table[1] == "| --- | ---: | ---: | ---: |"
    assert table[2] == "| loss at the end | 2 | 2.5 | +0.5 (+25.0%) |"
    assert lines[0].startswith("### ")


def test_the_record_has_equal_rows_and_non_numbers_as_words(run_printing, tmp_path):
    base = write_record(tmp_path / "b.json", run_record())
    head = write_record(tmp_path / "h.json", run_record(loss=math.nan))
    result = json.loads(
        run_printing("compare", base, head, "--json", "--fail-on", "loss=1%", code=1)
    )
    (training,) = result["trainings"]
    by_name = {row["name"]: row for row in training["figures"]}
    assert by_name["loss at the end"]["head"] == "nan"
    assert by_name["parameters"]["difference"] == 0
    assert result["exceeded"] == ["run: loss at the end grew by more than 1%"]


@pytest.mark.parametrize("column", [Column.EXACT, Column.MEASURED])
def test_each_side_is_compared_with_its_like(column):
    source = "predicted" if column is Column.EXACT else "measured"
    groups = read_trainings([run_record()], "x")["run"].groups
    assert {group.kind for group in groups if group.source == source} >= {
        FigureKind.MEMORY,
        FigureKind.PEAK,
        FigureKind.BYTES,
        FigureKind.CALLS,
    }
