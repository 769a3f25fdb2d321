"""`ptrain validate`, and the exit codes of verdicts: 0 if it holds, 1 if it fails."""

from __future__ import annotations

import json

import pytest

import ptrain
from ptrain.errors import SpecError
from tests import jobs
from tests.gloo import sessions

pytestmark = pytest.mark.gloo

DECEIVER = "model={target: tests.models_external:deceiver}"
SHORT = [word for word in jobs.TINY if not word.startswith(("model", "log"))]


@pytest.mark.nightly  # by default one that fails is validated, below
def test_validate_runs_several_specs_prints_each_verdict_and_leaves_no_folder(tmp_path):
    code, job = jobs.run_job(
        ["validate", "zero1", "zero3", *jobs.TINY, "mesh.dp_shard=1"], cwd=tmp_path
    )
    assert code == 0, job.error
    assert job.output.count("verdict: holds") == 2
    headings = [line for line in job.output.splitlines() if "· batch 4 =" in line]
    assert [line.partition(" ")[0] for line in headings] == ["zero1", "zero3"]
    assert not job.output.endswith("\n\n")
    assert not any(tmp_path.iterdir())


def test_a_failed_verdict_exits_1_and_lists_the_differences(tmp_path):
    asked = ["validate", "ddp", DECEIVER, *SHORT, "mesh.dp_replicate=1", "--allow-import", "--json"]
    code, job = jobs.run_job(asked, cwd=tmp_path, is_forked=True)
    assert code == 1, job.error
    record = json.loads(job.output)
    assert record["verdict"] == "fails"
    failing = {check["name"] for check in record["checks"] if not check["holds"]}
    assert "memory activations rank 0" in failing


@pytest.mark.parametrize(("option", "expected"), [([], 0), (["--strict"], 1)], ids=str)
def test_a_training_exits_1_for_its_verdict_only_on_request(ranks, tmp_path, option, expected):
    wanted = ("ddp", DECEIVER, *SHORT, "train.steps=4", "--allow-import", *option)
    ends = sessions.train_on_ranks(ranks, 2, *wanted, folder=tmp_path / "run")
    assert {end.code for end in ends} == {expected}, ends[0].error
    assert "verdict: fails" in ends[0].output
    assert "fails: memory activations rank 0" in ends[0].output


def test_a_gpu_spec_uses_cpu_dropout_if_trained_on_a_cpu(ranks, tmp_path):
    """Samples of one token are in no table, so the model is traced for the CPU."""
    model = "model={family: gpt, layers: 2, hidden: 24, heads: 4, vocab: 260, dropout: 0.1}"
    batch = "batch={global: 4, micro: 2, sequence: 1}"
    wanted = ("ddp", model, batch, "cluster.preset=h100-8", "train.steps=4")
    (end, _) = sessions.train_on_ranks(ranks, 2, *wanted, folder=tmp_path / "run")
    assert "verdict: holds" in end.output, end.output + end.error


def test_a_training_as_a_call_gives_record_metrics_and_table(tmp_path):
    words = [*jobs.TINY, "train.steps=3", "mesh.dp_shard=1"]
    found = ptrain.run("zero2", words, nproc=1, run_dir=tmp_path / "run")
    assert found.holds
    assert [row["step"] for row in found.metrics] == [1, 2, 3]
    assert "verdict: holds" in str(found)
    with pytest.raises(SpecError, match="needs 2 ranks"):
        ptrain.run("zero2", nproc=3)
