"""`ptrain verify` before any rank starts: options, rejections, and messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.cli import verify
from ptrain.cli.main import main
from ptrain.errors import RankFailed
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.report.record import Check
from ptrain.report.verification import as_record, end_text, stage_text
from ptrain.spec.load import load
from ptrain.testing import assert_verified
from ptrain.verification import options
from ptrain.verification.options import VerifyOptions, parse_options, spec_source, to_argv

ROOT = Path(__file__).parents[2]

GOOD = Check(name="loss of every step", predicted=0.0, measured=2e-16, tolerance=1e-12, holds=True)
BAD = Check(
    name="gradients", predicted=0.0, measured=1.0, tolerance=1e-9, holds=False, why="differs at a.w"
)
COUNTED = Check(name="step counters", predicted=78, measured=78, tolerance=0.0, holds=True)
ALIVE = Check(name="run: learns", predicted=None, measured=1.5, tolerance=0.0, holds=True)
CULPRIT = RootCause(
    state=Subject.GRADIENTS,
    axis="dp_shard",
    factor="× 2",
    place="a.w",
    step=1,
    ranks=(0, 1),
    sentence="Twice.",
    fix="Sum them once.",
)


def test_the_parent_of_a_verification_imports_no_torch():
    code = "import sys, ptrain.cli.verify; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-spec"], "there is no spec named"),
        (["zero3", "--steps", "2"], r"--steps: a trajectory needs at least 3 steps; got 2"),
        (["zero3", "mesh.dp_shard=3"], "is not a multiple of micro=2 x data degree=3"),
        (["70b-zero3"], "8 references in fp64, one for each rank, need 20.37 TiB of memory"),
        (["zero3", "model={target: tests.models_external:necks}"], "Add `--allow-import`"),
    ],
    ids=" ".join,
)
def test_wrong_input_ends_with_one_message_and_2_and_leaves_nothing(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["verify", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert re.search(message, captured.err), captured.err
    assert not list(tmp_path.iterdir())


def test_every_option_of_a_rank_survives_the_way_to_it(tmp_path):
    asked = VerifyOptions(
        spec="ddp",
        overrides=("train.seed=3",),
        steps=7,
        every_collective=True,
        verbose=True,
        json=True,
        allow_import=True,
        folder=tmp_path,
    )
    assert parse_options(to_argv(asked)) == asked
    assert parse_options([]).steps == options.STEPS


def test_under_torchrun_one_spec_is_verified():
    with pytest.raises(Exception, match="verify one SPEC"):
        parse_options(["ddp", "zero1"])


def test_a_run_folder_verifies_its_spec(tmp_path):
    resolved = tmp_path / "spec.resolved.yaml"
    assert spec_source(str(tmp_path)) == str(tmp_path)  # refused as any folder is
    resolved.write_text("name: mine\n")
    assert spec_source(str(tmp_path)) == str(resolved)
    assert spec_source("zero3") == "zero3"


def test_a_name_of_a_spec_is_that_spec_whatever_folder_lies_there(tmp_path, monkeypatch):
    (tmp_path / "zero3").mkdir()
    (tmp_path / "zero3" / "spec.resolved.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert spec_source("zero3") == "zero3"


# -- what is started


@pytest.fixture
def launched_specs(monkeypatch):
    """Return the launched specs; their ranks leave a record, in which the first fails."""
    found = []

    def launch(argv, *, num_ranks, folder, parts, module):
        asked = parse_options(argv)
        found.append((asked, num_ranks, module, load(asked.spec).spec))
        checks = (GOOD,) if len(found) > 1 else (GOOD, BAD)
        record = as_record(found[-1][3].name, checks, root_cause=None)
        folder.summary.write_text(json.dumps(record))
        return 0 if len(found) > 1 else 1

    monkeypatch.setattr(verify, "launch_ranks", launch)
    return found


def test_several_specs_and_lists_are_verified_one_after_the_other(launched_specs, capsys):
    assert main(["verify", "zero3", "zero1", "mesh.dp_shard=2,4", "--json", "--steps", "9"]) == 1
    assert [(ranks, spec.name) for _, ranks, _, spec in launched_specs] == [
        (2, "zero3"),
        (4, "zero3"),
        (2, "zero1"),
        (4, "zero1"),
    ]
    assert {asked.steps for asked, *_ in launched_specs} == {9}
    assert {module for _, _, module, _ in launched_specs} == {"ptrain.verification"}
    records = json.loads(capsys.readouterr().out)
    assert [record["verdict"] for record in records] == ["fails", "holds", "holds", "holds"]


def test_an_interrupted_command_ends_like_its_ranks_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "launch_ranks", lambda *_, **__: 130)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["verify", "zero3"]) == 130
    assert not list(tmp_path.iterdir())


def test_the_logs_of_a_rank_that_failed_stay(tmp_path, monkeypatch, capsys):
    def launch(*_, **__):
        raise RankFailed("error: rank 1 was killed by SIGKILL")

    monkeypatch.setattr(verify, "launch_ranks", launch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["verify", "zero3"]) == 3
    assert "rank 1 was killed" in capsys.readouterr().err
    assert len(list(tmp_path.glob("*/0/logs"))) == 1


# -- what is said


def test_the_record_extends_the_result_record():
    mismatch = Mismatch(
        step=1, moment=Moment.GRADIENTS, subject=Subject.GRADIENTS, name="a.w", rank=0
    )
    found = as_record(
        "zero3", (GOOD, BAD), root_cause=CULPRIT, mismatches=[mismatch] * 50, world_size=2, notes=[]
    )
    assert {"spec", "versions", "memory", "traffic", "checks", "verdict"} <= found.keys()
    assert (found["verdict"], found["world_size"]) == ("fails", 2)
    again = json.loads(json.dumps(found))
    assert again["culprit"]["factor"] == "× 2"
    assert len(again["departures"]) < again["num_departures"] == 50


def test_a_stage_is_a_line_and_one_for_each_check_that_fails_or_all_of_them():
    checks = (GOOD, BAD, COUNTED, ALIVE)
    lines = stage_text("examination", checks, 1.25, verbose=True).splitlines()
    assert lines[0].split() == ["examination", "3", "of", "4", "hold", "1.2", "s"]
    assert stage_text("examination", checks, 1.25).splitlines() == [lines[0], lines[2]]
    assert max(map(len, lines[:2])) <= 80
    assert len(lines) == 5
    assert lines[1].split() == ["loss", "of", "every", "step", "2e-16", "<=", "1e-12"]
    assert lines[2].endswith("fails: differs at a.w")
    assert lines[3].split()[-3:] == ["78", "of", "78"]
    assert lines[4].endswith("1 hold")


def test_the_verdict_is_last_and_names_the_root_cause():
    text = end_text((GOOD, BAD), torch="2.13.0", root_cause=CULPRIT, notes=("no dropout",))
    assert text.splitlines()[:2] == ["note: no dropout", "verdict: fails (1 of 2)"]
    assert "root cause: gradients · axis dp_shard · × 2 · a.w · step 1 · ranks 0, 1" in text
    assert text.endswith("\n  fix: Sum them once.\n  fits: the fix was not tried")
    held = end_text((GOOD,), torch="2.13.0", root_cause=None, notes=())
    assert held == "verdict: holds (1 of 1)"


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, ["--steps", "20"]), ({"steps": 5}, ["--steps", "5"]), ({"quick": True}, ["--quick"])],
)
def test_a_test_verifies_with_its_number_of_steps_or_without_trajectories(
    options, words, monkeypatch
):
    def ended(command, timeout, what):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    commands = []
    monkeypatch.setattr("ptrain.testing._run_python", ended)
    assert_verified("zero3", "mesh.dp_shard=2", **options)
    assert commands == [["-m", "ptrain", "verify", "zero3", "mesh.dp_shard=2", *words]]
