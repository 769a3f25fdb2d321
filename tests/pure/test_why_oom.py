"""`ptrain why-oom` answers from the record of a rank that ran out of memory."""

from __future__ import annotations

import json

import pytest

from ptrain.cli.main import main
from ptrain.codec import encode
from ptrain.cost import Phase, State
from ptrain.report.memory_failure import MemoryFailure
from tests.pure.run_folders import open_folder

FAILURE = MemoryFailure(
    rank=1,
    error="CUDA out of memory. Tried to allocate 2.00 GiB.",
    step=7,
    phase=Phase.BACKWARD,
    micro_batch=2,
    requested_bytes=2 * 2**30,
    live={State.PARAMETERS: 2**20, State.OPTIMIZER: 2**21},
    allocated_bytes=2**24,
    device_memory=315 * 2**20,  # less the reserve of 300 MiB
)


@pytest.fixture
def run(tmp_path):
    claim = open_folder(tmp_path / "run")
    file = claim.folder.memory_failure(1)
    file.write_text(json.dumps(encode(FAILURE)))
    claim.lock.release()
    return claim.folder.path


def test_the_answer_comes_first_then_live_bytes_and_changes_that_fit_this_device(run, capsys):
    assert main(["why-oom", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Rank 1 ran out of memory in the backward pass of micro-batch 3 of step 7, which requested "
        "2 GiB."
    )
    rows = {line.split("  ")[0]: line.split() for line in lines}
    # all but the other states: 16 - 1 - 2 MiB
    assert rows["activations"][1:3] == ["13", "MiB"]
    assert rows["parameters"][1:3] == ["1", "MiB"] and len(rows["parameters"]) == 5
    assert "of 15 MiB" in next(
        line for line in lines if line.startswith("Prediction: Does not fit")
    )
    assert lines[-1].startswith("Next: ptrain predict ")


def test_the_record_has_the_same_answer_and_the_changes(run, capsys):
    assert main(["why-oom", str(run), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["answer"] == FAILURE.sentence() and record["failures"] == [encode(FAILURE)]
    assert record["changes"] and all(record["changes"])


def test_the_report_of_the_run_has_the_sentence(run, tmp_path, capsys):
    failure = {
        "time": "2026-01-01T00:00:00",
        "error": "error: rank 1 raised OutOfMemoryError: out of memory",
    }
    (run / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert FAILURE.sentence() in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "finding"), [("", "no record of a rank"), ("{", "is damaged"), ("{}", "is damaged")]
)
def test_a_run_without_a_sound_record_is_reported(run, text, finding, capsys):
    file = run / "logs" / "rank1.memory.json"
    file.write_text(text)
    if not text:
        file.unlink()
    assert main(["why-oom", str(run)]) == 2
    assert finding in capsys.readouterr().err
