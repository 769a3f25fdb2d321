"""Functions that run on ranks for the tests of this folder: train a spec for some steps, optionally
measure one step or plant a fault, and report the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ptrain.cost import Estimate, Traffic
from ptrain.data.corpus import open_corpus
from ptrain.derivation.estimate import Derivation, by_counts
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.measure import measure
from ptrain.meters.routing import Placed, RoutingMeter, sum_histograms
from ptrain.meters.traffic import TrafficMeter
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch, seed_dropout
from ptrain.train.loop_inputs import learning_rate, setup_traffic
from ptrain.verification.reference import Trajectory, relative_distance
from tests.gloo.faults import Fault, sabotage

REBUILDING_STEP = 1  # DDP fits its buckets to the first backward pass at the start of the second


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank's report. `trajectory` is set on rank 0 only, `measured` if a step was measured,
    `chosen` to the routing counts of that step."""

    rank: int
    trajectory: Trajectory | None
    measured: Estimate | None
    chosen: Placed | None = None


def train_on_rank(
    spec: Spec, steps: int, measured_step: int | None = None, fault: Fault | None = None
) -> Report:
    """Train `steps` updates of a program on this rank."""
    world = World.join(spec.timeout)
    program = interpret(spec, world=world, allow_import=True)
    initial = local_parameters(program)
    source = open_corpus(spec.data)
    losses, norms = [], []
    second: tuple[Traffic, ...] = ()
    measured: Estimate | None = None
    routing = RoutingMeter(program)
    for step in range(steps):
        local = local_batch(program, source, step)
        seed_dropout(program, step)
        lr = learning_rate(spec.optimizer, step)
        if step == measured_step:
            with measure(program) as measurement, routing.watch():
                loss, norm = program.forward_backward(local, lr).clone(), program.step(lr)
            measured = measurement.estimate()
        elif step == REBUILDING_STEP and measured_step is not None:
            groups = program.mesh.axes_by_group()
            meter = TrafficMeter(program.registry, groups, device=world.device.type)
            program.observers.append(meter)
            with meter:
                loss, norm = program.forward_backward(local, lr).clone(), program.step(lr)
            program.observers.remove(meter)
            second = meter.rows()
        else:
            with sabotage(fault, program, local, step) as given:
                loss, norm = program.forward_backward(given, lr).clone(), program.step(lr)
            del given  # the program alone holds a step's batch
        losses.append(loss.double())
        if norm is not None:
            norms.append(norm.item())
        del local, loss, norm
    return Report(
        rank=world.rank,
        trajectory=_trajectory(program, initial, losses, norms),
        measured=_with_set_up(measured, second) if measured else None,
        chosen=routing.choices() if routing._numbers else None,
    )


def expected_estimates(derivation: Derivation, reports: Sequence[Report], step: int) -> Estimate:
    """Return the estimates for the measured `step` (from 0): the exact column, with assumed routing
    replaced by the measured counts."""
    chosen = sum_histograms([report.chosen for report in reports if report.chosen])
    return by_counts(derivation, chosen, step + 1) or derivation.exact


def _with_set_up(steady: Estimate, second: tuple[Traffic, ...]) -> Estimate:
    """Add the traffic of the second step that exceeds a steady step, as setup."""
    return replace(steady, traffic=(*steady.traffic, *setup_traffic(second, steady.traffic)))


def _trajectory(
    program: Program,
    initial: dict[str, torch.Tensor],
    losses: list[torch.Tensor],
    norms: list[float],
) -> Trajectory | None:
    total = torch.stack(losses)
    if program.world.size > 1:
        dist.all_reduce(total)  # every rank has its share of each step's mean
    parameters, own = full_parameters(program), local_parameters(program)
    if not program.world.is_first:
        return None
    return Trajectory(
        losses=tuple(total.tolist()),
        gradient_norms=tuple(norms),
        parameters=parameters,
        moved_distance=relative_distance(initial, own),
    )


def local_parameters(program: Program) -> dict[str, torch.Tensor]:
    """Return copies of this rank's parameters, to check that they change."""
    model = program.state_dict()["model"]
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.items()
    }


def full_parameters(program: Program) -> dict[str, torch.Tensor]:
    """Return copies of all full parameters on every rank, across all pipeline stages."""
    model = program.state_dict()["model"]
    own = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.items()
    }
    if program.plan.pipeline is None:
        return own
    group = program.mesh.group((program.plan.pipeline.axis,))
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, own, group=group)
    return {name: value for each in everyone for name, value in each.items()}
