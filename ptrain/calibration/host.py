"""Measure the time that the host adds to operators: modules, autograd, wrappers and stages.

The passes of tiny layers are timed against their operators, called one by one. The difference is
modules, autograd, and code that only inspects tensors. With a GPU it is the full time to issue the
operators. The difference is divided by the number of operators that a clock counts, so any other
work in a pass (a copy for each tensor that is offloaded, torch's checks between the halves of a
backward pass) is part of the seconds per operator.

The overhead of wrappers is measured on tiny modules with and without DDP, FSDP2 and similar wraps;
the time spent waiting for other ranks is subtracted. The overhead of stages is the middle stage of
a tiny model, with placeholders for its neighbours' modules, against its layers alone.
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

from ptrain.activations.run.apply import apply_modes
from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.flat import ParameterWrap, WrappedModel
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.passes import backward_input, backward_weight
from ptrain.axes.pipeline.run.stage import BoundaryTensor, LocalStage, PassCallbacks, StageRunner
from ptrain.axes.pipeline.schedule import Action
from ptrain.axes.pipeline.stage_facts import chain_of, stages_of
from ptrain.axes.tensor.run.apply import parallelize
from ptrain.calibration.bench import Bench, ComputingIdentity, Points, Rows
from ptrain.cost import Collective, Phase
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.facts.model import LayerWork, ModelFacts, Operator, PassWork
from ptrain.facts.stages import Units
from ptrain.meters.blocked import WaitMeter
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.initialize import build_model, initialize
from ptrain.models.ledger import OperatorMode
from ptrain.models.objective import SampleBatch, TokenPair
from ptrain.models.units import ROOT, blocks_of
from ptrain.models.work import sizes_of
from ptrain.plan.lower import built_in_facts, lower
from ptrain.rates.pace import operator_hook
from ptrain.runtime.comm import Mesh, TagRegistry
from ptrain.runtime.torch import Tiers
from ptrain.spec.activations import FULL, PLAIN, SELECTIVE, ActivationMode
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Role, Tier
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.steps.step import Keep
from ptrain.timeline import Kind
from ptrain.units import group_by_key

# so few features that the operators' computation is negligible
_HOOK_SAMPLES, _TOKENS, _FEATURES = 1, 4, 16
_STAGES = 3
_MIDDLE = 1
_PASSES = 2  # forward and backward


def pipeline_pass(bench: Bench, rounds: int) -> float:
    """Return the seconds that a pipeline stage adds to the computation of one pass."""
    device = bench.device
    runner = _build_runner(_stages_spec(_STAGES), device)
    layer = _build_layers(_stages_spec(1), device)
    x = torch.ones((_HOOK_SAMPLES, _TOKENS, _FEATURES), device=device)
    tokens = torch.zeros((_HOOK_SAMPLES, _TOKENS), dtype=torch.int64, device=device)
    samples = SampleBatch(TokenPair(tokens, tokens))

    def passes() -> None:
        runner.begin(1)
        runner.compute(Action(Kind.FORWARD, _MIDDLE, 0), x.clone(), samples)
        runner.compute(Action(Kind.BACKWARD, _MIDDLE, 0), x, samples)

    def plain() -> None:
        layer(x.clone().requires_grad_()).backward(x)

    # Once before: the first pass allocates gradients.
    for work in (passes, plain):
        work()
    differences = [
        _host_seconds_of(bench, passes) - _host_seconds_of(bench, plain)
        for _ in bench.iter_rounds(rounds)
    ]
    return statistics.median(differences) / _PASSES


def _stages_spec(layers: int) -> Spec:
    """Return a spec of a tiny model with one stage per layer."""
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


def _build_model(spec: Spec) -> nn.Module:
    """Build and initialize the model of a spec."""
    assert isinstance(spec.model, ModelShape), "only built-in models"
    model = build_model(spec.model, sequence=_TOKENS)
    initialize(model, seed=0)
    return model


def _build_runner(spec: Spec, device: torch.device) -> StageRunner:
    """Build the runner of the middle stage."""
    facts = built_in_facts(spec)
    stages, chain = stages_of(spec, facts), chain_of(spec, facts)
    part = part_of(_build_model(spec), stages, _MIDDLE, chain).to(device)

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
            batch_context=lambda _: nullcontext(),
            loss=unused,
            evaluation_loss=unused,
            seed=unused,
            enter=lambda *_: None,
        ),
    )


def _host_seconds_of(bench: Bench, work: Callable[[], None]) -> float:
    """Return the host seconds of one call that all ranks begin together."""
    bench.synchronize_ranks()
    began = bench.host_seconds()
    work()
    bench.synchronize_device()
    return bench.host_seconds() - began


_WIDTH, _ROWS, _LAYERS = 8, 4, 4
_SETTING_UP = 3  # steps
# fp32 weights and biases of one unit, so that a DDP bucket holds one unit
_UNIT_BYTES = 4 * _LAYERS * (_WIDTH + 1) * _WIDTH
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
_GATHERS = (Collective.ALL_GATHER,)
_DATA = {  # axis and tuple: options, hook of gathers, hook of reductions
    "dp_shard: S*,S,S,R": ((), Hook.FSDP2_GATHER, Hook.FSDP2_REDUCE),
    "dp_replicate: R,R,R,R": ((f"bucket={_UNIT_BYTES}",), None, Hook.DDP_BUCKET),
    "dp_shard: S*,S,R,R": ((), Hook.FLAT_GATHER, Hook.FLAT_REDUCE),
}


def measure_hooks(bench: Bench, points: Points) -> Rows:
    """Yield the seconds of each hook of a wrapper.

    A single rank has the pipeline pass only, since it communicates with no one.
    """
    yield (Hook.PIPELINE_PASS,), pipeline_pass(bench, points.rounds)
    if bench.world.size == 1:
        return
    for placement, (dials, gather, reduction) in _DATA.items():
        axis, _, modes = placement.partition(": ")
        wrapped, mesh = _wrap_stack(_placed_spec(bench, axis, modes, dials), bench, points)
        plain = ParameterWrap(_build_stack(bench, points.units), _unit_names(points))
        yield from _data_hook_rows(bench, points, (wrapped, plain), mesh, (gather, reduction))
    yield (Hook.CUT_PRODUCT,), _tensor_hook_seconds(bench, points)


def _placed_spec(bench: Bench, axis: str, modes: str, dials: Iterable[str] = ()) -> Spec:
    """Return a spec with one axis over all ranks."""
    mapping: dict[str, object] = {
        "model": {"preset": "llama-tiny"},  # never built: a spec needs a model
        "mesh": {axis: bench.world.size},
        "placement": {axis: modes},
        "batch": {"micro": 1, "sequence": 8},
    }
    return load(mapping, tuple(dials)).spec


def _unit_names(points: Points) -> Units:
    """Return the units: one per layer stack, and the root."""
    return (*((str(number),) for number in range(points.units)), (ROOT,))


def _build_stack(bench: Bench, units: int) -> nn.Sequential:
    """Build a stack of units with as many parameters as a block, as narrow as possible."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)), ComputingIdentity())
        for _ in range(units)
    )
    return nn.Sequential(*layers).to(bench.device)


def _wrap_stack(spec: Spec, bench: Bench, points: Points) -> tuple[WrappedModel, Mesh]:
    """Wrap a stack by a spec's plan."""
    plan = lower(spec, ModelFacts.of_units(_unit_names(points)))
    mesh = Mesh(plan.mesh, bench.world)
    return apply(_build_stack(bench, points.units), plan, mesh, mesh.registry), mesh


Halves = dict[Phase, float]


def _data_hook_rows(
    bench: Bench,
    points: Points,
    models: tuple[WrappedModel, WrappedModel],
    mesh: Mesh,
    pair: tuple[Hook | None, Hook],
) -> Rows:
    """Yield the seconds of a gather hook and of a reduction hook.

    A gather costs the excess of forward over the plain model. A reduction costs the excess of
    backward, minus the gathers within it. Without a gather, the excess of forward belongs to the
    reduction.
    """
    _warm_up(bench, models)
    meter = _measure_traffic(bench, models[0], mesh)
    excess = _median_excess(bench, points.rounds, models, mesh)
    gather, reduction = pair
    of_gather = 0.0
    if gather is not None:
        of_gather = max(0.0, excess[Phase.FORWARD]) / _num_calls(meter, Phase.FORWARD, _GATHERS)
        yield (gather,), of_gather
    again = _num_calls(meter, Phase.BACKWARD, _GATHERS, least=0)
    rest = excess[Phase.BACKWARD] - again * of_gather
    if gather is None:
        rest += excess[Phase.FORWARD]
    yield (reduction,), rest / _num_calls(meter, Phase.BACKWARD, _REDUCTIONS)


def _warm_up(bench: Bench, models: Iterable[WrappedModel]) -> None:
    """Run the first steps, which set wrappers up: DDP rebuilds its buckets in the second step."""
    for model in models:
        for _ in range(_SETTING_UP):
            _time_halves(bench, model)


def _num_calls(
    meter: TrafficMeter, phase: Phase, collectives: Iterable[Collective], *, least: int = 1
) -> int:
    """Return the number of some collectives in a phase, at least `least`."""
    rows = (row for row in meter.rows() if row.key.phase is phase)
    return max(least, sum(row.calls for row in rows if row.key.collective in collectives))


def _measure_traffic(bench: Bench, model: WrappedModel, mesh: Mesh) -> TrafficMeter:
    """Return the meter of one step's traffic."""
    meter = TrafficMeter(mesh.registry, mesh.axes_by_group())
    with meter:
        _time_halves(bench, model, tell=lambda phase: meter.phase(phase, 0))
    return meter


def _median_excess(
    bench: Bench, rounds: int, models: tuple[WrappedModel, WrappedModel], mesh: Mesh
) -> Halves:
    """Return the median excess of each half of a step of the first model over the second.

    The models alternate. The first model's time waiting for other ranks is excluded: a stopwatch
    measures it, and slows both models. If ranks share cores, the bench's clock stops during waits
    and no stopwatch is used.
    """
    differences: dict[Phase, list[float]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    groups, rank = mesh.axes_by_group(), bench.world.rank
    for _ in bench.iter_rounds(rounds):
        first, second = (
            _time_halves(
                bench,
                model,
                stopwatch=None if bench.is_shared else WaitMeter(groups, rank=rank),
            )
            for model in models
        )
        for phase, more in differences.items():
            more.append(first[phase] - second[phase])
    return {phase: statistics.median(more) for phase, more in differences.items()}


def _time_halves(
    bench: Bench,
    wrapped: WrappedModel,
    *,
    tell: Callable[[Phase], object] = lambda _: None,
    stopwatch: WaitMeter | None = None,
) -> Halves:
    """Return the host seconds of one forward and one backward pass.

    Waits that the stopwatch measures are subtracted.
    """
    x = torch.ones(_ROWS, _WIDTH, device=bench.device)

    def now() -> float:
        waited = stopwatch.rows() if stopwatch else ()
        return bench.host_seconds() - sum(row.seconds for row in waited)

    bench.synchronize_ranks()
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
    bench.synchronize_device()
    return {Phase.FORWARD: between - began, Phase.BACKWARD: ended - between}


# linear operators of a sub-block; products of each in forward and backward
_LINEARS, _PRODUCTS = 3, 3


class _SubBlock(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A sub-block whose operators tp shards, with `width` features inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, width, bias=False)
        self.up = nn.Linear(_WIDTH, width, bias=False)
        self.down = nn.Linear(width, _WIDTH, bias=False)
        self.between = ComputingIdentity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.between(hidden)


def _tensor_hook_seconds(bench: Bench, points: Points) -> float:
    """Return the seconds that tp adds to one operator.

    Sub-blocks sharded by ptrain's plan are compared with local sub-blocks of one rank's size.
    """
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
    excess = sum(_median_excess(bench, points.rounds, models, mesh).values())
    return excess / (points.units * _LINEARS * _PRODUCTS)


_SHAPES: tuple[dict[str, object], ...] = (
    {"family": "llama", "layers": 2, "hidden": _FEATURES, "heads": 2, "kv_heads": 2, "ffn": 16},
    {"family": "gpt", "layers": 2, "hidden": _FEATURES, "heads": 2},
)
_VOCAB, _SAMPLES = 260, 2

Work = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPass:
    """A kind of pass of a tiny model.

    Attributes:
        hook: The hook that it measures.
        operators: Number of operators that a clock counts in the pass.
        before: Prepares the input of `work`.
        work: Runs the pass.
        computing: Runs the same operators without modules and autograd.
    """

    hook: Hook
    operators: int
    before: Callable[[], Any]
    work: Work
    computing: Callable[[], object]


class _OperatorRecorder(OperatorMode):
    """The mode that records the operators that compute, to call them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        ran = sizes_of(function, args, kwargs, result)
        if any(what.kind is not OperatorKind.VIEW for what in ran):
            self.calls.append(partial(function, *args, **kwargs))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run_again(self) -> None:
        """Call the recorded operators again."""
        for call in self.calls:
            call()


def measure_host_passes(bench: Bench, _: Points) -> Rows:
    """Yield the seconds per operator of each hook, the mean of both model families."""
    seconds_of = issuing_seconds if bench.device.type == "cuda" else excess_seconds
    seconds = group_by_key(
        (passes.hook, seconds_of(bench, passes))
        for shape in _SHAPES
        for passes in host_passes(shape, bench.device)
    )
    yield from (((hook,), statistics.fmean(taken)) for hook, taken in seconds.items())


def excess_seconds(bench: Bench, passes: HostPass) -> float:
    """Return the seconds per operator that a pass takes beyond its operators' computation."""
    whole = bench.busy_seconds(lambda: passes.work(passes.before()))
    rest = bench.busy_seconds(passes.before) + bench.busy_seconds(passes.computing)
    more: float = (whole - rest) / passes.operators
    return more


def issuing_seconds(bench: Bench, passes: HostPass) -> float:
    """Return the host seconds per operator to issue a pass."""
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
    yield from _plain_passes(spec, device)
    for kept in (
        ActivationMode(policy=FULL),
        ActivationMode(policy=SELECTIVE),
        ActivationMode(tier=Tier.HOST),
    ):
        yield _kept_pass(spec, kept, device)


def _build_layers(spec: Spec, device: torch.device) -> nn.Module:
    """Build the layers of a model alone; their input and output are hidden states."""
    model = _build_model(spec)
    model.embed, model.norm, model.head = nn.Identity(), nn.Identity(), nn.Identity()
    return model.to(device)


def _random_hidden_states(device: torch.device) -> torch.Tensor:
    """Return random hidden states."""
    return torch.randn(_SAMPLES, _TOKENS, _FEATURES, device=device, requires_grad=True)


def _plain_passes(spec: Spec, device: torch.device) -> Iterator[HostPass]:
    """Yield the passes of layers whose activations stay on the device."""
    model, x = _build_layers(spec, device), _random_hidden_states(device)
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
            operators=_num_operators(spec, PLAIN, part),
            before=before,
            work=work,
            computing=_record_operators(before, work).run_again,
        )


def _kept_pass(spec: Spec, kept: ActivationMode, device: torch.device) -> HostPass:
    """Return forward and backward of layers whose activations are recomputed or offloaded.

    The copies of offloading are in the table of copies by their bytes, so `computing` calls the
    operators of the layers alone.
    """
    x = _random_hidden_states(device)

    def passes(model: nn.Module) -> Work:
        return lambda _: model(x).sum().backward()

    plain, model = _build_layers(spec, device), _build_layers(spec, device)
    blocks = tuple((name, kept) for name in blocks_of(model))
    apply_modes(model, Keep(blocks=blocks), Tiers(device, TagRegistry()))
    counted = model if kept.tier is Tier.DEVICE else plain
    return HostPass(
        hook=operator_hook(kept, Kind.FORWARD),
        operators=_num_operators(spec, kept, lambda layer: layer.forward + layer.backward),
        before=_no_preparation,
        work=passes(model),
        computing=_record_operators(_no_preparation, passes(counted)).run_again,
    )


def _no_preparation() -> None:
    """Prepare nothing."""


def _num_operators(spec: Spec, kept: ActivationMode, part: Callable[[LayerWork], PassWork]) -> int:
    """Return the number of operators that a clock counts in a part of all layers' work."""
    derivation = derive(spec.with_fields(activations=ActivationSpec(default=kept)), is_timed=False)
    work = model_work(derivation.spec, derivation.plan, derivation.facts)
    assert work is not None, "only built-in models have layers in tables"
    items = (item for layer in work.layers for item in part(layer))
    return sum(item.times for item in items if isinstance(item, Operator))


def _record_operators(before: Callable[[], Any], work: Work) -> _OperatorRecorder:
    """Record the operators of a pass."""
    work(before())  # the first pass allocates the gradients; later ones add to them
    called = _OperatorRecorder()
    output = before()
    with called:
        work(output)
    return called
