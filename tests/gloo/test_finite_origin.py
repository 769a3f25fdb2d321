"""A message about non-finite values names the rank and the place where they originated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.interpreter.program import Program, interpret
from ptrain.spec.load import load
from ptrain.train import session
from tests.gloo import sessions
from tests.models_poisoned import BAD
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

MODEL = "tests.models_poisoned"
STEP, RANK, MICRO = 1, 1, 1  # of the poisoned sample, all from 0
ACCUMULATE = 2
nightly = pytest.mark.nightly
NAN = float("nan")


def job(name: str, size: int, path: Path, *more: str) -> tuple[str, ...]:
    axis = {"ddp": "dp_replicate", "pp-1f1b": "pp"}.get(name, "dp_shard")
    batch = f"batch={{accumulate: {ACCUMULATE}, micro: 1, sequence: 8}}"
    sizes = (f"mesh.{axis}={size}", batch)
    return (name, f"data.path={path}", *sizes, "train.steps=4", *more)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    ids = np.random.default_rng(0).integers(0, BAD, 8 * 40 + 20)
    np.save(path, ids.astype(np.uint16))
    return path


def poison(path: Path, words: tuple[str, ...], rank: int) -> None:
    """Write BAD into the sample that is micro-batch MICRO of a data rank in step STEP."""
    spec = load(words[0], words[1:]).spec
    degree = spec.data_degree
    local = read_batch(
        open_corpus(spec.data), spec=spec, step=STEP, data_index=rank, data_degree=degree
    )
    ids = np.load(path)
    ids[8 * local.sample_ids[MICRO] + 3] = BAD
    np.save(path, ids)


def model(where: str) -> tuple[str, ...]:
    if where == "loss":
        return (f"model={{target: '{MODEL}:reading'}}", f"loss.target={MODEL}:loss")
    return (f"model={{target: '{MODEL}:reading', arguments: {{where: {where}}}}}",)


@pytest.mark.parametrize(
    ("name", "size", "where", "place"),
    [
        ("zero3", 2, "output", "the output of layers.1 has nan in 64 of 64 elements"),
        ("zero3", 2, "gradient", "the gradient of the output of layers.0 has nan in 64 of 64"),
        ("zero3", 2, "parameter", "the gradient of layers.1.spread has nan in 10 of 10 elements"),
        ("zero3", 2, "loss", "the loss has nan in 1 of 1 elements"),
        ("ddp", 4, "output", "the output of layers.1 has nan in 64 of 64 elements"),
        ("ddp", 4, "gradient", "the gradient of the output of layers.0 has nan in 64 of 64"),
        ("ddp", 4, "loss", "the loss has nan in 1 of 1 elements"),
        pytest.param("ddp", 2, "parameter", "the gradient of layers.1.spread", marks=nightly),
        pytest.param("zero1", 2, "parameter", "the gradient of layers.1.spread", marks=nightly),
        pytest.param("zero2", 4, "gradient", "the gradient of the output of", marks=nightly),
        pytest.param("fsdp-mixed", 2, "output", "the output of layers.1 has nan", marks=nightly),
        pytest.param("zero-offload", 2, "parameter", "the gradient of layers.1.", marks=nightly),
    ],
)
def test_the_rank_the_micro_batch_and_the_module_are_named(
    ranks: Ranks, tmp_path: Path, tokens: Path, name: str, size: int, where: str, place: str
) -> None:
    words = (*job(name, size, tokens), *model(where))
    poison(tokens, words, RANK)
    ends = sessions.train_on_ranks(ranks, size, *words, "--allow-import", folder=tmp_path / "run")
    assert {end.code for end in ends} == {4}, ends[0].error
    for end in ends:
        assert f"step {STEP + 1}: the loss is " in end.error
        assert (
            f"first on rank {RANK}, micro-batch {MICRO + 1} of {ACCUMULATE}: {place}" in end.error
        )
        assert (
            f"the parameters are those of step {STEP}; step {STEP + 1} was not saved" in end.error
        )


WHOLE = ("batch.accumulate=1", "batch.micro=4")


def test_updates_in_backward_name_the_rank_of_the_loss(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    words = (*job("zero1", 2, tokens), *model("loss"), *WHOLE, "optimizer.clip=null")
    poison(tokens, words, RANK)
    words = (*words, "placement.dp_shard=R,S,M,R")
    ends = sessions.train_on_ranks(ranks, 2, *words, "--allow-import", folder=tmp_path / "run")
    assert {end.code for end in ends} == {4}, ends[0].error
    found = f"step {STEP + 1}: the loss is nan\n  the loss is not finite on rank {RANK}\n"
    assert all(found in end.error for end in ends)


PLANTED = "blocks.1.attention.value"
SHAPE = "model={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 260}"


def train_with_fault(words: tuple[str, ...], first: int, most: int) -> sessions.RankResult:
    """Train on this rank. On rank 1 PLANTED returns nan from call `first` on (from 1), and on all
    ranks it raises after `most` calls."""

    def changed(*args: object, **kwargs: object) -> Program:
        program = interpret(*args, **kwargs)  # type: ignore[arg-type]
        count = 0

        def plant(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count > most:
                raise ValueError("no call more")
            return output * (NAN if count >= first and program.world.rank == 1 else 1.0)

        modules = dict(program.pieces[0].module.named_modules())
        (name,) = [name for name in modules if name.endswith(PLANTED)]
        modules[name].register_forward_hook(plant)
        output = modules[name.replace("value", "output")]
        output.register_forward_hook(lambda _, __, values: values * 1.0)  # when all ranks have sent
        return program

    with MonkeyPatch.context() as patch:
        patch.setattr(session, "interpret", changed)
        return sessions.train_without_launcher(words)


def test_a_rank_that_only_received_the_value_is_not_named(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    sizes = (SHAPE, f"data.path={tokens}", "batch.global=4", "batch.micro=2", "batch.sequence=8")
    words = ("tp", *sizes, "train.steps=3", "--run-dir", str(tmp_path / "run"))
    for end in ranks.run(2, train_with_fault, words, 3, 99):  # the second step of two micro-batches
        place = f"{PLANTED} has nan in 128 of 128 elements"
        assert f"first on rank 1, micro-batch 1 of 2: the output of {place}\n" in end.error


def test_a_step_that_fails_again_on_replay_is_not_blamed_on_a_device(
    ranks: Ranks, tmp_path: Path, tokens: Path
) -> None:
    words = (*job("ddp", 2, tokens, SHAPE), "--run-dir", str(tmp_path / "run"))
    for end in ranks.run(2, train_with_fault, words, 3, 4):  # the second step of two micro-batches
        assert end.code == 4
        assert "step 2: the loss is nan\n  the loss is not finite on rank 1; " in end.error
        assert "recomputing the step failed on rank " in end.error
        assert ": ValueError: no call more\n" in end.error and "a device may" not in end.error
