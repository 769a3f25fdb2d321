"""A rank that dies or hangs in a step ends the job soon and is named, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import jobs
from tests.gloo import sessions

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc"),
]

FOREVER = (*jobs.TINY, "train.steps=1000000")
TORCHS = "torch.distributed.run"
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "ptrain.train", "zero3", *FOREVER)


def signal_rank(job: jobs.Job, rank: int, number: signal.Signals) -> tuple[int, float]:
    """Signal a rank during training; return the exit code of the job and the seconds until it
    ended."""
    job.until("step 3/")
    ranks = job.ranks()
    assert set(ranks) == {0, 1}
    began = time.monotonic()
    os.kill(ranks[rank], number)
    code = job.wait(90)
    seconds = time.monotonic() - began
    assert jobs.have_ended(list(ranks.values())), "a rank outlives its job"
    return code, seconds


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        # by default a stage of a pipeline is killed (test_pipeline_faults.py), and none is stopped
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_and_ends_the_job(tmp_path, rank, number):
    with jobs.job(["train", "zero3", *FOREVER], cwd=tmp_path) as job:
        code, seconds = signal_rank(job, rank, number)
    assert code == 3
    assert seconds < 30
    assert f"rank {rank} was " in job.error
    assert number.name in job.error
    assert "Traceback" not in job.error.split("last lines of")[0]


@pytest.mark.nightly
def test_a_rank_that_is_killed_under_torchrun_ends_the_job(tmp_path):
    with jobs.job(TORCHRUN, cwd=tmp_path, module="torch.distributed.run") as job:
        code, seconds = signal_rank(job, 1, signal.SIGKILL)
    assert code != 0
    assert seconds < 60


@pytest.mark.nightly
def test_a_rank_that_is_stopped_under_torchrun_ends_the_job(tmp_path):
    """Its peers notice after `timeout.step`; the agent then waits 30 seconds more."""
    arguments = [*TORCHRUN, "timeout.step=8"]
    with jobs.job(arguments, cwd=tmp_path, module="torch.distributed.run") as job:
        code, seconds = signal_rank(job, 1, signal.SIGSTOP)
    assert code != 0
    assert seconds < 60


SAVING = ("zero3", *jobs.TINY, "train.steps=30", "checkpoint.every=10")
AGENT = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "ptrain.train")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        # by default no rank is started again: one is killed (test_pipeline_faults.py), a run is
        # resumed (test_train.py)
        pytest.param(
            "ptrain", ("train", *SAVING, "--max-restarts", "1"), marks=pytest.mark.nightly
        ),
        pytest.param(
            "ptrain",
            ("train", *SAVING, "checkpoint.background=true", "--max-restarts", "1"),
            marks=pytest.mark.nightly,
        ),
        pytest.param("torch.distributed.run", (*AGENT, *SAVING), marks=pytest.mark.nightly),
        pytest.param(
            "torch.distributed.run",
            (*AGENT, *SAVING, "--run-dir", "run"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_killed_rank_restarts_from_the_last_checkpoint_and_loses_nothing(
    ranks, tmp_path, module, words
):
    with jobs.job(words, cwd=tmp_path, module=module) as job:
        job.until("step 12/")
        if module == "ptrain":
            assert jobs.listening_addresses(job.process.pid) == {"127.0.0.1"}
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait() == 0, job.error
    assert re.search(r"resume  step (10|20) of ", job.output), "as soon as the signal came"
    (run,) = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    assert not (run / ".lock").exists()
    if module == "ptrain":
        (failure,) = map(json.loads, (run / "failures.jsonl").read_text().splitlines())
        assert "rank 1 was killed by SIGKILL" in failure["error"]
    whole = tmp_path / "whole"
    assert [end.code for end in sessions.train_on_ranks(ranks, 2, *SAVING, folder=whole)] == [0, 0]
    assert jobs.losses(run) == jobs.losses(whole)


def test_a_rank_that_cannot_even_import_is_named_with_its_cause(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    (first / "torch.py").write_text("raise ImportError('libtorch.so is missing')\n")
    code, job = jobs.run_job(["train", "zero3", *jobs.TINY], cwd=tmp_path, first=first)
    assert code == 3
    assert "rank " in job.error and "libtorch.so is missing" in job.error


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("ptrain", ("train", "zero3", *FOREVER)),
        pytest.param(TORCHS, TORCHRUN, marks=pytest.mark.nightly),
    ],
)
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path, module, words):
    with jobs.job(words, cwd=tmp_path, module=module, is_forked=module == "ptrain") as job:
        job.until("step 3/")
        ranks = list(job.ranks().values())
        job.process.kill()
        job.wait()
        assert jobs.have_ended(ranks)
