"""A model file next to its spec trains from any folder without importing other files of the folder;
an invalid model ends with one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.gloo

SPEC = """
model: {target: beside_the_spec:necks}
mesh: {dp_shard: 2}
placement: zero2
batch: {global: 4, micro: 2, sequence: 16}
train: {steps: 1}
eval: {every: 0}
"""
PLANTED = "raise SystemExit('planted: a file of the current folder ran')"
ENTRIES = ["ptrain.train", pytest.param("ptrain.verification", marks=pytest.mark.nightly)]


@pytest.fixture
def user_spec(tmp_path: Path) -> Path:
    """Return a spec in a folder with its model and a file named like an installed module."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "beside_the_spec.py").write_text("from tests.models_external import necks")
    (folder / "numpy.py").write_text(PLANTED)
    (folder / "mine.yaml").write_text(SPEC)
    return folder / "mine.yaml"


@pytest.fixture
def shadowing_folder(tmp_path: Path) -> Path:
    """Return a folder with files named like installed modules."""
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("numpy", "torch", "yaml"):
        (folder / f"{name}.py").write_text(PLANTED)
    return folder


def test_a_model_next_to_its_spec_trains_and_a_planted_numpy_runs_in_no_rank(
    user_spec, shadowing_folder
):
    code, job = jobs.run_job(["train", str(user_spec), "--allow-import"], cwd=shadowing_folder)
    assert code == 0, job.error
    assert "step 1/1" in job.output
    written = (shadowing_folder / "runs" / "latest" / "spec.resolved.yaml").read_text()
    assert f"folder: {user_spec.parent}" in written


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_rank_that_torchrun_starts_imports_nothing_from_the_current_folder(
    entry, shadowing_folder
):
    code, job = jobs.run_job(["no-such-spec"], cwd=shadowing_folder, module=entry)
    assert code == 2 and "there is no spec named 'no-such-spec'" in job.error
    assert "planted" not in job.error


@pytest.mark.nightly
def test_a_model_that_gives_a_tuple_is_rejected_once_and_leaves_no_run(user_spec, tmp_path):
    own = "model={target: tests.models_invalid:changed, arguments: {how: tuple}}"
    code, job = jobs.run_job(["train", str(user_spec), own, "--allow-import"], cwd=tmp_path)
    assert code == 2
    assert "tests.models_invalid:changed, given tokens int64 [2, 16], gave tuple" in job.error
    assert "Traceback" not in job.error and job.error.count("gave tuple") == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["loss={target: tests.models_losses:raises}"], "raised ValueError: no such loss"),
        (
            [
                "data={target: tests.models_losses:items, arguments: {how: uneven}}",
                "loss={target: tests.models_losses:plain}",
            ],
            "sample 39 of tests.models_losses:items has int64 [9]",
        ),
    ],
    ids=["loss", "data"],
)
def test_code_of_the_users_that_fails_is_rejected_once_and_leaves_no_run(
    user_spec, tmp_path, words, finding
):
    code, job = jobs.run_job(["train", str(user_spec), *words, "--allow-import"], cwd=tmp_path)
    assert code == 2 and finding in job.error
    assert "Traceback" not in job.error and job.error.count(finding) == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
