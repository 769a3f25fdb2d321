"""The record of a rank that runs out of memory names the phase, the micro-batch and the module.

An error of the allocator is planted at a node of the graph, in a module, or in the optimizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ptrain.cost import Phase
from ptrain.interpreter.program import Program
from ptrain.train import failure_point
from ptrain.train.options import parse_options
from ptrain.train.session import train_rank

FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
MODULE = "blocks.1.mlp"


def fail(*_: object) -> None:
    raise RuntimeError(FULL)


def plant(monkeypatch: pytest.MonkeyPatch, phase: Phase) -> None:
    """Make allocations fail in this phase, in the second micro-batch of the second step."""
    watch = failure_point.FailurePoint.observe_program

    def watch_and_fail(point: failure_point.FailurePoint, program: Program) -> None:
        watch(point, program)
        calls = 0

        def on_forward(module: Any, args: Any, output: Any) -> None:
            nonlocal calls
            calls += point.current == (Phase.FORWARD, 1)
            if calls == 2 and point.current == (Phase.FORWARD, 1):
                if phase is Phase.FORWARD:
                    fail()
                elif phase is Phase.BACKWARD:
                    output.grad_fn.register_prehook(fail)
                else:
                    monkeypatch.setattr(program, "_run_update", fail)

        program.model.get_submodule(MODULE).register_forward_hook(on_forward)

    monkeypatch.setattr(failure_point.FailurePoint, "observe_program", watch_and_fail)


def train(folder: Path, *words: str) -> dict[str, Any]:
    """Train on one rank until it runs out of memory, and return its record."""
    spec = ["ddp", "mesh.dp_replicate=1", "batch.micro=1", "batch.accumulate=2", "batch.global=2"]
    small = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=1"]
    words = (*spec, *small, "train.steps=3", *words, "--run-dir", str(folder))
    with pytest.raises(RuntimeError, match="can't allocate"):
        train_rank(parse_options(words))
    record: dict[str, Any] = json.loads((folder / "logs" / "rank0.memory.json").read_text())
    return record


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE])
def test_the_record_names_phase_micro_batch_and_module(tmp_path, monkeypatch, phase):
    plant(monkeypatch, phase)
    record = train(tmp_path / "run")
    assert record["requested_bytes"] == 4096
    assert (record["step"], record["phase"]) == (2, phase.value)
    if phase is Phase.UPDATE:
        assert (record["micro_batch"], record["module"]) == (None, "")
    else:
        assert record["micro_batch"] == 2
        assert record["module"].startswith(MODULE)
    assert record["live_bytes"]["parameters"] > 0 and record["live_bytes"]["optimizer"] > 0
    assert "activations" not in record["live_bytes"], "the CPU's allocator does not count them"


def test_a_recomputed_block_is_named_in_the_backward_pass(tmp_path, monkeypatch):
    plant(monkeypatch, Phase.BACKWARD)
    record = train(tmp_path / "run", "activations=M", "recompute=full")
    assert record["phase"] == "backward" and record["module"].startswith(MODULE)


def test_a_failure_before_the_first_step_names_the_activity(tmp_path, monkeypatch):
    monkeypatch.setattr(Program, "__init__", fail)
    record = train(tmp_path / "run")
    assert record["activity"] == "building the model"
    assert record["phase"] is None and record["step"] is None


def test_an_evaluation_is_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr("ptrain.interpreter.loss.StepLoss.evaluate_batch", fail)
    record = train(tmp_path / "run", "eval.every=1", "eval.batches=1")
    assert (record["activity"], record["phase"]) == ("evaluating", None)


def test_other_errors_leave_no_record_and_a_new_attempt_removes_an_old_one(tmp_path, monkeypatch):
    class World:
        rank = 0

    class Folder:
        def memory_failures(self) -> list[Path]:
            return [old]

    old = tmp_path / "rank0.memory.json"
    old.touch()
    with (
        pytest.raises(RuntimeError, match="shape"),
        failure_point.record_out_of_memory(Folder(), World()),
    ):
        raise RuntimeError("shape mismatch")
    assert not old.exists()
