"""What a pipeline's stage does around a pass: those of a tiny model's stage in the middle, in which
other stages' modules have stand-ins, against its layer's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ptrain.axes.data.run.wrapped import ParameterWrap
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.stage import BoundaryTensor, PassCallbacks, StageRunner
from ptrain.axes.pipeline.run.staged import LocalStage
from ptrain.axes.pipeline.schedule import Action
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.calibration.bench import Bench
from ptrain.models.batch import SampleBatch, TokenPair
from ptrain.models.build import build
from ptrain.models.initialize import initialize
from ptrain.models.units import ROOT
from ptrain.plan.lower import own_facts
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind

_SAMPLES, _TOKENS, _HIDDEN = 1, 4, 16
_STAGES = 3
_MIDDLE = 1
_PASSES = 2  # forward and backward


def pipeline_pass(bench: Bench, rounds: int) -> float:
    """Seconds of one pass beside those of what it computes."""
    device = bench.device
    spec = _spec(_STAGES)
    runner, layer = _runner(spec, device), _layer(device)
    x = torch.ones((_SAMPLES, _TOKENS, _HIDDEN), device=device)
    tokens = torch.zeros((_SAMPLES, _TOKENS), dtype=torch.int64, device=device)
    samples = SampleBatch(TokenPair(tokens, tokens))

    def passes() -> None:
        runner.begin(1)
        runner.compute(Action(Kind.FORWARD, _MIDDLE, 0), x.clone(), samples)
        runner.compute(Action(Kind.BACKWARD, _MIDDLE, 0), x, samples)

    def plain() -> None:
        layer(x.clone().requires_grad_()).backward(x)

    for work in (passes, plain):
        work()
    differences = [_seconds(bench, passes) - _seconds(bench, plain) for _ in bench.rounds(rounds)]
    return statistics.median(differences) / _PASSES


def _spec(layers: int) -> Spec:
    """Of a stage for each layer."""
    written: dict[str, object] = {
        "model": {
            "family": "llama",
            "layers": layers,
            "hidden": _HIDDEN,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 16,
            "vocab": 260,
            "tied": False,
        },
        "mesh": {"pp": layers} if layers > 1 else {},
        "placement": {"pp": "S,S,S,R"} if layers > 1 else {},
        "batch": {"global": layers * _SAMPLES, "micro": _SAMPLES, "sequence": _TOKENS},
    }
    return load(written).spec


def _built(spec: Spec) -> nn.Module:
    assert isinstance(spec.model, ModelShape), "a built-in model"
    model = build(spec.model, sequence=_TOKENS)
    initialize(model, seed=0)
    return model


def _layer(device: torch.device) -> nn.Module:
    """A model of one layer, given and giving hidden states."""
    model = _built(_spec(1))
    model.embed, model.norm, model.head = nn.Identity(), nn.Identity(), nn.Identity()
    return model.to(device)


def _runner(spec: Spec, device: torch.device) -> StageRunner:
    facts = own_facts(spec)
    stages, chain = stages_of(spec, facts), chain_of(spec, facts)
    part = part_of(_built(spec), stages, _MIDDLE, chain).to(device)

    def forward(model: Any, samples: SampleBatch) -> torch.Tensor:
        output: torch.Tensor = model(samples.inputs)
        return output

    def unused(*_: object) -> Any:
        raise AssertionError("a stage in the middle has no loss")

    return StageRunner(
        LocalStage(_MIDDLE, part, ParameterWrap(part, ((ROOT,),))),
        len(stages),
        BoundaryTensor((_SAMPLES, _TOKENS, _HIDDEN), torch.float32, device),
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
