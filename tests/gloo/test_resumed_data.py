"""A resumed run reads the data of its checkpoint's training, and each sample once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ptrain.data import sampler
from ptrain.data.sampler import fingerprint_file
from ptrain.train import loop, manifest
from tests import jobs
from tests.gloo import sessions
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

WINDOWS = 48  # in an epoch of `tokens` and samples of 8 tokens
MODEL = ("model.vocab=32", "batch.sequence=8", "batch.micro=2", "optimizer.lr=0.001")
SMALL = (*jobs.TINY[:5], *MODEL, "log.every=1")
SAVED = (*SMALL, "mesh.dp_shard=1", "batch.global=4", "checkpoint.every=2")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    ids = np.random.default_rng(0).integers(
        0, 32, 8 * WINDOWS + 21
    )  # the last twentieth is held out
    np.save(path, ids.astype(np.uint16))
    return path


def train_one(ranks: Ranks, folder: Path, *words: str) -> sessions.RankResult:
    (ended,) = sessions.train_on_ranks(ranks, 1, "zero3", *SAVED, *words, folder=folder)
    return ended


def change_one(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=times)  # as a copy by rsync or cp --preserve


def truncate_file(path: Path) -> None:
    np.save(path, np.load(path)[:-40])


def extend_file(path: Path) -> None:
    np.save(path, np.concatenate([np.load(path)] * 2))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (change_one, "has changed"),
        (truncate_file, "has 858 bytes; it had 938 at the checkpoint"),
        (extend_file, "has 1748 bytes; it had 938 at the checkpoint"),
    ],
)
def test_a_token_file_that_changed_is_rejected_and_accepted_on_request(
    ranks: Ranks, tmp_path: Path, tokens: Path, change: Callable[[Path], None], finding: str
) -> None:
    run, path = tmp_path / "run", f"data.path={tokens}"
    assert train_one(ranks, run, path, "train.steps=2").code == 0
    change(tokens)
    before = sorted(run.rglob("*"))
    same = f"data.path={tokens.parent}/./{tokens.name}"  # another spelling of the path
    refused = train_one(ranks, run, same, "train.steps=4", "--resume", str(run))
    assert refused.code == 2
    assert f"data.path {finding}" in refused.error
    assert "--accept-data" in refused.error and "Traceback" not in refused.error
    assert sorted(run.rglob("*")) == before
    words = (path, "--resume", str(run), "--accept-data")
    accepted = train_one(ranks, run, "train.steps=4", *words)
    assert accepted.code == 0 and f"data.path {finding}" in accepted.output
    again = train_one(ranks, run, path, "train.steps=6", "--resume", str(run))
    assert again.code == 0, "the checkpoint of step 4 has the accepted file"


def test_a_touched_or_moved_file_is_accepted(ranks: Ranks, tmp_path: Path, tokens: Path) -> None:
    run = tmp_path / "run"
    assert train_one(ranks, run, f"data.path={tokens}", "train.steps=2").code == 0
    os.utime(tokens, ns=(0, 0))
    words = ("train.steps=4", "--resume", str(run))
    assert train_one(ranks, run, f"data.path={tokens}", *words).code == 0
    moved = tokens.rename(tmp_path / "moved.npy")
    words = ("train.steps=6", "--resume", str(run))
    ended = train_one(ranks, run, f"data.path={moved}", *words)
    assert ended.code == 0 and "data.path: " in ended.output


def test_changes_of_a_mask_and_of_each_source_are_detected(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    other, mask = tmp_path / "other.npy", tmp_path / "mask.npy"
    shutil.copy(tokens, other)
    np.save(mask, np.ones(len(np.load(tokens)), dtype=np.bool_))
    sources = f"data.sources=[{{path: {tokens}, loss_mask: {mask}}}, {{path: {other}}}]"
    run = tmp_path / "run"
    assert train_one(ranks, run, sources, "train.steps=2").code == 0
    for path in (mask, other):
        change_one(path)
    ended = train_one(ranks, run, sources, "train.steps=4", "--resume", str(run))
    assert ended.code == 2
    assert "the content of data.sources.0.loss_mask has changed" in ended.error
    assert "the content of data.sources.1.path has changed" in ended.error
    assert "data.sources.0.path" not in ended.error


def test_a_dataset_of_another_length_is_rejected(ranks: Ranks, tmp_path: Path) -> None:
    spec, run = tmp_path / "vision.yaml", tmp_path / "run"
    target = "tests.models_vision"
    sections = {
        "model": {"target": f"{target}:vit"},
        "loss": {"target": f"{target}:label_loss"},
        "data": {"target": f"{target}:images"},
        "batch": {"global": 8, "micro": 4},
        "mesh": {"dp_shard": 1},
        "placement": "zero3",
        "checkpoint": {"every": 2},
    }
    spec.write_text(json.dumps(sections))

    def train_images(steps: int, count: int, *words: str) -> sessions.RankResult:
        given = (str(spec), "--allow-import", f"train.steps={steps}", *words)
        data = f"data.arguments={{count: {count}}}"
        (ended,) = sessions.train_on_ranks(ranks, 1, *given, data, folder=run)
        return ended

    first = train_images(2, 200)
    assert first.code == 0, first.error
    shorter = train_images(4, 100, "--resume", str(run))
    assert shorter.code == 2
    assert "data has 95 samples; it had 190 at the checkpoint" in shorter.error
    assert train_images(4, 100, "--resume", str(run), "--accept-data").code == 0


def test_a_large_file_is_sampled_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_BLOCK", 64)
    path = tmp_path / "large"
    path.write_bytes(bytes(10_000))
    before = fingerprint_file(path, 4)
    assert before[:2] == (10_000, "sha256 of 4 blocks: " + hashlib.sha256(bytes(256)).hexdigest())
    for place, is_read in ((0, True), (9_999, True), (100, False)):
        content = bytearray(10_000)
        content[place] = 1
        path.write_bytes(content)
        assert (fingerprint_file(path, 4)[1] != before[1]) is is_read
    path.write_bytes(bytes(256))
    assert fingerprint_file(path, 4)[1] == "sha256: " + hashlib.sha256(bytes(256)).hexdigest()


def record_samples(words: tuple[str, ...], folder: str) -> int:
    """Train on this rank, and write the ids of its samples to a file of the folder."""
    ids: list[int] = []
    batch = loop.read_batch

    def recorded(*args: object, **kwargs: object) -> object:
        local = batch(*args, **kwargs)  # type: ignore[arg-type]
        ids.extend(local.sample_ids)
        return local

    loop.read_batch = recorded  # type: ignore[assignment]
    try:
        ended = sessions.train_without_launcher(words)
    finally:
        loop.read_batch = batch
    assert ended.code == 0, ended.error
    with (Path(folder) / f"ids{os.getpid()}").open("a") as file:
        file.writelines(f"{number}\n" for number in ids)
    return ended.code


def test_each_sample_is_seen_once_though_the_batch_changes_at_every_resume(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    common = ("zero3", *SMALL, f"data.path={tokens}", "checkpoint.every=1", "mesh.dp_shard=2")
    source: tuple[str, ...] = ()
    for number, (size, steps) in enumerate([(8, 2), (4, 6), (16, 7)]):
        run = str(tmp_path / f"run{number}")
        words = (*common, f"batch.global={size}", f"train.steps={steps}", "--run-dir", run, *source)
        ranks.run(2, record_samples, words, str(tmp_path))
        source = ("--resume", run)
    seen = [int(line) for path in tmp_path.glob("ids*") for line in path.read_text().split()]
    assert sorted(seen) == list(range(WINDOWS))
    assert (
        manifest.read(manifest.complete_checkpoints(tmp_path / "run2" / "checkpoints")[0]).samples
        == WINDOWS
    )


def test_a_checkpoint_without_samples_counts_steps_of_its_batch(
    ranks: Ranks, tmp_path: Path
) -> None:
    earlier = Path(__file__).parents[1] / "fixtures" / "5a419e96"
    (path,) = manifest.complete_checkpoints(earlier / "zero3" / "checkpoints")
    saved = manifest.read(path)
    assert (saved.step, saved.samples, saved.data) == (2, None, {})
    words = (f"data.path={earlier / 'tokens.npy'}", "batch.global=8", "train.steps=3")
    given = (str(earlier / "zero3" / "spec.resolved.yaml"), *words, "--resume", str(path))
    ends = sessions.train_on_ranks(ranks, 2, *given, folder=tmp_path / "run")
    assert [end.code for end in ends] == [0, 0], ends[0].error
    (path,) = manifest.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert manifest.read(path).samples == 2 * 4 + 8


def steps_in_metrics(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def test_metrics_have_each_step_once_after_a_resume_from_an_earlier_step(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    run, path = tmp_path / "run", f"data.path={tokens}"
    words = (path, "train.steps=5", "eval.every=2", "eval.batches=1")
    assert train_one(ranks, run, *words).code == 0
    before = jobs.losses(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # as a rank leaves it that is killed in a write
    resumed = str(run / "checkpoints" / "step-00000002")
    assert train_one(ranks, run, *words, "train.steps=6", "--resume", resumed).code == 0
    assert steps_in_metrics(run) == [1, 2, 3, 4, 5, 6]
    assert {step: jobs.losses(run)[step] for step in before} == before
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 6]
