"""The log of a training with a scaled loss, and the warning about a slow CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.interpreter.loss import LossScale
from ptrain.runtime.comm import Mesh
from ptrain.runtime.queue import DeviceQueue
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import CreateMesh
from ptrain.train import session
from ptrain.train.exchange import HostStepCheck, StepFigures
from ptrain.train.folder import RunFolder
from ptrain.train.journal import Journal, StepReport

CPU = torch.device("cpu")


def spec_of(layout: str) -> Spec:
    return require_runnable(load("ddp", ["mesh.dp_replicate=1", f"precision.layout={layout}"]))


def test_every_step_logs_its_scale_and_skipped_steps_count(
    tmp_path: Path,
) -> None:
    scaling = LossScale(Mesh(CreateMesh(axes=(), degrees=()), World()), ())
    with Journal(spec_of("fp16"), RunFolder(tmp_path), quiet=True) as journal:
        for step, overflows in enumerate((False, True, True, False), 1):
            scaling.update_overflow_flag([torch.full((2,), math.inf if overflows else 1.0)])
            scaling.update()
            figures = StepFigures(
                loss=5.0, is_sound=True, gradient_norm=math.inf if overflows else 1.0
            )
            look = HostStepCheck(DeviceQueue(CPU), figures, scaling)
            look.start_copy()
            journal.write_step(StepReport(step, look.wait_for_figures(), 1e-3, 0.1))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss_scale"] for row in rows] == [65536.0, 32768.0, 16384.0, 16384.0]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2]
    assert ["gradient_norm" in row for row in rows] == [True, False, False, True]


@pytest.mark.parametrize(("layout", "dtype"), [("zero16", "bf16"), ("fp16", "fp16")])
def test_a_cpu_without_the_dtype_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, layout: str, dtype: str
) -> None:
    monkeypatch.setattr(session, "is_native", lambda asked: asked is DType.FP32)
    assert f"{dtype} is emulated" in session.emulated_line(spec_of(layout), CPU)
    assert not session.emulated_line(spec_of("fp32"), CPU)
    assert not session.emulated_line(spec_of(layout), torch.device("cuda"))
    monkeypatch.setattr(session, "is_native", lambda asked: True)
    assert not session.emulated_line(spec_of(layout), CPU)
