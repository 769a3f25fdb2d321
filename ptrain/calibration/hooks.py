"""Measure the overhead of wrappers and pipeline stages beyond computation and communication.

Wrappers: tiny modules with and without DDP, FSDP2 and the like; the time spent waiting for other
ranks is subtracted. Stages: the middle stage of a tiny model, with stand-ins for its neighbours'
modules, against its layers alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.flat import ParameterWrap, WrappedModel
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.stage import BoundaryTensor, LocalStage, PassCallbacks, StageRunner
from ptrain.axes.pipeline.schedule import Action
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.axes.tensor.run.apply import parallelize
from ptrain.calibration.bench import Bench, Between, Points, RateSheet
from ptrain.cost import Collective, Phase
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Units
from ptrain.meters.blocked import Stopwatch
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.initialize import build, initialize
from ptrain.models.objective import SampleBatch, TokenPair
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower, own_facts
from ptrain.rooms.mesh import Mesh
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.rates import Hook
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind

_SAMPLES, _TOKENS, _HIDDEN = 1, 4, 16
_STAGES = 3
_MIDDLE = 1
_PASSES = 2  # forward and backward


def pipeline_pass(bench: Bench, rounds: int) -> float:
    """Seconds of one pass beside those of what it computes."""
    device = bench.device
    spec = _stages_spec(_STAGES)
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


def _stages_spec(layers: int) -> Spec:
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
    model = _built(_stages_spec(1))
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


_WIDTH, _ROWS, _LAYERS = 8, 4, 4
_SETTING_UP = 3  # steps
_UNIT_BYTES = 4 * _LAYERS * (_WIDTH + 1) * _WIDTH
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
_GATHERS = (Collective.ALL_GATHER,)
_DATA = {  # axis, tuple, dials, and the hooks of gathers and of reductions
    "dp_shard: S*,S,S,R": ((), Hook.FSDP2_GATHER, Hook.FSDP2_REDUCE),
    "dp_replicate: R,R,R,R": ((f"bucket={_UNIT_BYTES}",), None, Hook.DDP_BUCKET),
    "dp_shard: S*,S,R,R": ((), Hook.FLAT_GATHER, Hook.FLAT_REDUCE),
}


def hooks(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Of one rank only a stage's pass: nothing else has anything to send."""
    sheet.note("hooks", Hook.PIPELINE_PASS, seconds=pipeline_pass(bench, points.rounds))
    if bench.world.size == 1:
        return
    for placement, (dials, gather, reduction) in _DATA.items():
        axis, _, modes = placement.partition(": ")
        spec = _spec(bench, axis, modes, dials)
        wrapped, mesh = _wrapped(spec, bench, points)
        plain = ParameterWrap(_stack(bench, points.units), _units(points))
        _note_data(bench, sheet, points, (wrapped, plain), mesh, (gather, reduction))
    _cut_product(bench, sheet, points)


def _spec(bench: Bench, axis: str, modes: str, dials: Iterable[str] = ()) -> Spec:
    mapping: dict[str, object] = {
        "model": {"preset": "llama-tiny"},  # nothing of it is built: a spec has a model
        "mesh": {axis: bench.world.size},
        "placement": {axis: modes},
        "batch": {"micro": 1, "sequence": 8},
    }
    return load(mapping, tuple(dials)).spec


def _units(points: Points) -> Units:
    return (*((str(number),) for number in range(points.units)), (ROOT,))


def _stack(bench: Bench, units: int) -> nn.Sequential:
    """Units of so many parameters as a block has, as narrow as they can be."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)), Between())
        for _ in range(units)
    )
    return nn.Sequential(*layers).to(bench.device)


def _wrapped(spec: Spec, bench: Bench, points: Points) -> tuple[WrappedModel, Mesh]:
    plan = lower(spec, ModelFacts.of_units(_units(points)))
    mesh = Mesh(plan.mesh, bench.world)
    return apply(_stack(bench, points.units), plan, mesh, mesh.registry), mesh


Halves = dict[Phase, float]


def _note_data(
    bench: Bench,
    sheet: RateSheet,
    points: Points,
    models: tuple[WrappedModel, WrappedModel],
    mesh: Mesh,
    pair: tuple[Hook | None, Hook],
) -> None:
    """A gather costs what forward takes more, where one is; a reduction what backward does, without
    the gathers in it."""
    _warm_up(bench, models)
    meter = _metered(bench, models[0], mesh)
    excess = _excess(bench, points.rounds, models, mesh)
    gather, reduction = pair
    of_gather = 0.0
    if gather is not None:
        of_gather = max(0.0, excess[Phase.FORWARD]) / _calls(meter, Phase.FORWARD, _GATHERS)
        sheet.note("hooks", gather, seconds=of_gather)
    again = _calls(meter, Phase.BACKWARD, _GATHERS, least=0)
    rest = excess[Phase.BACKWARD] - again * of_gather
    if gather is None:
        rest += excess[Phase.FORWARD]
    sheet.note("hooks", reduction, seconds=rest / _calls(meter, Phase.BACKWARD, _REDUCTIONS))


def _warm_up(bench: Bench, models: Iterable[WrappedModel]) -> None:
    """What is set up in the first steps: DDP makes its buckets anew in the second one."""
    for model in models:
        for _ in range(_SETTING_UP):
            _halves(bench, model)


def _calls(
    meter: TrafficMeter, phase: Phase, collectives: Iterable[Collective], *, least: int = 1
) -> int:
    rows = (row for row in meter.rows() if row.key.phase is phase)
    return max(least, sum(row.calls for row in rows if row.key.collective in collectives))


def _metered(bench: Bench, model: WrappedModel, mesh: Mesh) -> TrafficMeter:
    meter = TrafficMeter(mesh.registry, mesh.axes_by_group())
    with meter:
        _halves(bench, model, tell=lambda phase: meter.phase(phase, 0))
    return meter


def _excess(
    bench: Bench, rounds: int, models: tuple[WrappedModel, WrappedModel], mesh: Mesh
) -> Halves:
    """The median of what each half takes more of the first than of the second, which take turns;
    without the time in which the first one waits, which the stopwatch counts, slowing both, where
    the bench's clock goes on meanwhile."""
    differences: dict[Phase, list[float]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    groups, rank = mesh.axes_by_group(), bench.world.rank
    for _ in bench.rounds(rounds):
        first, second = (
            _halves(
                bench,
                model,
                stopwatch=None if bench.is_shared else Stopwatch(groups, rank=rank),
            )
            for model in models
        )
        for phase, more in differences.items():
            more.append(first[phase] - second[phase])
    return {phase: statistics.median(more) for phase, more in differences.items()}


def _halves(
    bench: Bench,
    wrapped: WrappedModel,
    *,
    tell: Callable[[Phase], object] = lambda _: None,
    stopwatch: Stopwatch | None = None,
) -> Halves:
    """Seconds of the host in one forward and one backward pass, without those that the stopwatch
    counts."""
    x = torch.ones(_ROWS, _WIDTH, device=bench.device)

    def now() -> float:
        waited = stopwatch.rows() if stopwatch else ()
        return bench.host_seconds() - sum(row.seconds for row in waited)

    bench.together()
    with stopwatch or nullcontext():
        began = now()
        with wrapped.micro_batch(is_last=True):
            tell(Phase.FORWARD)
            output = wrapped.module(x)
            between = now()
            tell(Phase.BACKWARD)
            output.sum().backward()
        with torch.no_grad():
            wrapped.reduce_gradients()
        ended = now()
    tell(Phase.UPDATE)
    with torch.no_grad():
        wrapped.finish_update()
        wrapped.clear_gradients()
    bench.settle()
    return {Phase.FORWARD: between - began, Phase.BACKWARD: ended - between}


_LINEARS, _PRODUCTS = 3, 3  # of a sub-block; of one of them, forward and backward


class _SubBlock(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Operators that tp cuts, as wide as `width` between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, width, bias=False)
        self.up = nn.Linear(_WIDTH, width, bias=False)
        self.down = nn.Linear(width, _WIDTH, bias=False)
        self.between = Between()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.between(hidden)


def _cut_product(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Sub-blocks cut by ptrain's plan, against those that a rank has of them."""
    spec = _spec(bench, Axis.TP.value, "S,S,S,R")
    roles = (
        ("*", Role.WHOLE_INPUT),
        ("*.gate", Role.COLUMN),
        ("*.up", Role.COLUMN),
        ("*.down", Role.ROW),
    )
    plan = lower(spec, ModelFacts.of_units(((ROOT,),), roles))
    assert plan.tensor is not None, "a plan that cuts"
    mesh = Mesh(plan.mesh, bench.world)
    ranks = bench.world.size
    cut, plain = (
        nn.Sequential(*(_SubBlock(width) for _ in range(points.units))).to(bench.device)
        for width in (_WIDTH * ranks, _WIDTH)
    )
    parallelize(cut, plan.tensor, mesh.submesh((Axis.TP,)), mesh.registry)
    models = ParameterWrap(cut, ((ROOT,),)), ParameterWrap(plain, ((ROOT,),))
    _warm_up(bench, models)
    excess = sum(_excess(bench, points.rounds, models, mesh).values())
    products = points.units * _LINEARS * _PRODUCTS
    sheet.note("hooks", Hook.CUT_PRODUCT, seconds=excess / products)
