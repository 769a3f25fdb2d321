"""The resident memory of a plan's ranks and a replayed step, without a full prediction."""

from __future__ import annotations

from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.by_rank import ByRank
from ptrain.cost import Footprint, Traffic, add_traffic
from ptrain.derivation import pipeline
from ptrain.derivation.ghosts.wrapping import Wrapping, norm_traffic
from ptrain.derivation.in_flight import Flight, in_flight
from ptrain.derivation.machine import Machine
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


def resident(spec: Spec, plan: Plan, facts: ModelFacts) -> ByRank[Footprint]:
    """Return the rows of parameters, optimizer state, gradients and the rest."""
    stages = pipeline.split_stages(spec, plan, facts)
    return pipeline.resident(spec, plan, stages, schedule_of(spec))


def flight(
    spec: Spec, facts: ModelFacts, machine: Machine | None = None, plan: Plan | None = None
) -> Flight:
    """Return a step's transfers in flight, its peaks and, with a cost model, its time."""
    plan, schedule = plan or lower(spec, facts), schedule_of(spec)
    stages = pipeline.split_stages(spec, plan, facts)
    timing = machine.of_step(spec, plan, facts, schedule) if machine else None
    return in_flight(spec, schedule, stages, resident(spec, plan, facts), timing)


def transient(played: Flight) -> int:
    """Return the bytes of units that are gathered as the last forward pass ends, on rank 0."""
    return next(r.device_bytes for r in played.memory if r.rank == 0 and r.state == "transient")


def traffic_of_ranks(ghost: Wrapping) -> tuple[Traffic, ...]:
    """Return every rank's traffic for its units: once (setup) and in each step."""
    return add_traffic((*ghost.traffic(None), *norm_traffic(ghost)))
