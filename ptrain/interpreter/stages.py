"""From a model to the stages of a rank, each cut, wrapped and filled by itself."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ptrain.axes.pipeline.cut import part_of
from ptrain.axes.pipeline.staged import Part, Staged
from ptrain.axes.pipeline.stages import ENDS, Stage
from ptrain.derivation.estimate import own_facts
from ptrain.derivation.pipeline import stage_roles, stages_of
from ptrain.interpreter.materialize import wrap
from ptrain.interpreter.mesh import Mesh
from ptrain.plan.step import Plan
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec

Stages = tuple[Stage, ...]


def stages_of_module(spec: Spec, module: nn.Module) -> Stages:
    """Those that the spec cuts the model into; none without pp."""
    if spec.degree(Axis.PP) == 1:
        return ()
    return stages_of(spec, own_facts(spec))


def wrap_stages(module: nn.Module, spec: Spec, plan: Plan, mesh: Mesh, stages: Stages) -> Staged:
    """This rank's stages, first to last."""
    step = plan.pipeline
    assert step is not None
    copies = {copied: name for name, copied in step.shared}
    parts = []
    for index in step.stages_of(mesh.coordinate(step.axis)):
        part = part_of(module, stages, index, ENDS)
        own = stage_plan(plan, stages, index)
        parts.append(Part(index, part, wrap(part, spec, own, mesh, mesh.registry, copies)))
    return Staged(parts, step, mesh)


def stage_plan(plan: Plan, stages: Stages, index: int) -> Plan:
    """Of one stage's part of the model: its units and its operators' roles."""
    stage, tensor = stages[index], plan.tensor
    if tensor is not None:
        tensor = replace(tensor, roles=stage_roles(tensor.roles, stage, len(stages)))
    return replace(plan, units=stage.units(plan.units), tensor=tensor)
