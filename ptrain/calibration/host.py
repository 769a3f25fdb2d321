"""Measure the time that the host adds to operators: tiny layers' passes against their operators
called one by one. The difference is modules, autograd, and code that only inspects a tensor. With a
GPU it is the full time to issue them.

This time is divided by the number of operators that a clock counts. So anything else in a pass (a
copy for each tensor that goes off the device, torch's checks between the halves of a backward pass)
is part of those seconds.

The overhead of wrappers is measured on tiny modules with and without DDP, FSDP2 and the like; the
time spent waiting for other ranks is subtracted. The overhead of stages is the middle stage of a
tiny model, with stand-ins for its neighbours' modules, against its layers alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ptrain.activations.run.apply import keep
from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.flat import ParameterWrap, WrappedModel
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.passes import backward_input, backward_weight
from ptrain.axes.pipeline.run.stage import BoundaryTensor, LocalStage, PassCallbacks, StageRunner
from ptrain.axes.pipeline.schedule import Action
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.axes.tensor.run.apply import parallelize
from ptrain.calibration.bench import Bench, Between, Points, Rows
from ptrain.cost import Collective, Phase
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.facts.model import LayerWork, ModelFacts, Operator, PassWork
from ptrain.facts.stages import Units
from ptrain.meters.blocked import Stopwatch
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.initialize import build, initialize
from ptrain.models.ledger import OperatorMode
from ptrain.models.objective import SampleBatch, TokenPair
from ptrain.models.units import ROOT, blocks_of
from ptrain.models.work import sizes_of
from ptrain.plan.lower import lower, own_facts
from ptrain.rates.pace import around
from ptrain.rooms.comm import Mesh, Registry
from ptrain.rooms.torch import Tiers
from ptrain.spec.activations import FULL, PLAIN, SELECTIVE, Kept
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.role import Role
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.steps.step import Keep
from ptrain.timeline import Kind
from ptrain.units import grouped

# so few features that operators compute next to nothing
_HOOK_SAMPLES, _TOKENS, _FEATURES = 1, 4, 16
_STAGES = 3
_MIDDLE = 1
_PASSES = 2  # forward and backward


def pipeline_pass(bench: Bench, rounds: int) -> float:
    """Seconds of one pass beside those of what it computes."""
    device = bench.device
    runner = _runner(_stages_spec(_STAGES), device)
    layer = _model(_stages_spec(1), device)
    x = torch.ones((_HOOK_SAMPLES, _TOKENS, _FEATURES), device=device)
    tokens = torch.zeros((_HOOK_SAMPLES, _TOKENS), dtype=torch.int64, device=device)
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
            "hidden": _FEATURES,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 16,
            "vocab": 260,
            "tied": False,
        },
        "mesh": {"pp": layers} if layers > 1 else {},
        "placement": {"pp": "S,S,S,R"} if layers > 1 else {},
        "batch": {
            "global": layers * _HOOK_SAMPLES,
            "micro": _HOOK_SAMPLES,
            "sequence": _TOKENS,
        },
    }
    return load(written).spec


def _built(spec: Spec) -> nn.Module:
    assert isinstance(spec.model, ModelShape), "only built-in models"
    model = build(spec.model, sequence=_TOKENS)
    initialize(model, seed=0)
    return model


def _runner(spec: Spec, device: torch.device) -> StageRunner:
    facts = own_facts(spec)
    stages, chain = stages_of(spec, facts), chain_of(spec, facts)
    part = part_of(_built(spec), stages, _MIDDLE, chain).to(device)

    def forward(model: Any, samples: SampleBatch) -> torch.Tensor:
        output: torch.Tensor = model(samples.inputs)
        return output

    def unused(*_: object) -> Any:
        raise AssertionError("a middle stage has no loss")

    return StageRunner(
        LocalStage(_MIDDLE, part, ParameterWrap(part, ((ROOT,),))),
        len(stages),
        BoundaryTensor((_HOOK_SAMPLES, _TOKENS, _FEATURES), torch.float32, device),
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


def hooks(bench: Bench, points: Points) -> Rows:
    """Of one rank only a stage's pass: nothing else has anything to send."""
    yield (Hook.PIPELINE_PASS,), pipeline_pass(bench, points.rounds)
    if bench.world.size == 1:
        return
    for placement, (dials, gather, reduction) in _DATA.items():
        axis, _, modes = placement.partition(": ")
        wrapped, mesh = _wrapped(_placed_spec(bench, axis, modes, dials), bench, points)
        plain = ParameterWrap(_stack(bench, points.units), _units(points))
        yield from _of_data(bench, points, (wrapped, plain), mesh, (gather, reduction))
    yield (Hook.CUT_PRODUCT,), _cut_product(bench, points)


def _placed_spec(bench: Bench, axis: str, modes: str, dials: Iterable[str] = ()) -> Spec:
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


def _of_data(
    bench: Bench,
    points: Points,
    models: tuple[WrappedModel, WrappedModel],
    mesh: Mesh,
    pair: tuple[Hook | None, Hook],
) -> Rows:
    """A gather costs what forward takes more, where one is; a reduction what backward does, without
    the gathers in it."""
    _warm_up(bench, models)
    meter = _metered(bench, models[0], mesh)
    excess = _excess(bench, points.rounds, models, mesh)
    gather, reduction = pair
    of_gather = 0.0
    if gather is not None:
        of_gather = max(0.0, excess[Phase.FORWARD]) / _calls(meter, Phase.FORWARD, _GATHERS)
        yield (gather,), of_gather
    again = _calls(meter, Phase.BACKWARD, _GATHERS, least=0)
    rest = excess[Phase.BACKWARD] - again * of_gather
    if gather is None:
        rest += excess[Phase.FORWARD]
    yield (reduction,), rest / _calls(meter, Phase.BACKWARD, _REDUCTIONS)


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


def _cut_product(bench: Bench, points: Points) -> float:
    """Sub-blocks cut by ptrain's plan, against those that a rank has of them."""
    spec = _placed_spec(bench, Axis.TP.value, "S,S,S,R")
    roles = (
        ("*", Role.WHOLE_INPUT),
        ("*.gate", Role.COLUMN),
        ("*.up", Role.COLUMN),
        ("*.down", Role.ROW),
    )
    plan = lower(spec, ModelFacts.of_units(((ROOT,),), roles))
    assert plan.tensor is not None, "the plan shards nothing"
    mesh = Mesh(plan.mesh, bench.world)
    cut, plain = (
        nn.Sequential(*(_SubBlock(width) for _ in range(points.units))).to(bench.device)
        for width in (_WIDTH * bench.world.size, _WIDTH)
    )
    parallelize(cut, plan.tensor, mesh.submesh((Axis.TP,)), mesh.registry)
    models = ParameterWrap(cut, ((ROOT,),)), ParameterWrap(plain, ((ROOT,),))
    _warm_up(bench, models)
    excess = sum(_excess(bench, points.rounds, models, mesh).values())
    return excess / (points.units * _LINEARS * _PRODUCTS)


_SHAPES: tuple[dict[str, object], ...] = (
    {"family": "llama", "layers": 2, "hidden": _FEATURES, "heads": 2, "kv_heads": 2, "ffn": 16},
    {"family": "gpt", "layers": 2, "hidden": _FEATURES, "heads": 2},
)
_VOCAB, _SAMPLES = 260, 2

Work = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPass:
    """Passes of a tiny model: what comes `before` them, `work` of what that gives, and how many
    operators a clock counts in them. `computing` is called by itself to compute as much."""

    hook: Hook
    operators: int
    before: Callable[[], Any]
    work: Work
    computing: Callable[[], object]


class _Called(OperatorMode):
    """Operators that compute and ran while it was entered, to be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def ran(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        ran = sizes_of(function, args, kwargs, result)
        if any(what.kind is not OperatorKind.VIEW for what in ran):
            self.calls.append(partial(function, *args, **kwargs))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def again(self) -> None:
        """Call them."""
        for call in self.calls:
            call()


def host(bench: Bench, _: Points) -> Rows:
    """Of both families the mean."""
    seconds_of = issuing_seconds if bench.device.type == "cuda" else excess_seconds
    seconds = grouped(
        (passes.hook, seconds_of(bench, passes))
        for shape in _SHAPES
        for passes in host_passes(shape, bench.device)
    )
    yield from (((hook,), statistics.fmean(taken)) for hook, taken in seconds.items())


def excess_seconds(bench: Bench, passes: HostPass) -> float:
    """What they take beside what their operators take, by the number of these."""
    whole = bench.busy_seconds(lambda: passes.work(passes.before()))
    rest = bench.busy_seconds(passes.before) + bench.busy_seconds(passes.computing)
    more: float = (whole - rest) / passes.operators
    return more


def issuing_seconds(bench: Bench, passes: HostPass) -> float:
    """What the host takes to issue them, by the number of their operators."""
    whole = bench.issuing_seconds(lambda: passes.work(passes.before()))
    return (whole - bench.issuing_seconds(passes.before)) / passes.operators


def host_passes(fields: dict[str, object], device: torch.device) -> Iterator[HostPass]:
    """Yield all kinds of passes of a model."""
    written: dict[str, object] = {
        "model": {**fields, "vocab": _VOCAB, "tied": False},
        "mesh": {},
        "batch": {"micro": _SAMPLES, "sequence": _TOKENS},
    }
    spec = load(written).spec
    yield from _passes(spec, device)
    for kept in (Kept(policy=FULL), Kept(policy=SELECTIVE), Kept(tier=Tier.HOST)):
        yield _kept(spec, kept, device)


def _model(spec: Spec, device: torch.device) -> nn.Module:
    """Its layers, and nothing around them: given and giving hidden states."""
    model = _built(spec)
    model.embed, model.norm, model.head = nn.Identity(), nn.Identity(), nn.Identity()
    return model.to(device)


def _hidden(device: torch.device) -> torch.Tensor:
    return torch.randn(_SAMPLES, _TOKENS, _FEATURES, device=device, requires_grad=True)


def _passes(spec: Spec, device: torch.device) -> Iterator[HostPass]:
    """Each kind of pass of layers whose activations stay."""
    model, x = _model(spec, device), _hidden(device)
    gradient, parameters = torch.ones_like(model(x)), list(model.parameters())

    def halves(output: torch.Tensor) -> None:
        _, groups = backward_input(output, gradient, x, parameters)
        backward_weight(parameters, groups)

    works: dict[Hook, tuple[Callable[[], Any], Work, Callable[[LayerWork], PassWork]]] = {
        Hook.FORWARD_OPERATOR: (lambda: x, model, lambda layer: layer.forward),
        Hook.BACKWARD_OPERATOR: (
            lambda: model(x),
            lambda output: output.backward(gradient),
            lambda layer: layer.backward,
        ),
        Hook.HALVES_OPERATOR: (
            lambda: model(x),
            halves,
            lambda layer: layer.inputs + layer.weights,
        ),
    }
    for hook, (before, work, part) in works.items():
        yield HostPass(
            hook=hook,
            operators=_operators(spec, PLAIN, part),
            before=before,
            work=work,
            computing=_called(before, work).again,
        )


def _kept(spec: Spec, kept: Kept, device: torch.device) -> HostPass:
    """Both passes of layers whose activations are kept in another way. What copies compute is a
    copy's, by its bytes: to call them by themselves is to be of the layers alone."""
    x = _hidden(device)

    def passes(model: nn.Module) -> Work:
        return lambda _: model(x).sum().backward()

    plain, model = _model(spec, device), _model(spec, device)
    blocks = tuple((name, kept) for name in blocks_of(model))
    keep(model, Keep(blocks=blocks), Tiers(device, Registry()))
    counted = model if kept.tier is Tier.DEVICE else plain
    return HostPass(
        hook=around(kept, Kind.FORWARD),
        operators=_operators(spec, kept, lambda layer: layer.forward + layer.backward),
        before=_nothing,
        work=passes(model),
        computing=_called(_nothing, passes(counted)).again,
    )


def _nothing() -> None:
    """There is nothing to be done before."""


def _operators(spec: Spec, kept: Kept, part: Callable[[LayerWork], PassWork]) -> int:
    """How many operators of all layers a clock counts in a part of their work."""
    derivation = derive(spec.but(activations=ActivationSpec(default=kept)), is_timed=False)
    work = model_work(derivation.spec, derivation.plan, derivation.facts)
    assert work is not None, "only built-in models have layers in tables"
    items = (item for layer in work.layers for item in part(layer))
    return sum(item.times for item in items if isinstance(item, Operator))


def _called(before: Callable[[], Any], work: Work) -> _Called:
    work(before())  # gradients are there, to which backward adds
    called = _Called()
    output = before()
    with called:
        work(output)
    return called
