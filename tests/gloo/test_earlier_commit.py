"""Runs, checkpoints and records that commit 5a419e96 wrote keep loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ptrain.cli.main import main
from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

EARLIER = Path(__file__).parents[1] / "fixtures" / "5a419e96"


@pytest.fixture
def earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the fixtures, because the commands write into run folders."""
    folder = tmp_path / "earlier"
    shutil.copytree(EARLIER, folder)
    monkeypatch.chdir(folder)
    return folder


def continue_run(ranks: Ranks, earlier: Path, run: str, *words: str) -> dict[int, float]:
    """Continue an earlier run for two steps in a new folder, and return the losses by step."""
    given = (str(earlier / run / "spec.resolved.yaml"), "--resume", str(earlier / run), *words)
    for end in sessions.train_on_ranks(ranks, 2, *given, "train.steps=5", folder=earlier / "new"):
        assert end.code == 0, end.error
    return jobs.losses(earlier / "new")


@pytest.mark.gloo
def test_a_sharded_checkpoint_of_a_token_file_continues_with_the_losses_of_its_run(
    ranks: Ranks, earlier_runs: Path
) -> None:
    path = f"data.path={earlier_runs / 'tokens.npy'}"
    continued = continue_run(ranks, earlier_runs, "zero3", path, "eval.every=0")
    assert list(continued) == [3, 4, 5]
    assert continued[3] == pytest.approx(jobs.losses(earlier_runs / "zero3")[3], rel=1e-5)


@pytest.mark.gloo
def test_a_checkpoint_of_another_placement_continues(ranks: Ranks, earlier_runs: Path) -> None:
    sharded = ("mesh={dp_shard: 2}", "placement=zero3")
    continued = continue_run(ranks, earlier_runs, "tp", *sharded)
    assert list(continued) == [4, 5]
    assert max(continued.values()) < jobs.losses(earlier_runs / "tp")[1]


@pytest.mark.parametrize(
    "name",
    [
        "predict.json",
        "sweep.json",
        "simulate.json",
        "validate.json",
        "verify.json",
        "zero3",
        "tp/summary.json",
    ],
)
def test_records_are_read_and_equal_themselves(
    earlier_runs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", name, name]) == 0
    assert "equal" in capsys.readouterr().out or name == "verify.json"


def test_a_record_is_compared_with_a_prediction_of_today(
    earlier_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "predict.json", "zero3/spec.resolved.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith(("parameters", "optimizer", "gradients"))]


def test_a_checkpoint_is_exported_and_sampled(
    earlier_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "tp", "--to", "exported", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert (earlier_runs / "exported" / "model.safetensors").is_file()
    assert main(["sample", "tp", "import", "--tokens", "4", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
