"""A training with trackers: only rank 0 calls them, a resumed run continues the tracked run, and a
tracker failure does not stop the training. The libraries are stubs that record calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

MLFLOW = """
import json, os
from types import SimpleNamespace

def called(name):
    def call(*given, **named):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps([name, os.environ["RANK"], given, named]) + "\\n")
        return SimpleNamespace(info=SimpleNamespace(run_id="the-run"))
    return call

start_run, log_params, log_metrics, set_tag, end_run = map(
    called, ("start_run", "log_params", "log_metrics", "set_tag", "end_run")
)
"""
WANDB = """
def init(**named):
    raise ConnectionError("no route to its servers")

Settings = dict
"""


def train_with_libraries(cwd: str, words: tuple[str, ...]) -> sessions.RankResult:
    """Train on this rank, in a folder whose `libraries` come before all installed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.syspath_prepend(str(Path(cwd, "libraries")))
        for name in ("mlflow", "wandb"):
            patch.delitem(sys.modules, name, raising=False)
        return sessions.train_as_torchrun(words)


@pytest.fixture(scope="module")
def train_and_resume(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train two steps and a third after resuming; return the output of both."""
    cwd = tmp_path_factory.mktemp("tracked")
    libraries = cwd / "libraries"
    libraries.mkdir()
    (libraries / "mlflow.py").write_text(MLFLOW)
    (libraries / "wandb.py").write_text(WANDB)
    words = ("zero1", *jobs.TINY, "log.trackers=[wandb,mlflow]", "checkpoint.at_end=true")
    printed = ""
    for name, more in (
        ("runs/2-first", ["train.steps=2"]),
        ("runs/2-then", ["train.steps=3", "--resume", "runs/2-first"]),
    ):
        given = (*words, *more, "--run-dir", name)
        ends = ranks.run(2, train_with_libraries, str(cwd), given)
        assert [end.code for end in ends] == [0, 0], ends[0].error
        printed += "".join(end.output for end in ends)
    return cwd, printed


def calls(cwd: Path, name: str) -> list[tuple[str, list, dict]]:
    rows = map(json.loads, (cwd / "calls.jsonl").read_text().splitlines())
    return [(rank, given, named) for called, rank, given, named in rows if called == name]


def test_only_rank_0_logs_each_step_once(train_and_resume):
    cwd, _ = train_and_resume
    metrics = calls(cwd, "log_metrics")
    assert {rank for rank, _, _ in metrics} == {"0"}
    assert [named["step"] for _, _, named in metrics] == [1, 2, 3]
    rows = [
        json.loads(line)
        for path in sorted((cwd / "runs").glob("2*/metrics.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert [{**row, "step": 0} for row in rows] == [
        {**given[0], "step": 0} for _, given, _ in metrics
    ]


def test_the_prediction_is_logged_with_the_spec(train_and_resume):
    cwd, _ = train_and_resume
    (parameters,) = [given[0] for _, given, _ in calls(cwd, "log_params")]
    assert parameters["train.steps"] == "2" and parameters["mesh.dp_shard"] == "2"
    assert int(parameters["predicted.peak_bytes"]) > int(parameters["predicted.parameters_bytes"])
    assert int(parameters["predicted.sent_bytes"]) > 0


def test_a_resumed_run_continues_the_tracked_run(train_and_resume):
    cwd, _ = train_and_resume
    assert [named["run_id"] for _, _, named in calls(cwd, "start_run")] == [None, "the-run"]
    assert len({path.parents[1] for path in (cwd / "runs").glob("2*/trackers/mlflow")}) == 2


def test_the_verdict_is_logged_last(train_and_resume):
    cwd, printed = train_and_resume
    verdicts = [given for _, given, _ in calls(cwd, "set_tag")]
    assert verdicts[1] == ["verdict", "none"], "a steady step is the third of a run"
    assert [given for _, given, _ in calls(cwd, "end_run")] == 2 * [["FINISHED"]]
    assert printed.count("no verdict") == 2


def test_a_tracker_without_its_servers_is_one_warning(train_and_resume):
    _, printed = train_and_resume
    lines = [line for line in printed.splitlines() if "wandb" in line]
    assert len(lines) == 2, "one of each training"
    assert all("ConnectionError: no route to its servers" in line for line in lines)
