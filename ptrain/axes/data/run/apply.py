"""What a placement on the data axes does to a module: each plan step as a wrap, ready to run.

A wrap gives the module to call, says what belongs to one micro-batch, brings the gradients into
the optimizer's layout, and lists what the optimizer updates. The loop around it is the same.
"""

from __future__ import annotations

from typing import assert_never

from torch import nn

from ptrain.axes.data.run.flat import FlatWrap, ParameterWrap, WrappedModel
from ptrain.axes.data.run.fully_sharded import FullyShardedWrap
from ptrain.axes.data.run.members import RowWriter
from ptrain.axes.data.run.replicated import ReplicatedWrap
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    registry: Registry,
    write: RowWriter | None = None,
) -> WrappedModel:
    """Wrap `model` as the plan says. `write`: of a step that is filled by unit, what gives its
    parameters the values that they have not yet."""
    match plan.wrap:
        case LocalGradients():
            return ParameterWrap(model, plan.units)
        case Replicate() as step:
            return ReplicatedWrap(model, step, mesh, plan.units, registry)
        case FullyShard() as step:
            return FullyShardedWrap(model, step, plan, mesh, registry)
        case FlatUnits() as step:
            return FlatWrap(model, plan, mesh, registry, write)
        case step:
            assert_never(step)
