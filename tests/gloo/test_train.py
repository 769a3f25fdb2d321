"""`ptrain train` as a user runs it: its output, its run folder, and resuming."""

from __future__ import annotations

import json
import math
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.spec.job import DataSpec
from ptrain.spec.load import load
from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS = 10
EXACT = "precision.compute=fp64"
OF_FOUR = "batch.global=8"  # two micro-batches of each of four ranks


@dataclass(frozen=True)
class Finished:
    folder: Path
    code: int
    job: jobs.Job


@dataclass(frozen=True)
class Continued:
    folder: Path
    output: str


def train(cwd: Path, spec: str, *more: str) -> tuple[int, jobs.Job]:
    return jobs.run_job(["train", spec, *jobs.TINY, *more], cwd=cwd, is_forked=True)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Train zero1 on two ranks in fp64, saved every four steps, profiled once, evaluated once."""
    cwd = tmp_path_factory.mktemp("training")
    code, job = train(
        cwd,
        "zero1",
        EXACT,
        OF_FOUR,
        f"train.steps={STEPS}",
        "checkpoint.every=4",
        "eval.every=5",
        "eval.batches=1",
        "profile=[4]",
    )
    assert code == 0, job.error
    return Finished(folder=cwd / "runs" / "latest", code=code, job=job)


@pytest.fixture(scope="module")
def continued_run(finished_run: Finished, ranks: Ranks) -> Continued:
    """Continue the run from step 8 as zero3 on four ranks, printing only the record."""
    folder = finished_run.folder.parents[1] / "continued"
    wanted = ("zero3", *jobs.TINY, EXACT, OF_FOUR, f"train.steps={STEPS + 2}", "mesh.dp_shard=4")
    saved = str(finished_run.folder / "checkpoints" / "step-00000008")
    first, *others = sessions.train_on_ranks(
        ranks, 4, *wanted, "--resume", saved, "--json", folder=folder
    )
    assert {end.code for end in (first, *others)} == {0}, first.error
    assert not any(end.output for end in others)
    return Continued(folder=folder, output=first.output)


def test_a_training_prints_the_plan_the_prediction_and_every_logged_step(finished_run):
    lines = finished_run.job.output.splitlines()
    assert lines[0].startswith("zero1 · ")
    assert "2 ranks gloo/cpu · batch 8 = 1 micro × 4 accumulated × 2 data" in lines[0]
    assert lines[1].startswith("preflight  peak ")
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == STEPS
    assert finished_run.job.error == ""


def test_a_training_ends_with_predicted_measured_and_a_verdict(finished_run):
    lines = finished_run.job.output.splitlines()
    assert any("predicted" in line and "measured" in line for line in lines)
    assert lines[-3].startswith("verdict: holds ") and lines[-3].endswith(" · runs/latest")
    assert lines[-1] == "Next: ptrain verify runs/latest"


def test_the_loss_falls(finished_run):
    found = jobs.losses(finished_run.folder)
    assert list(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1] - 0.3


def test_the_run_folder_has_the_files_to_repeat_and_read_the_run(finished_run):
    names = {path.name for path in finished_run.folder.iterdir()}
    assert names == {
        "spec.resolved.yaml",
        "env.json",
        "command.txt",
        "metrics.jsonl",
        "summary.json",
        "logs",
        "trace",
        "checkpoints",
    }
    digest = open_corpus(DataSpec()).digest()
    assert (
        f"corpus  python-docs, digest {digest}"
        in (finished_run.folder / "logs/rank0.log").read_text()
    )
    assert (finished_run.folder / "command.txt").read_text().startswith("ptrain train zero1 ")
    summary = json.loads((finished_run.folder / "summary.json").read_text())
    assert summary["spec"] == "zero1"
    assert summary["run"]["steps"] == STEPS
    assert math.isfinite(summary["run"]["held_out_loss"])
    assert {row["column"] for row in summary["memory"]} >= {"paper", "exact", "measured"}


def test_the_resolved_spec_is_the_spec_that_ran(finished_run):
    again = require_runnable(load(finished_run.folder / "spec.resolved.yaml"))
    assert again.train.steps == STEPS
    assert again.resolved == yaml.safe_load(
        (finished_run.folder / "spec.resolved.yaml").read_text()
    )


def test_the_environment_is_recorded_by_an_allow_list(finished_run):
    recorded = json.loads((finished_run.folder / "env.json").read_text())
    assert {"PATH", "HOME", "PYTHONPATH"}.isdisjoint(recorded["environment"])
    assert recorded["versions"]["torch"]


def test_a_run_folder_is_private_to_its_owner(finished_run):
    for path in (finished_run.folder.resolve(), *finished_run.folder.rglob("*")):
        allowed = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) & ~allowed == 0, path


def test_every_rank_has_a_log_and_a_trace_of_the_profiled_step(finished_run):
    assert {path.name for path in (finished_run.folder / "logs").iterdir()} == {
        "rank0.log",
        "rank1.log",
    }
    assert {path.name for path in (finished_run.folder / "trace").iterdir()} == {
        "rank0-step4.json.gz",
        "rank1-step4.json.gz",
    }


def test_checkpoints_are_complete_and_one_per_interval_and_at_the_end(finished_run):
    folders = sorted(path.name for path in (finished_run.folder / "checkpoints").iterdir())
    assert folders == ["step-00000004", "step-00000008", "step-00000010"]


def test_zero1_on_two_ranks_continues_as_zero3_on_four_with_equal_losses(
    finished_run, continued_run
):
    before, after = jobs.losses(finished_run.folder), jobs.losses(continued_run.folder)
    assert list(after) == [9, 10, 11, 12]
    for step in (9, 10):
        # fp64; only the order of sums differs between two and four ranks
        assert after[step] == pytest.approx(before[step], rel=1e-12)


def test_json_prints_only_the_record(continued_run):
    record = json.loads(continued_run.output)
    assert record["spec"] == "zero3"
    assert record["world_size"] == 4
    assert record == json.loads((continued_run.folder / "summary.json").read_text())


def test_a_loss_that_is_not_finite_stops_all_ranks_with_exit_4(ranks, tmp_path):
    diverging = ("optimizer.lr=1.0e+6", "optimizer.weight_decay=1000")  # p grows 1e8 times a step
    wanted = ("zero3", *jobs.TINY, *diverging, "train.steps=9")
    for end in sessions.train_on_ranks(ranks, 2, *wanted, folder=tmp_path / "run"):
        assert end.code == 4, end.error
        assert "the loss is nan" in end.error or "the loss is inf" in end.error
        assert "remedy" in end.error
        assert "Traceback" not in end.error


# By default a pipeline is interrupted (test_pipeline_faults.py).
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_ends_the_step_saves_and_leaves_no_process(tmp_path, number):
    arguments = ["train", "zero3", *jobs.TINY, "train.steps=1000000", "checkpoint.at_end=true"]
    with jobs.job(arguments, cwd=tmp_path, is_forked=True) as job:
        job.until("step 3/")
        ranks = job.ranks()
        job.process.send_signal(number)
        assert job.wait(60) == (130 if number is signal.SIGINT else 143)
        assert jobs.have_ended(list(ranks.values()))
    assert f"interrupted by {number.name}" in job.output
    again = "ptrain train runs/latest/spec.resolved.yaml --resume runs/latest"
    assert again in job.output
    saved = list((tmp_path / "runs" / "latest" / "checkpoints").iterdir())
    assert [path.name[:5] for path in saved] == ["step-"]


def train_in_existing_group(folder: str) -> tuple[int, bool]:
    """Train on ranks whose process group exists already."""
    words = ("zero3", *jobs.TINY, "train.steps=2", "--run-dir", folder, "--quiet")
    return sessions.train_on_rank(words).code, dist.is_initialized()


def test_a_process_group_that_exists_is_used_and_left_alone(ranks, tmp_path):
    assert ranks.run(2, train_in_existing_group, str(tmp_path / "run")) == [(0, True), (0, True)]
    assert len(jobs.losses(tmp_path / "run")) == 2


def test_a_users_model_trains_only_if_its_import_is_allowed(ranks, tmp_path):
    own = "{target: tests.models_external:necks, arguments: {hidden: 16}}"
    wanted = ("zero3", f"model={own}", *jobs.TINY[5:], "train.steps=4")
    code, job = jobs.run_job(["train", *wanted], cwd=tmp_path, is_forked=True)
    assert code == 2
    assert "--allow-import" in job.error
    assert not (tmp_path / "runs").exists()
    end = sessions.train_on_ranks(ranks, 2, *wanted, "--allow-import", folder=tmp_path / "run")[0]
    assert end.code == 0, end.error
    assert "verdict: holds" in end.output


def test_a_folder_that_cannot_be_written_is_rejected_before_a_rank_starts(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, job = train(tmp_path, "zero3", "--run-dir", str(blocked / "run"))
    assert code == 2
    assert "is not writable" in job.error and "remedy" in job.error
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_is_in_use_is_rejected(tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("")
    code, job = train(tmp_path, "zero3", "--run-dir", str(used))
    assert code == 2
    assert "not empty" in job.error
    assert [path.name for path in used.iterdir()] == ["metrics.jsonl"]


def test_a_spec_that_does_not_fit_is_rejected_before_a_rank_starts(tmp_path):
    asked = ["train", "zero3", "model.preset=llama3-8b"]
    code, job = jobs.run_job(asked, cwd=tmp_path, is_forked=True)
    assert code == 2
    assert "does not fit" in job.error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "module",
    ["ptrain", pytest.param("ptrain.train", marks=pytest.mark.nightly)],
    ids=["parent", "one rank alone"],
)
def test_a_spec_that_only_a_rank_can_reject_leaves_no_run_folder(tmp_path, module):
    asked = ["zero3", *jobs.TINY, "mesh.dp_shard=1", "data.path=none.npy"]
    verb = ["train"] if module == "ptrain" else []
    code, job = jobs.run_job([*verb, *asked], cwd=tmp_path, module=module, is_forked=True)
    assert code == 2
    assert job.error.startswith("error: data.path: none.npy: ")
    assert "\n  remedy: " in job.error
    assert not any(tmp_path.iterdir())
