"""The command `ptrain checkpoints` lists what is in a run, and verifies it on request."""

from __future__ import annotations

import json

import pytest

from ptrain.cli.main import main
from ptrain.train import manifest
from tests.pure.run_folders import write_run


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, 2, 4, 6)
    (folder / "spec.resolved.yaml").touch()
    return folder


def listed(capsys, *words) -> tuple[int, list[dict[str, object]]]:
    code = main(["checkpoints", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)["checkpoints"]


def test_sizes_are_those_of_the_files_newest_first(run, capsys):
    code, rows = listed(capsys, run)
    assert (code, [row["step"] for row in rows]) == (0, [6, 4, 2])
    for row in rows:
        paths = list((run / "checkpoints" / manifest.folder_name(row["step"])).iterdir())
        assert row["bytes"] == sum(path.stat().st_size for path in paths)
        assert (row["files"], row["state"], row["fault"]) == (len(paths), "complete", "")


def test_a_changed_file_of_equal_size_is_found_by_verifying(run, capsys):
    file = run / "checkpoints" / manifest.folder_name(4) / "__0_0.distcp"
    file.write_bytes(bytes(63) + b"x")
    assert {row["state"] for row in listed(capsys, run)[1]} == {"complete"}
    code, rows = listed(capsys, run, "--verify")
    assert (code, [row["state"] for row in rows]) == (1, ["sound", "damaged", "sound"])
    assert rows[1]["fault"] == "__0_0.distcp: its content was modified (SHA-256)"


def test_the_screen_names_faults_leftovers_and_the_command_that_continues(run, capsys):
    folder = run / "checkpoints"
    (folder / manifest.folder_name(6) / manifest.NAME).unlink()
    (folder / "step-00000008.tmp-12ab").mkdir()
    assert main(["checkpoints", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step 6: manifest.json is not readable" in text and "–" in text
    assert "unfinished saves or removals: step-00000008.tmp-12ab" in text
    assert f"Next: ptrain train {run}/spec.resolved.yaml --resume {run}" in text
    (run / "summary.json").touch()
    main(["checkpoints", str(run)])
    assert "Next:" not in capsys.readouterr().out


def test_a_folder_without_a_run_or_without_checkpoints_is_reported(run, tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "is not a run folder: it has no spec.resolved.yaml" in capsys.readouterr().err
    (run / "checkpoints").rename(run / "moved")
    assert main(["checkpoints", str(run)]) == 0
    assert capsys.readouterr().out == f"{run} has no checkpoint.\n"
