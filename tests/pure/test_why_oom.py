"""`ptrain why-oom`: the answer about a run that ran out of memory, from its record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from ptrain.cli.main import main
from ptrain.report.out_of_memory import is_out_of_memory, parse_request
from ptrain.spec.load import load

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "5a419e96" / "zero3"
MIB = 2**20
RECORD = {
    "rank": 1,
    "time": 20.0,
    "message": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB",
    "requested_bytes": 2 * MIB,
    "step": 3,
    "phase": "backward",
    "micro_batch": 2,
    "module": "blocks.1.mlp",
    "live_bytes": {"parameters": 3 * MIB, "activations": 7 * MIB},
}


def make_run(tmp_path: Path, *records: dict[str, object], failure: str = "") -> str:
    """Return a run with these records of failed allocations."""
    folder = tmp_path / "run"
    shutil.copytree(OLD_RUN, folder, ignore=shutil.ignore_patterns("summary.json"))
    spec = yaml.safe_dump(dict(load("zero3").spec.resolved))
    (folder / "spec.resolved.yaml").write_text(spec, encoding="utf-8")
    (folder / "logs").mkdir(exist_ok=True)
    for record in records:
        file = folder / "logs" / f"rank{record['rank']}.memory.json"
        file.write_text(json.dumps(record), encoding="utf-8")
    if failure:
        row = {"time": "2026-11-30 12:00:00", "error": failure}
        (folder / "failures.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return str(folder)


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["why-oom", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 2 * 2**30),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("MemoryError: ", None),
    ],
)
def test_the_messages_of_allocators_are_recognized_with_the_requested_bytes(message, size):
    assert is_out_of_memory(message)
    assert parse_request(message) == size


def test_other_errors_are_not_taken_for_missing_memory():
    assert not is_out_of_memory("RuntimeError: shape mismatch")


def test_the_answer_comes_first_then_live_bytes_with_the_prediction_and_changes(tmp_path, capsys):
    lines = explain(capsys, make_run(tmp_path, RECORD)).splitlines()
    assert lines[0] == (
        "Rank 1 ran out of memory in the backward pass of micro-batch 2, in blocks.1.mlp, "
        "in step 3."
    )
    assert lines[1] == "It requested 2 MiB."
    rows = {line.split("  ")[0]: line.split()[-4:] for line in lines}
    assert rows["parameters"] == ["3", "MiB", "1.535", "MiB"]
    assert rows["all in backward"][:2] == ["10", "MiB"]
    changes = lines.index(next(line for line in lines if line.startswith("changes that fit")))
    assert 1 <= sum("yes" in line for line in lines[changes:]) <= 3
    assert lines[-1].startswith("Next: ptrain train ")


def test_every_offered_change_has_a_smaller_predicted_peak_by_the_request(tmp_path, capsys):
    folder = make_run(tmp_path, RECORD)
    changes = json.loads(explain(capsys, folder, "--json"))["changes"]
    assert main(["predict", f"{folder}/spec.resolved.yaml", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["fit"]["peak_bytes"]
    assert changes
    for change in changes:
        spec = f"{folder}/spec.resolved.yaml"
        assert main(["predict", spec, *change["overrides"], "--json"]) == 0
        after = json.loads(capsys.readouterr().out)["fit"]["peak_bytes"]
        assert after == change["peak_bytes"] <= before - 2 * MIB


def test_the_first_of_several_ranks_is_explained(tmp_path, capsys):
    text = explain(capsys, make_run(tmp_path, RECORD | {"rank": 0, "time": 21.0}, RECORD))
    assert text.startswith("Rank 1 ran out of memory")
    assert "Later, rank 0 ran out of memory, too." in text


def test_unused_reserved_memory_is_named_as_fragmentation(tmp_path, capsys):
    record = RECORD | {"reserved_bytes": 30 * MIB, "free_bytes": MIB}
    text = explain(capsys, make_run(tmp_path, record))
    assert "20 MiB unused" in text and "expandable_segments:True" in text
    assert "1 MiB of the device were free" in text


def test_a_request_above_the_predicted_peak_has_no_change(tmp_path, capsys):
    record = RECORD | {"requested_bytes": 2**40}
    assert "No change is known" in explain(capsys, make_run(tmp_path, record))


def test_a_run_with_other_failures_or_none_is_rejected(tmp_path, capsys):
    folder = make_run(tmp_path, failure="error: rank 1 raised ValueError: no")
    assert main(["why-oom", folder]) == 2
    error = capsys.readouterr().err
    assert "did not run out of memory" in error and "ptrain report" in error


def test_a_killed_rank_may_have_met_the_memory_of_the_host(tmp_path, capsys):
    folder = make_run(tmp_path, failure="error: rank 1 was killed by SIGKILL (by a user)")
    assert main(["why-oom", folder]) == 2
    assert "the host's memory ran out" in capsys.readouterr().err


def test_a_damaged_record_is_named(tmp_path, capsys):
    folder = make_run(tmp_path, RECORD | {"phase": "lunch"})
    assert main(["why-oom", folder]) == 2
    assert "rank1.memory.json" in capsys.readouterr().err


def test_the_report_of_the_run_begins_with_the_same_answer(tmp_path):
    folder = make_run(tmp_path, RECORD, failure="error: rank 1 raised OutOfMemoryError: …")
    assert main(["report", folder, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    answer = page[page.index('class="headline"') : page.index("<h3>")]
    assert "Rank 1 ran out of memory in the backward pass of micro-batch 2" in answer
    assert "changes that fit" in answer
