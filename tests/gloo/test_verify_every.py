"""`verify_every` stops a training if all ranks make the same mistake, and only then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.errors import SpecError
from ptrain.train import session
from ptrain.train.options import Options
from ptrain.verification.trajectory import ReferenceGuard
from tests import jobs
from tests.gloo import faults_of_all_ranks as faults
from tests.gloo.consistency_runs import Fault, train_with_fault
from tests.gloo.test_consistency import SMALL
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

# Steps 2 and 3 are measured, so that of every two the fifth is the first that is looked at.
JOB = (*SMALL, "train.steps=9", "eval.every=0", "checkpoint.every=1", "verify_every=2")
TWO = ("mesh={dp_replicate: 2}", *JOB)


def checkpoint_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("fault", "step", "words"),
    [
        (faults.double_gradients, 4, "gradient differs by "),
        (faults.parameters_drift, 5, "loss after the update differs by "),
    ],
)
def test_a_fault_of_all_ranks_stops_the_training_and_names_step_and_value(
    ranks: Ranks, tmp_path: Path, fault: Fault, step: int, words: str
) -> None:
    ended = ranks.run(2, train_with_fault, TWO, tmp_path / "run", fault, "ddp", ReferenceGuard)
    assert {code for code, _ in ended} == {4}
    (text,) = {text for _, text in ended}
    assert text.startswith(f"step {step}: the reference, continued from the run's state, differs\n")
    assert words in text and "`ptrain verify`" in text and "--resume" in text
    assert checkpoint_steps(tmp_path / "run")[-1] == f"step-{step - 1:08d}"


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        ("zero3", ("mesh={dp_shard: 2}",)),
        pytest.param("tp", ("mesh={tp: 2}", "precision.layout=bf16"), marks=pytest.mark.nightly),
        pytest.param("pp-1f1b", ("mesh={pp: 2}",), marks=pytest.mark.nightly),
        pytest.param("ddp", ("mesh={dp_replicate: 2}", "precision.layout=fp16"),
                     marks=pytest.mark.nightly),
        pytest.param("zero2", ("mesh={dp_shard: 2}", "optimizer.clip=0.01"),
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_correct_training_runs_to_its_end(
    ranks: Ranks, tmp_path: Path, spec: str, more: tuple[str, ...]
) -> None:
    overrides, folder = (*JOB, *more, "train.steps=7"), tmp_path / "run"  # looks at 5 and 7
    ended = ranks.run(2, train_with_fault, overrides, folder, faults.no_fault, spec, ReferenceGuard)
    assert ended == [(0, ""), (0, "")]
    log = (folder / "logs" / "rank0.log").read_text()
    assert log.count("the reference continues like the run") >= 2
    assert json.loads((folder / "summary.json").read_text())["verdict"] == "holds"


def test_the_command_starts_ranks_that_verify(tmp_path: Path) -> None:
    words = ["ddp", *TWO, "train.steps=6", "--run-dir", str(tmp_path / "run"), "--quiet"]
    code, job = jobs.run_job(["train", *words], cwd=tmp_path, is_forked=True)
    assert code == 0, job.error
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert log.count("the reference continues like the run") == 1


def test_a_model_with_dropout_is_rejected_and_leaves_no_run(tmp_path: Path) -> None:
    model = "model={family: gpt, layers: 2, hidden: 24, heads: 4, vocab: 260, dropout: 0.1}"
    words = ["ddp", *TWO, model, "--run-dir", str(tmp_path / "run")]
    code, job = jobs.run_job(["train", *words], cwd=tmp_path, is_forked=True)
    assert code == 2
    assert "verify_every: the model uses dropout" in job.error and "Traceback" not in job.error
    assert not (tmp_path / "run").exists()


def test_a_rank_that_cannot_verify_names_the_launch_command() -> None:
    with pytest.raises(SpecError, match=r"-m ptrain\.verification\.guarded"):
        session.train_rank(
            Options(spec="ddp", overrides=("mesh={dp_replicate: 1}", "verify_every=5"))
        )


@pytest.mark.nightly
def test_torchrun_starts_ranks_that_verify(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ptrain"]
    words += ["train", "ddp", *TWO, "train.steps=6", "--run-dir", str(tmp_path / "run"), "--quiet"]
    ended = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert log.count("the reference continues like the run") == 1
