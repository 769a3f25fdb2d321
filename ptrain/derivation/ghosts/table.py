"""Selects the simulation of a plan's wrap: the only place that distinguishes kinds of wraps."""

from __future__ import annotations

from typing import assert_never

from ptrain.derivation.ghosts.ddp import Replicas, SpreadUpdate
from ptrain.derivation.ghosts.flat_units import Units
from ptrain.derivation.ghosts.fsdp2_rows import Sharded
from ptrain.derivation.ghosts.in_place import OneDevice
from ptrain.derivation.ghosts.wrapping import Wrapped, Wrapping
from ptrain.facts.model import ModelFacts
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate


def wrapping(spec: Spec, plan: Plan, facts: ModelFacts) -> Wrapping:
    """Return the simulation of the wrap of a model, or of one stage's part of it."""
    wrapped = Wrapped(spec=spec, plan=plan, facts=facts)
    match plan.wrap:
        case LocalGradients():
            return OneDevice(wrapped)
        case Replicate(zero_redundancy=True) as step:
            return SpreadUpdate(wrapped, step)
        case Replicate() as step:
            return Replicas(wrapped, step)
        case FullyShard() as step:
            return Sharded(wrapped, step)
        case FlatUnits() as step:
            return Units(wrapped, step)
        case step:
            assert_never(step)
