"""A rejected training leaves no files and names a fix."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from tempfile import gettempdir

import pytest

from ptrain.cli import validate
from ptrain.cli.main import main
from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.spec import spec
from ptrain.spec.load import load
from ptrain.spec.spec import require_file_tier, unusable_folder_error
from ptrain.train import folder, manifest
from ptrain.train.folder import RunFolder, mark_as_latest, resume_candidates
from tests.pure.run_folders import open_folder, write_run

SPEC_WITH_PROFILE = """\
name: profiled
model: {preset: llama-tiny}
mesh: {dp_shard: 2}
placement: zero3
batch: {global: 16, micro: 2, sequence: 128}
profile: [6]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("model", ["hf: LlamaForCausalLM", "preset: llama-tiny"])
def test_only_a_class_of_transformers_needs_transformers(model, installed, monkeypatch):
    there = {"transformers"} if installed else set()
    monkeypatch.setattr(spec, "find_spec", lambda name: name if name in there else None)
    shape = load("zero3", [f"model={{{model}}}"]).spec.model
    if installed or "preset" in model:
        spec.require_transformers(shape)
        return
    with pytest.raises(SpecError) as caught:
        spec.require_transformers(shape)
    assert caught.value.faults == (
        Fault(
            place="model.hf",
            finding="LlamaForCausalLM is a class of Transformers, which is not installed",
            remedy="Run `pip install 'transformers>=4.56,<6'`.",
        ),
    )


@pytest.mark.parametrize(
    ("folder", "error", "finding"),
    [
        ("missing", FileNotFoundError(2, "No such file"), "no such folder"),
        ("file", NotADirectoryError(20, "Not a directory"), "is not a folder"),
        ("", FileNotFoundError(2, "No such file"), "is not writable"),
        ("", PermissionError(13, "Permission denied"), "is not writable: Permission denied"),
        ("", RuntimeError("no room"), "is not writable: no room"),
    ],
)
def test_an_unwritable_folder_is_rejected_with_a_reason(folder, error, finding, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / folder
    (fault,) = unusable_folder_error(str(path), error).faults
    assert (fault.place, fault.finding) == ("offload.path", f"{path}: {finding}")
    remedy = "Use an existing, writable folder with enough space for the file tier."
    assert fault.remedy == remedy


def test_without_a_folder_files_go_to_the_systems_temporary_one():
    (fault,) = unusable_folder_error(None, PermissionError(13, "Permission denied")).faults
    assert fault.finding.startswith(f"{gettempdir()}: ")


@pytest.mark.parametrize("placement", ["S*,S@file,S,R", "S*,S,S,O", "S*,S,S,R"])
def test_only_states_in_files_need_their_folder(placement, tmp_path):
    overrides = [f"placement.dp_shard={placement}", f"offload={{path: {tmp_path / 'none'}}}"]
    spec = load("zero3", overrides).spec
    if "file" not in placement:
        require_file_tier(spec)
        return
    with pytest.raises(SpecError, match="no such folder"):
        require_file_tier(spec)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message with which `ptrain train` rejects a run; it has made no run folder."""
    before = tree(Path())
    assert main(["train", *arguments]) == 2
    assert tree(Path()) == before
    told = capsys.readouterr().err
    assert "error: " in told
    assert told.count("\n  remedy: ") == 1
    return told


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Return every path below `root` with its content."""
    return {
        str(path): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
    }


# -- the folder of a run that is refused


def test_latest_is_a_run_that_began_to_train(here):
    first = open_folder().folder
    assert not (here / "runs" / "latest").is_symlink()
    mark_as_latest(first)
    assert os.readlink(here / "runs" / "latest") == first.path.name


def test_a_run_that_is_rejected_leaves_no_folder_and_latest_alone(here):
    mark_as_latest(open_folder().folder)
    before = tree(here)
    refused = open_folder()
    (refused.folder.path / "logs" / "rank0.error.json").write_text("{}")
    refused.folder.metrics.touch()
    mark_as_latest(refused.folder)
    refused.withdraw()
    assert tree(here) == before


def test_the_first_run_of_all_leaves_no_runs_either(here):
    open_folder().withdraw()
    assert not any(here.iterdir())


def test_a_given_folder_is_left_as_it_was(here):
    (here / "empty").mkdir()
    for given in ("empty", "new/deep"):
        open_folder(Path(given)).withdraw()
    assert [path.name for path in here.rglob("*")] == ["empty"]


def test_a_run_that_is_continued_in_its_folder_keeps_its_summary_and_its_spec(here):
    claim = open_folder(here / "run")
    claim.lock.release()
    run = claim.folder
    run.summary.write_text("{}")
    run.metrics.write_text("{}\n")
    run.log(0).write_text("one\n")
    (run.path / "spec.resolved.yaml").write_text("name: before\n")
    before = tree(here)
    again = open_folder(run.path, resuming=True)
    assert tree(here) != before
    again.folder.error(0).write_text("{}")
    again.withdraw()
    assert tree(here) == before


def test_a_run_that_did_a_step_is_kept_whatever_ends_it(here):
    claim = open_folder()
    claim.folder.metrics.write_text('{"step": 1}\n')
    claim.withdraw()
    assert (claim.folder.path / "spec.resolved.yaml").exists()


def test_an_invalid_run_folder_is_rejected_with_its_kind(here, capsys):
    (here / "file").touch()
    (here / "used").mkdir()
    (here / "used" / "a").touch()
    (here / "link").symlink_to(here / "used")
    for name, finding in (
        ("file", "is a file"),
        ("used", "is not empty"),
        ("link", "is a symbolic link"),
    ):
        assert f"error: --run-dir {name}: {finding}" in refusal(capsys, "--run-dir", name)
    assert "is not writable" in refusal(capsys, "--run-dir", "file/run")


# -- --resume


@pytest.mark.parametrize(
    ("asked", "finding"),
    [
        ("", "error: --resume: the path is empty"),
        ("nowhere", "error: --resume nowhere: no such folder"),
        ("file", "error: --resume file: is a file, not a folder"),
        ("empty", "error: --resume empty: contains no checkpoint"),
    ],
)
def test_an_invalid_checkpoint_is_rejected_with_its_kind(here, capsys, asked, finding):
    (here / "file").touch()
    (here / "empty").mkdir()
    assert finding in refusal(capsys, "zero3", "--resume", asked)


@pytest.mark.parametrize("asked", ["runs/a", "runs/latest", "runs/a/checkpoints/step-00000004"])
def test_a_training_that_is_done_is_rejected_before_a_folder_is_made(here, capsys, asked):
    write_run(here / "runs" / "a", 2, 4)
    (here / "runs" / "latest").symlink_to("a")
    told = refusal(capsys, "zero3", "train.steps=4", "--resume", asked)
    assert "already at step 4 of 4\n  remedy: Set `train.steps` to more than 4" in told


def test_another_model_is_rejected_before_a_folder_is_made(here, capsys):
    write_run(here / "runs" / "a", 4, model={"hidden": 7})
    told = refusal(capsys, "zero3", "--resume", "runs/a")
    assert "checkpoint runs/a/checkpoints/step-00000004: error: model: " in told
    assert "hidden: 7" in told


def test_a_damaged_checkpoint_is_reported_once_as_damaged(here, capsys):
    (path,) = write_run(here / "runs" / "a", 4)
    (path / "__0_0.distcp").write_bytes(bytes(10))
    told = refusal(capsys, "zero3", "--resume", "runs/a")
    assert told.count("__0_0.distcp: has 10 bytes, but 64 were written") == 1
    assert "its only checkpoint cannot be used" in told
    assert "checkpoint.every" not in told
    write_run(here / "runs" / "a", 8)
    (here / "runs/a/checkpoints/step-00000008" / manifest.NAME).write_text("{")
    told = refusal(capsys, "zero3", "--resume", "runs/a")
    assert "none of its 2 checkpoints can be used" in told
    assert "step-00000008" in told and "step-00000004" in told


def test_an_older_valid_checkpoint_is_used(here, capsys):
    _, newer = write_run(here / "runs" / "a", 4, 8)
    (newer / "__0_0.distcp").unlink()
    assert "already at step 4 of 3" in refusal(capsys, "train.steps=3", "--resume", "runs/a")


def test_auto_resumes_only_the_run_of_its_folder(here, capsys):
    write_run(here / "runs" / "20260101-000000-zero3", 4)
    assert resume_candidates("auto", RunFolder(here / "runs" / "20260102-000000-zero3")) == []
    told = refusal(capsys, "zero3", "train.steps=4", "--resume", "auto")
    assert "error: --resume auto: auto continues the run in --run-dir" in told
    run = "runs/20260101-000000-zero3"
    told = refusal(capsys, "zero3", "train.steps=4", "--resume", "auto", "--run-dir", run)
    assert "error: --resume auto: already at step 4 of 4" in told


# -- two trainings in one folder


def test_a_second_training_in_a_run_folder_is_rejected_with_the_process_of_the_first(here, capsys):
    claim = open_folder(here / "run")
    for resuming in ([], ["--resume", "auto"]):
        text = refusal(capsys, "zero3", "--run-dir", "run", *resuming)
        assert f"another training uses this folder: process {os.getpid()} on " in text
    claim.lock.release()
    claim.lock.release()
    open_folder(here / "run", resuming=True).withdraw()
    assert not (here / "run" / folder.LOCK_NAME).exists()


# -- the file tier, options


def test_a_folder_that_takes_no_files_is_rejected_before_a_rank_starts(here, capsys):
    (here / "file").touch()
    for path, finding in (
        ("/proc", "is not writable"),
        ("nowhere", "no such folder"),
        ("file", "is not a folder"),
    ):
        told = refusal(capsys, "nvme-offload", f"offload.path={path}")
        assert f"error: offload.path: {path}: {finding}" in told


def test_two_specs_are_rejected_with_both(here, capsys):
    assert "expected one SPEC; got zero3 and ddp" in refusal(capsys, "zero3", "ddp")


# -- validate


class TrainingStarted(PtrainError):
    """A training would start."""


def test_a_run_that_was_profiled_late_is_validated_without_its_profile(here, monkeypatch):
    def train(*_: object, **__: object) -> None:
        raise TrainingStarted

    monkeypatch.setattr(validate, "train", train)
    (here / "spec.yaml").write_text(SPEC_WITH_PROFILE)
    with pytest.raises(TrainingStarted):
        validate.run(Namespace(arguments=["spec.yaml"], json=False, allow_import=False))
    assert main(["validate", "spec.yaml", "profile=[6]"]) == 2


@pytest.mark.parametrize("steps", [1, 2])
def test_a_verdict_needs_three_steps(here, capsys, steps):
    assert main(["validate", "ddp", "zero3", f"train.steps=4,{steps}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: train.steps: validate measures the third step")
    assert told.err.endswith("\n  remedy: Use `train.steps=3` or more, or remove it.\n")
