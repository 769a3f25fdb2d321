"""What a pipeline's stage does around a pass: a tiny stage's passes against its module's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ptrain.axes.data.run.wrapped import ParameterWrap
from ptrain.axes.pipeline.run.stage import BoundaryTensor, PassCallbacks, StageRunner
from ptrain.axes.pipeline.run.staged import LocalStage
from ptrain.axes.pipeline.schedule import Action
from ptrain.calibration.bench import Bench
from ptrain.models.batch import SampleBatch
from ptrain.models.units import ROOT
from ptrain.timeline import Kind

_SHAPE = (1, 4, 8)
_PASSES = 2  # forward and backward


def pipeline_pass(bench: Bench, rounds: int) -> float:
    """Seconds of one pass beside those of what it computes."""
    module = nn.Linear(_SHAPE[-1], _SHAPE[-1]).to(bench.device)
    runner, x = _runner(module, bench.device), torch.ones(_SHAPE, device=bench.device)
    samples: Any = None  # a stage in the middle sees none

    def passes() -> None:
        runner.begin(1)
        runner.compute(Action(Kind.FORWARD, 1, 0), x.clone(), samples)
        runner.compute(Action(Kind.BACKWARD, 1, 0), x, samples)
        module.zero_grad()

    def plain() -> None:
        module(x.clone().requires_grad_()).backward(x)
        module.zero_grad()

    for work in (passes, plain):
        work()
    differences = [_seconds(bench, passes) - _seconds(bench, plain) for _ in bench.rounds(rounds)]
    return statistics.median(differences) / _PASSES


def _runner(module: nn.Module, device: torch.device) -> StageRunner:
    def forward(model: Any, _: SampleBatch) -> torch.Tensor:
        output: torch.Tensor = model()
        return output

    def unused(*_: object) -> Any:
        raise AssertionError("a stage in the middle has no loss")

    return StageRunner(
        LocalStage(1, module, ParameterWrap(module, ((ROOT,),))),
        3,
        BoundaryTensor(_SHAPE, torch.float32, device),
        PassCallbacks(
            forward=forward,
            given=lambda _: nullcontext(),
            loss=unused,
            evaluated=unused,
            seed=unused,
            enter=lambda *_: None,
        ),
    )


def _seconds(bench: Bench, work: Callable[[], None]) -> float:
    bench.together()
    began = bench.host_seconds()
    work()
    bench.settle()
    return bench.host_seconds() - began
