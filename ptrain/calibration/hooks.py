"""What wrappers do beside what they send: tiny modules, wrapped by the real parts, against the same
ones without.

Of the difference the collectives that ran, counted by the traffic meter, take what they took by
themselves; the rest is the wrapper's, by how often it came.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ptrain.axes.data.run.apply import apply
from ptrain.axes.data.run.wrapped import ParameterWrap, WrappedModel
from ptrain.axes.tensor.run.apply import parallelize
from ptrain.calibration.bench import FEWEST, Bench, RateSheet
from ptrain.calibration.points import Points
from ptrain.calibration.stage_passes import pipeline_pass
from ptrain.costs import Collective, Phase, Traffic
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.rates.interpolation import Curve
from ptrain.rooms.mesh import Mesh
from ptrain.spec.axis import Axis
from ptrain.spec.load import load
from ptrain.spec.rates import Hook
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from ptrain.steps.step import Units

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
        wrapped, meter = _wrapped(spec, bench, points)
        plain = ParameterWrap(_stack(bench, points.units), _units(points))
        _note_data(bench, sheet, points, (wrapped, plain), meter, (gather, reduction))
    _tensor_sum(bench, sheet, points)


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
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))) for _ in range(units)
    )
    return nn.Sequential(*layers).to(bench.device)


def _wrapped(spec: Spec, bench: Bench, points: Points) -> tuple[WrappedModel, TrafficMeter]:
    plan = lower(spec, _units(points))
    mesh = Mesh(plan.mesh, bench.world)
    wrapped = apply(_stack(bench, points.units), plan, mesh, mesh.registry)
    return wrapped, TrafficMeter(mesh.registry, mesh.axes_by_group())


Halves = dict[Phase, float]


def _note_data(
    bench: Bench,
    sheet: RateSheet,
    points: Points,
    models: tuple[WrappedModel, WrappedModel],
    meter: TrafficMeter,
    pair: tuple[Hook | None, Hook],
) -> None:
    """A gather costs what forward takes more, where one is; a reduction what backward does, without
    the gathers in it."""
    wrapped = models[0]
    _warm_up(bench, models)
    with meter:
        _halves(bench, wrapped, tell=lambda phase: meter.phase(phase, 0))
    excess = _excess(bench, points.rounds, models)
    gather, reduction = pair
    of_gather = 0.0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        rows = [row for row in meter.rows() if row.key.phase is phase]
        excess[phase] -= sum(_sent_seconds(sheet, row, bench) for row in rows)
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


def _sent_seconds(sheet: RateSheet, row: Traffic, bench: Bench) -> float:
    """What its collectives take by themselves; nothing of what moves beside the host on a GPU, nor
    of the bench's own barrier."""
    is_other = row.key.collective.is_copy or row.key.collective is Collective.BARRIER
    if is_other or bench.device.type == "cuda":
        return 0.0
    points = {
        key[-1]: taken
        for key, taken in sheet.tables["collectives"].items()
        if key[:2] == (str(row.key.collective), bench.world.size)
    }
    return row.calls * Curve(points).at(row.payload_bytes // row.calls)


def _excess(bench: Bench, rounds: int, models: tuple[WrappedModel, WrappedModel]) -> Halves:
    """The median of what each half takes more of the first than of the second, which take turns."""
    differences: dict[Phase, list[float]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for _ in bench.in_time(range(rounds), least=FEWEST):
        first, second = (_halves(bench, model) for model in models)
        for phase, more in differences.items():
            more.append(first[phase] - second[phase])
    return {phase: statistics.median(more) for phase, more in differences.items()}


def _halves(
    bench: Bench,
    wrapped: WrappedModel,
    *,
    tell: Callable[[Phase], object] = lambda _: None,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Halves:
    """Seconds of the host in one forward and one backward pass."""
    x = torch.ones(_ROWS, _WIDTH, device=bench.device)
    bench.together()
    began = time.perf_counter()
    with inside(), wrapped.micro_batch(is_last=True):
        tell(Phase.FORWARD)
        output = wrapped.module(x)
        between = time.perf_counter()
        tell(Phase.BACKWARD)
        output.sum().backward()
    with torch.no_grad():
        wrapped.reduce_gradients()
    ended = time.perf_counter()
    tell(Phase.UPDATE)
    with torch.no_grad():
        wrapped.finish_update()
        wrapped.clear_gradients()
    bench.settle()
    return {Phase.FORWARD: between - began, Phase.BACKWARD: ended - between}


class _SubBlock(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Operators that tp cuts, as wide as `width` between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, width, bias=False)
        self.up = nn.Linear(_WIDTH, width, bias=False)
        self.down = nn.Linear(width, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return hidden


def _tensor_sum(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Sub-blocks cut by ptrain's plan, against those that a rank has of them."""
    spec = _spec(bench, Axis.TP.value, "S,S,S,R")
    roles = (
        ("*", Role.WHOLE_INPUT),
        ("*.gate", Role.COLUMN),
        ("*.up", Role.COLUMN),
        ("*.down", Role.ROW),
    )
    plan = lower(spec, ((ROOT,),), roles)
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
    meter = TrafficMeter(mesh.registry, mesh.axes_by_group())
    with meter:
        _halves(bench, models[0], tell=lambda phase: meter.phase(phase, 0))
    excess = sum(_excess(bench, points.rounds, models).values())
    rows = meter.rows()
    excess -= sum(_sent_seconds(sheet, row, bench) for row in rows)
    calls = sum(row.calls for row in rows if row.key.collective in _REDUCTIONS)
    sheet.note("hooks", Hook.TENSOR_SUM, seconds=excess / max(1, calls))
