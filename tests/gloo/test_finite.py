"""Non-finite values are not applied, not saved, and not resumed from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch

from ptrain.errors import PtrainError, TrainingStopped
from ptrain.interpreter.program import Program, interpret
from ptrain.meters import holdings
from ptrain.report.finding import Subject
from ptrain.spec.load import load
from ptrain.train import checkpoint, finite, manifest, saving, session
from ptrain.train.checkpoint import resume_training
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder
from ptrain.train.options import Options
from tests import jobs
from tests.gloo.test_checkpoint import full_state, program_of, single_device_state, step
from tests.models_poisoned import TENSOR
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

MICRO = 2  # micro-batches a step of the specs with batches of 4
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The result of one rank's training, and the tensors that changed since its last step began."""

    code: int
    text: str
    changed: tuple[str, ...]


def poisoned_spec(passes: int, value: str = "nan") -> str:
    arguments = f"{{at: {passes}, value: '{value}'}}"
    return f"model={{target: tests.models_poisoned:necks, arguments: {arguments}}}"


def train_with_fault(
    name: str, overrides: tuple[str, ...], folder: str, target: int = -1
) -> Stopped:
    """Train on this rank. With `target`, that reduced gradient is NaN on rank 1 in the third
    step."""
    before: dict[tuple[str, ...], torch.Tensor] = {}
    programs: list[Program] = []

    def observed(*args: object, **kwargs: object) -> Program:
        program = interpret(*args, **kwargs)  # type: ignore[arg-type]
        programs.append(program)
        forward_backward = program.forward_backward

        def noted(*args: object) -> torch.Tensor:
            before.update({key: value.clone() for key, value in stored_tensors(program)})
            return forward_backward(*args)  # type: ignore[arg-type]

        program.forward_backward = noted  # type: ignore[method-assign, assignment]
        if target >= 0:
            plant_fault(program, target)
        return program

    session.interpret = observed  # type: ignore[assignment]
    common = ("train.steps=4", "checkpoint.every=1", *overrides)
    options = Options(
        spec=name, overrides=common, run_dir=Path(folder), quiet=True, allow_import=True
    )
    try:
        return Stopped(code=session.train_rank(options), text="", changed=())
    except TrainingStopped as stopped:
        now = dict(stored_tensors(programs[0]))
        changed = {
            " ".join(key[1:3]).strip()
            for key, value in before.items()
            if not torch.equal(value, now[key])
        }
        return Stopped(code=stopped.exit_code, text=str(stopped), changed=tuple(sorted(changed)))
    finally:
        session.interpret = interpret


def stored_tensors(program: Program) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for held in chain(holdings.parameters(program), holdings.optimizer_state(program)):
        yield held.identity, held.tensor


def plant_fault(program: Program, target: int) -> None:
    reduce_gradients, count = program.wrapped.reduce_gradients, 0

    def faulty() -> None:
        nonlocal count
        reduce_gradients()
        count += 1
        if count == 3 and program.world.rank == 1:
            targets = [t for group in program.wrapped.targets() for t in group]
            gradient = targets[target].gradient
            assert gradient is not None
            gradient.view(-1)[-1] = NAN

    program.wrapped.reduce_gradients = faulty  # type: ignore[method-assign]


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


UNCLIPPED = "optimizer.clip=null"
SMALL = ("batch.sequence=32", "batch.global=4", "batch.micro=1")
WHOLE = ("batch.sequence=32", "batch.global=8", "batch.micro=4")
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "more", "value"),
    [
        ("zero3", (), "nan"),
        ("ddp", (UNCLIPPED,), "-inf"),
        pytest.param("ddp", (), "inf", marks=nightly),
        pytest.param("zero1", (), "inf", marks=nightly),
        pytest.param("zero1", (UNCLIPPED,), "nan", marks=nightly),
        pytest.param("zero2", (UNCLIPPED, "precision.layout=zero16"), "nan", marks=nightly),
        pytest.param("zero3", (UNCLIPPED, "precision.compute=fp64"), "inf", marks=nightly),
        pytest.param("zero3", (UNCLIPPED, "precision.layout=bf16"), "inf", marks=nightly),
        pytest.param("zero3", ("precision.layout=zero20",), "nan", marks=nightly),
        pytest.param("ddp-zero-redundancy", (UNCLIPPED,), "nan", marks=nightly),
        pytest.param("zero-offload", (UNCLIPPED,), "nan", marks=nightly),
        pytest.param("fsdp-offload", (), "nan", marks=nightly),
        pytest.param("nvme-offload", (UNCLIPPED,), "nan", marks=nightly),
        pytest.param("fsdp-mixed", (), "nan", marks=nightly),
        pytest.param("muon", (), "nan", marks=nightly),
    ],
)
def test_a_gradient_of_one_rank_that_is_not_finite_stops_all_before_the_update(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...], value: str
) -> None:
    overrides = (poisoned_spec(2 * MICRO + 1, value), *SMALL, *more)
    ends = ranks.run(2, train_with_fault, name, overrides, str(tmp_path / "run"))
    assert {end.code for end in ends} == {TrainingStopped.exit_code}
    (text,) = {end.text for end in ends}
    first, origin, state, remedy = text.splitlines()
    assert first.startswith("step 3: the loss is 5.")
    assert f"reduced gradients are not finite: {TENSOR} has " in first
    assert " in 1 of " in first and " elements on rank " in first
    assert "the rank with the first non-finite value is unknown;" in origin
    assert "recomputing the step gave finite values" in origin
    assert state.strip() == "the parameters are those of step 2; step 3 was not saved"
    assert "remedy: Use a lower `optimizer.lr`" in remedy
    assert not any(end.changed for end in ends)
    assert saved_steps(tmp_path / "run") == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("name", "more", "num_holders"),  # of the element, and so of what follows
    [
        ("zero1", (UNCLIPPED, "placement.dp_shard=R,S,M,R"), 1),  # gathers the updated parameters
        pytest.param("optimizer-in-backward", (), 2, marks=nightly),
        pytest.param("zero1", (UNCLIPPED, "placement.dp_shard=O,O,M,R"), 1, marks=nightly),
    ],
)
def test_updates_in_backward_stop_at_the_unit_with_the_bad_gradient(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...], num_holders: int
) -> None:
    overrides = (poisoned_spec(3), *WHOLE, *more)
    ends = ranks.run(2, train_with_fault, name, overrides, str(tmp_path / "run"))
    assert {end.code for end in ends} == {TrainingStopped.exit_code}
    (text,) = {end.text for end in ends}
    assert f"gradients are not finite: {TENSOR} has nan in 1 of " in text
    assert "units have the parameters of step 3, updated in its backward pass" in text
    of_rank = [{label for label in end.changed if label.endswith(" exp_avg")} for end in ends]
    assert all("layers.2.up exp_avg" in changed for changed in of_rank), "it came before"
    stay = ("layers.1.", "layers.0.", "table.")
    holders = [changed for changed in of_rank if not any(c.startswith(stay) for c in changed)]
    assert len(holders) == num_holders
    assert saved_steps(tmp_path / "run") == ["step-00000001", "step-00000002"]


@pytest.mark.nightly
def test_a_norm_that_overflows_stops_all_and_is_not_blamed_on_a_gradient(
    ranks: Ranks, tmp_path: Path
) -> None:
    overrides = (poisoned_spec(2 * MICRO + 1, "3.0e+38"), *SMALL)
    for end in ranks.run(2, train_with_fault, "zero3", overrides, str(tmp_path / "run")):
        assert "the gradient norm is not finite, although every gradient is finite" in end.text
        assert not end.changed


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pp-1f1b", "tp", "hsdp", "tp-zero3", "pp-zero2"])
@pytest.mark.parametrize("more", [(), (UNCLIPPED,)], ids=["clipped", "unclipped"])
def test_a_bad_gradient_stops_all_ranks_along_other_axes(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    shape = "model={layers: 4, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 260}"
    size = load(name).spec.world_size
    ends = ranks.run(
        size, train_with_fault, name, (shape, "batch.sequence=32", *more), str(tmp_path / "run"), 1
    )
    (text,) = {end.text for end in ends}
    assert "gradients are not finite: " in text
    assert "on rank 1\n" in text
    assert not any(end.changed for end in ends)


@pytest.mark.nightly  # by default only the ranks' own codes are seen, above and in test_train.py
def test_the_command_reports_a_bad_gradient_and_exits_4(tmp_path: Path) -> None:
    words = ["train", "zero1", poisoned_spec(2 * MICRO + 1), "--allow-import", *jobs.TINY[5:]]
    code, job = jobs.run_job([*words, "train.steps=4", "checkpoint.every=1"], cwd=tmp_path)
    assert code == 4, job.error
    assert f"gradients are not finite: {TENSOR} has nan in 1 of 10 elements" in job.error
    assert "the parameters are those of step 2; step 3 was not saved" in job.error
    assert "Traceback" not in job.error
    assert saved_steps(tmp_path / "runs" / "latest") == ["step-00000001", "step-00000002"]


# -- saving


def corrupt_state(program: Program, subject: Subject, key: str, value: float = NAN) -> str:
    """Corrupt one element of the last tensor of a state; return the tensor's name."""
    held = [
        part
        for part in chain(holdings.parameters(program), holdings.optimizer_state(program))
        if (part.subject, part.key) == (subject, key)
    ]
    held[-1].tensor.view(-1)[-1] = value
    return held[-1].name


def save_on_ranks(folder: str) -> tuple[str, str]:
    program = program_of("zero1")
    step(program, 0)
    name = corrupt_state(program, Subject.OPTIMIZER, "exp_avg_sq") if program.world.rank else ""
    try:
        saving.save_checkpoint(program, Path(folder), 1, Exchange(program.world))
    except TrainingStopped as stopped:
        return name, str(stopped)
    return name, ""


def test_no_rank_saves_a_nan_moment_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    (_, text), (name, other) = ranks.run(2, save_on_ranks, str(tmp_path))
    assert text == other
    assert f"step 1: optimizer state is not finite: {name}.exp_avg_sq has nan in 1 of " in text
    assert "elements on rank 1\n" in text and "no checkpoint of step 1 was written" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("subject", "key", "layout", "what"),
    [
        (Subject.PARAMETERS, "", "fp32", "parameters are not finite: "),
        (Subject.OPTIMIZER, "master", "zero16", "optimizer state is not finite: "),
    ],
)
def test_non_finite_states_are_not_saved(
    tmp_path: Path, subject: Subject, key: str, layout: str, what: str
) -> None:
    program = single_device_state(f"precision.layout={layout}")
    step(program, 0)
    name = corrupt_state(program, subject, key, float("-inf"))
    with pytest.raises(TrainingStopped, match="remedy: Continue from an earlier") as caught:
        saving.save_checkpoint(program, tmp_path, 1, Exchange(program.world))
    label = f"{name}.{key}" if key else name
    assert f"{what}{label} has -inf in 1 of " in str(caught.value)
    assert not list(tmp_path.iterdir())


# -- continuing


@pytest.fixture
def run_with_nan_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a run whose second checkpoint has valid hashes and a NaN moment, as earlier versions
    could write."""
    folder = RunFolder(tmp_path / "run")
    program = single_device_state()
    exchange = Exchange(program.world)
    step(program, 0)
    saving.save_checkpoint(program, folder.checkpoints, 1, exchange)
    step(program, 1)
    corrupt_state(program, Subject.OPTIMIZER, "exp_avg")
    with monkeypatch.context() as before:
        before.setattr(finite, "require_finite", lambda *_: None)
        saving.save_checkpoint(program, folder.checkpoints, 2, exchange)
    return folder


def test_a_non_finite_checkpoint_is_skipped_for_an_older_one(
    run_with_nan_checkpoint: RunFolder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, other = single_device_state(), single_device_state()
    exchange = Exchange(program.world)
    monkeypatch.setattr(logging.getLogger("ptrain"), "propagate", True)
    assert (
        resume_training(
            program, run_with_nan_checkpoint, str(run_with_nan_checkpoint.path), exchange
        )
        == 1
    )
    (warning,) = [line for line in caplog.messages if line.startswith("skipped: checkpoint ")]
    assert manifest.folder_name(2) in warning
    assert "optimizer state is not finite: " in warning and "exp_avg has nan in 1 of" in warning
    first = run_with_nan_checkpoint.checkpoints / manifest.folder_name(1)
    checkpoint.load(other, first, checkpoint.verify_files(first, exchange), exchange)
    expected = full_state(other)
    assert all(torch.equal(value, expected[name]) for name, value in full_state(program).items())


def test_a_named_or_only_non_finite_checkpoint_is_rejected_with_its_tensor(
    run_with_nan_checkpoint: RunFolder,
) -> None:
    program = single_device_state()
    named = run_with_nan_checkpoint.checkpoints / manifest.folder_name(2)
    with pytest.raises(PtrainError, match=r"cannot be used: .*exp_avg has nan in 1 of") as caught:
        resume_training(program, run_with_nan_checkpoint, str(named), Exchange(program.world))
    assert caught.value.exit_code == 2
