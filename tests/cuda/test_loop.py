"""On a GPU the host launches a step while the device executes the previous one, without
synchronizing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.errors import TrainingStopped
from ptrain.runtime.queue import DeviceQueue
from ptrain.train import loop, session
from ptrain.train.options import Options
from tests.models_poisoned import TENSOR

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a training on a GPU needs one"),
]

FIRST, STEPS = 5, 9  # the meters run in steps 1 and 2 (from 0)
ALONE = {
    "ddp": "mesh.dp_replicate=1",
    "zero1": "mesh.dp_shard=1",
    "zero3": "mesh.dp_shard=1",
}


def train(folder: Path, name: str, *more: str) -> int:
    words = (ALONE[name], "device=cuda", f"train.steps={STEPS}", *more)
    options = Options(
        spec=name, overrides=words, run_dir=folder, quiet=True, allow_import=True, force=True
    )
    return session.train_rank(options)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("optimizer.clip=null",),
        ("precision.layout=bf16",),
        ("precision.layout=bf16", "optimizer.clip=null"),
    ],
)
def test_the_host_never_waits_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: tuple[str, ...]
) -> None:
    """torch raises on a synchronization."""
    local_batch = loop.local_batch

    def strict(program: Any, source: Any, step: int, *split: Any) -> Any:
        is_strict = FIRST <= step < STEPS - 1
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        return local_batch(program, source, step, *split)

    monkeypatch.setattr(loop, "local_batch", strict)
    try:
        assert train(tmp_path, name, "model.preset=llama-tiny", *more) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
    assert all(row["seconds"] > 0 and math.isfinite(row["loss"]) for row in rows(tmp_path))


def test_losses_equal_those_of_a_synchronizing_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("zero3", "model.preset=llama-tiny", "deterministic=true")
    assert train(tmp_path / "late", *words) == 0
    monkeypatch.setattr(DeviceQueue, "runs_ahead", False)
    assert train(tmp_path / "waits", *words) == 0
    late, waits = ([row["loss"] for row in rows(tmp_path / way)] for way in ("late", "waits"))
    assert late == pytest.approx(waits, rel=1e-6)


def test_a_gradient_that_is_not_finite_stops_it_before_the_next_checkpoint(tmp_path: Path) -> None:
    arguments = "arguments: {at: 9, rank: 0, value: nan}"  # of the third step, four passes each
    model = f"model={{target: tests.models_poisoned:necks, {arguments}}}"
    sizes = ("batch.sequence=32", "batch.global=4", "batch.micro=1", "checkpoint.every=2")
    with pytest.raises(TrainingStopped, match=r"step 3: the loss is .*gradients are not") as caught:
        train(tmp_path, "zero3", model, *sizes)
    assert TENSOR not in str(caught.value)  # it is another pass that computes them again
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
