"""Checkpoints are bitwise equal under every placement, rejected if damaged, and never execute
code."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from ptrain import files
from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.errors import PtrainError
from ptrain.interpreter.program import Program, interpret
from ptrain.optimizers.update import saved_bytes
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.traces.facts import facts_of
from ptrain.train import checkpoint, manifest, saving
from ptrain.train.checkpoint import METADATA, IndexReader, resume_training
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder
from ptrain.train.loop import local_batch
from ptrain.train.rank_start import Interrupts
from ptrain.train.saving import CheckpointSaver
from ptrain.units import leaves
from tests.jobs import TINY

STEPS = 2
PAIRS = [("ddp", "zero1"), ("zero1", "zero2"), ("zero2", "zero3"), ("zero3", "ddp")]


def program_of(name: str, *overrides: str) -> Program:
    spec = require_runnable(
        load(name, [each for each in TINY if not each.startswith("log")] + [*overrides])
    )
    return interpret(spec, world=World.join(spec.timeout))


def step(program: Program, index: int) -> None:
    spec = program.spec
    local = local_batch(program, open_corpus(spec.data), index)
    program.forward_backward(local)
    program.step(1e-3)


def full_state(program: Program) -> dict[str, torch.Tensor]:
    """Return every full tensor of the state under its name in checkpoints."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in leaves(program.state_dict())
    }


def save_on_ranks(name: str, overrides: tuple[str, ...], folder: str) -> dict[str, torch.Tensor]:
    program = program_of(name, *overrides)
    for index in range(STEPS):
        step(program, index)
    state = full_state(program)
    exchange, interrupts = Exchange(program.world), Interrupts()
    with CheckpointSaver(program, Path(folder), exchange, interrupts, lambda _: None) as saver:
        saver.save(STEPS)
        step(program, STEPS)  # in the background, this changes the state while it is written
        saver.finish()
    assert not interrupts.received
    return state


def load_on_ranks(name: str, overrides: tuple[str, ...], folder: str) -> dict[str, torch.Tensor]:
    return load_saved(program_of(name, *overrides), folder)


def load_saved(program: Program, folder: str) -> dict[str, torch.Tensor]:
    """Load the checkpoint of step STEPS and return the full state."""
    exchange = Exchange(program.world)
    path, found, _ = checkpoint.find_newest_sound(
        [Path(folder) / manifest.folder_name(STEPS)], exchange
    )
    assert path is not None and found is not None and found.step == STEPS
    checkpoint.load(program, path, found, exchange)
    return full_state(program)


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("layout", [pytest.param("fp32", marks=pytest.mark.nightly), "zero16"])
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_checkpoint_is_bitwise_the_same_under_another_placement(
    ranks, tmp_path, saved, loaded, layout, background
):
    overrides = (f"precision.layout={layout}", f"checkpoint.background={background}")
    before = ranks.run(2, save_on_ranks, saved, overrides, str(tmp_path))[0]
    after = ranks.run(4, load_on_ranks, loaded, (*overrides, _mesh(loaded)), str(tmp_path))[0]
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def _mesh(name: str) -> str:
    axis = "dp_replicate" if name == "ddp" else "dp_shard"
    return f"mesh.{axis}=4"


def losses_on_ranks(name: str, overrides: tuple[str, ...], folder: str) -> list[list[float]]:
    """Return loss and gradient norm of steps 2 and 3, uninterrupted and after a resume."""
    rows = []
    program = program_of(name, *overrides)
    for index in range(STEPS):
        step(program, index)
    saving.save_checkpoint(program, Path(folder), STEPS, Exchange(program.world))
    resumed = program_of(name, *overrides)
    load_saved(resumed, folder)
    for each in (program, resumed):
        row = []
        for index in (STEPS, STEPS + 1):
            local = local_batch(each, open_corpus(each.spec.data), index)
            row.append(float(each.forward_backward(local)))
            norm = each.reduce()
            assert norm is not None
            row.append(float(norm))
            each.apply(1e-2)
        rows.append([*row, *(float(value.double().sum()) for value in full_state(each).values())])
    return rows


SMALL_BUCKETS = ("bucket=8KiB",)  # several buckets of the small model


@pytest.mark.parametrize(
    ("size", "name", "more"),
    [
        (2, "ddp", ()),
        (4, "ddp", SMALL_BUCKETS),
        (4, "pp-dp", ("model.layers=2",)),
        pytest.param(4, "ddp-zero-redundancy", (), marks=pytest.mark.nightly),
        pytest.param(4, "zero1", (), marks=pytest.mark.nightly),
        pytest.param(4, "zero3", (), marks=pytest.mark.nightly),
    ],
)
def test_steps_after_a_resume_are_bitwise_those_of_an_uninterrupted_run(
    ranks, tmp_path, size, name, more
):
    axis = "dp_shard" if name.startswith("zero") else "dp_replicate"
    mesh = () if name == "pp-dp" else (f"mesh.{axis}={size}",)
    uninterrupted, resumed = ranks.run(size, losses_on_ranks, name, (*mesh, *more), str(tmp_path))[
        0
    ]
    assert resumed == uninterrupted


# -- alone in one process


@pytest.fixture
def saved_checkpoint(tmp_path: Path) -> Path:
    program = single_device_state()
    step(program, 0)
    return saving.save_checkpoint(program, tmp_path / "checkpoints", 1, Exchange(program.world))


def single_device_state(*overrides: str) -> Program:
    return program_of("zero3", "mesh.dp_shard=1", *overrides)


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    program = single_device_state()
    small = SimpleNamespace(total=10**6, used=0, free=1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: small)
    with pytest.raises(PtrainError, match=r"not writable: .* are needed, but 1 kB are free"):
        saving.save_checkpoint(program, tmp_path / "checkpoints", 1, Exchange(program.world))
    assert not list(tmp_path.iterdir())


def test_a_save_in_the_background_that_fails_ends_the_training_with_its_message(
    tmp_path, monkeypatch
):
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    program, interrupts = single_device_state("checkpoint.background=true"), Interrupts()
    exchange = Exchange(program.world)
    with CheckpointSaver(program, tmp_path, exchange, interrupts, lambda _: None) as saver:
        saver.save(1)
        saver.finish()
        assert not interrupts.received
        monkeypatch.setattr(manifest, "write", write)
        saver.save(2)
        with pytest.raises(PtrainError, match=r"not writable: .*No space left"):
            saver.save(3)
    assert interrupts.received == {signal.SIGTERM}
    assert [path.name for path in tmp_path.iterdir()] == [manifest.folder_name(1)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision.layout=zero16",),
        ("precision.layout=fp16", "optimizer.name=lion"),
        ("optimizer.name=muon",),
        ("model.tied=true", "optimizer.groups=[{match: norms, name: sgd}]"),
        ("model.lora_rank=4", "frozen.dtype=nf4"),
        ("model.experts=4", "model.bias_update_rate=0.1", "precision.compute=fp64"),
    ],
    ids=lambda words: words[0],
)
def test_the_bytes_of_a_checkpoint_are_predicted(tmp_path, overrides):
    program = single_device_state(*overrides)
    path = saving.save_checkpoint(program, tmp_path, 1, Exchange(program.world))
    metadata = IndexReader(path, listed=frozenset(manifest.read(path).files)).read_metadata()
    tensors = metadata.state_dict_metadata.values()
    counted = sum(prod(each.size) * each.properties.dtype.itemsize for each in tensors)
    assert saved_bytes(program.spec, facts_of(program.spec)) == counted
    assert manifest.read(path).tensor_bytes == counted


def test_a_manifest_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    program = single_device_state()
    monkeypatch.setattr(manifest, "write", write)
    with pytest.raises(PtrainError, match=r"not writable: .*No space left"):
        saving.save_checkpoint(program, tmp_path, 1, Exchange(program.world))
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_skipped_for_an_older_one(saved_checkpoint):
    program = single_device_state()
    exchange = Exchange(program.world)
    newer = saving.save_checkpoint(program, saved_checkpoint.parent, 2, exchange)
    data = next(newer.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    path, found, complaints = checkpoint.find_newest_sound([newer, saved_checkpoint], exchange)
    assert path == saved_checkpoint
    assert found is not None and found.step == 1
    assert len(complaints) == 1 and data.name in complaints[0]


def test_a_skipped_checkpoint_does_not_replace_the_one_that_is_due(saved_checkpoint):
    program = single_device_state()
    exchange, run = Exchange(program.world), RunFolder(saved_checkpoint.parents[1])
    newer = saving.save_checkpoint(program, saved_checkpoint.parent, 2, exchange)
    (newer / manifest.NAME).write_text("{")
    assert resume_training(program, run, "auto", exchange) == 1
    assert manifest.complete_checkpoints(run.checkpoints) == [saved_checkpoint]
    checkpoint.verify_files(saving.save_checkpoint(program, run.checkpoints, 2, exchange), exchange)


def test_a_run_killed_before_or_in_a_removal_continues_and_removes_later(tmp_path, monkeypatch):
    program = single_device_state("checkpoint.keep=1")
    exchange, run = Exchange(program.world), RunFolder(tmp_path)

    def save(step: int) -> None:
        saving.save_checkpoint(program, run.checkpoints, step, exchange)
        saving.remove_older(program, run.checkpoints)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    save(1)
    for step, (module, name) in enumerate([(Path, "rename"), (manifest.shutil, "rmtree")], 2):
        saving.save_checkpoint(program, run.checkpoints, step, exchange)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, kill)
            saving.remove_older(program, run.checkpoints)
        assert resume_training(program, run, "auto", exchange) == step
        assert not manifest.incomplete_checkpoints(run.checkpoints)
    save(4)
    (last,) = run.checkpoints.iterdir()
    assert checkpoint.verify_files(last, exchange).step == 4


def test_a_foreign_checkpoint_in_the_folder_is_not_continued(tmp_path):
    program = single_device_state()
    exchange = Exchange(program.world)
    stranger = tmp_path / "20260101-000000-zero3"
    saving.save_checkpoint(program, stranger / "checkpoints", 1, exchange)
    own = RunFolder(tmp_path / "20260102-000000-zero3")
    assert resume_training(program, own, "auto", exchange) == 0
    assert resume_training(program, own, str(stranger), exchange) == 1


def test_a_checkpoint_of_another_model_is_rejected_with_both_shapes(saved_checkpoint):
    program = single_device_state("model.hidden=64")
    exchange = Exchange(program.world)
    found = checkpoint.verify_files(saved_checkpoint, exchange)
    with pytest.raises(PtrainError, match="another model: hidden: 32; this spec has hidden: 64"):
        checkpoint.load(program, saved_checkpoint, found, exchange)
    older = replace(found, trained={})
    with pytest.raises(PtrainError, match=r"is \(.*32.*\), but this model has \(.*64.*\)"):
        checkpoint.load(program, saved_checkpoint, older, exchange)


@pytest.mark.parametrize(
    ("trained", "asked", "remedy"),
    [
        (
            "layout=fp32",
            "layout=zero16",
            "moments fp32. Add `precision.layout=fp32`",
        ),
        ("layout=bf16", "layout=fp32", "moments bf16. Add `precision.layout=bf16`"),
        ("layout=bf16", "layout=zero16", "moments bf16. Add `precision.layout=bf16`"),
        ("layout=zero16", "layout=bf16", "Add `precision.layout=zero16` (or megatron18, zero20, "),
        ("compute=fp64", "layout=fp32", "fp64. Add `precision.compute=fp64`"),
        (
            "moments=bf16",
            "layout=bf16",
            "Add `precision.master=none precision.parameters=fp32 prec",
        ),
    ],
)
def test_another_layout_is_rejected_with_the_one_that_was_trained(tmp_path, trained, asked, remedy):
    program = single_device_state(f"precision.{trained}")
    step(program, 0)
    exchange = Exchange(program.world)
    saved = saving.save_checkpoint(program, tmp_path, 1, exchange)
    found = checkpoint.verify_files(saved, exchange)
    with pytest.raises(PtrainError) as caught:
        checkpoint.load(single_device_state(f"precision.{asked}"), saved, found, exchange)
    assert remedy in str(caught.value).partition("remedy: The checkpoint was trained with ")[2]


def test_heads_that_change_no_shape_are_another_model_all_the_same(saved_checkpoint):
    program = single_device_state("model.heads=4", "model.kv_heads=2")
    exchange = Exchange(program.world)
    found = checkpoint.verify_files(saved_checkpoint, exchange)
    with pytest.raises(PtrainError, match="heads: 2, kv_heads: 1; this spec has heads: 4"):
        checkpoint.load(program, saved_checkpoint, found, exchange)


def test_a_tensor_that_would_be_dropped_is_rejected(tmp_path):
    larger = single_device_state("model.layers=2")
    exchange = Exchange(larger.world)
    saved = saving.save_checkpoint(larger, tmp_path, 1, exchange)
    older = replace(checkpoint.verify_files(saved, exchange), trained={})
    with pytest.raises(
        PtrainError, match=r"tensors that this model or optimizer does not have.*\n.*remedy"
    ):
        checkpoint.load(single_device_state(), saved, older, exchange)


def test_another_optimizer_text_seed_or_batch_is_reported():
    was = manifest.trained_sections(single_device_state().spec)
    other = single_device_state(
        "optimizer.name=sgd",
        "optimizer.lr=0.5",
        "data.corpus=synthetic",
        "train.seed=7",
        "batch.global=8",
    )
    lines = dict(line.split(": ", 1) for line in manifest.difference_lines(was, other.spec))
    assert (
        lines["optimizer.lr"]
        == f"{single_device_state().spec.optimizer.lr} in the checkpoint, 0.5 now"
    )
    assert {"optimizer.name", "data.corpus", "train.seed", "batch.global"} < set(lines)
    assert not list(manifest.difference_lines({}, other.spec))


def test_a_manifest_of_an_older_format_is_compared_by_its_entries():
    spec = single_device_state("train.seed=7", "optimizer.lr=0.5").spec
    was = {
        "optimizer.name": "sgd",
        "train.seed": 0,
        "data": manifest.trained_sections(spec)["data"],
    }
    places = [line.partition(":")[0] for line in manifest.difference_lines(was, spec)]
    assert places == ["optimizer.name", "train.seed"]
    assert manifest.has_other_optimizer(was, spec)


def test_a_training_that_is_done_is_not_continued(saved_checkpoint, tmp_path):
    program, run = single_device_state("train.steps=1"), RunFolder(tmp_path / "run")
    with pytest.raises(
        PtrainError, match=r"already at step 1 of 1\n.*`train.steps` to more than 1"
    ):
        resume_training(program, run, str(saved_checkpoint), Exchange(program.world))


def test_a_run_without_checkpoints_is_reported(tmp_path):
    program, run = single_device_state(), RunFolder(tmp_path / "run")
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        PtrainError, match=r"^error: --resume .*: contains no checkpoint\n  remedy: "
    ):
        resume_training(program, run, str(tmp_path / "other"), Exchange(program.world))


class MaliciousObject:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_nothing_in_the_index_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(MaliciousObject()))
    with pytest.raises(PtrainError, match="not allowed"):
        IndexReader(tmp_path, listed=frozenset()).read_metadata()
    assert not (tmp_path / "executed").exists()


def test_the_index_leads_to_no_file_that_the_manifest_does_not_list(saved_checkpoint):
    found = checkpoint.verify_files(saved_checkpoint, Exchange(World()))
    data = {name for name in found.files if name.endswith(".distcp")}
    with pytest.raises(PtrainError, match="does not list"):
        IndexReader(saved_checkpoint, listed=frozenset(found.files) - data).read_metadata()
    assert isinstance(
        IndexReader(saved_checkpoint, listed=frozenset(found.files)).read_metadata(), Metadata
    )
