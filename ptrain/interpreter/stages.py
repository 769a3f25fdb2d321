"""From a model to the stages of a rank, each cut, wrapped and filled by itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from torch import nn
from torch._guards import detect_fake_mode

from ptrain.axes.pipeline.run.alike import require_alike
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.run.staged import Part, Staged
from ptrain.axes.pipeline.stage_facts import chain_of, stage_roles, stages_of
from ptrain.errors import refused
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Chain, Stage
from ptrain.interpreter.materialize import wrap
from ptrain.models.chain import sample
from ptrain.models.initialize import keeps_its_weights
from ptrain.plan.step import FlatUnits, Plan
from ptrain.rooms.mesh import Mesh
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True)
class Stages:
    """Those that a spec cuts a model into, first to last, and what they are cut from."""

    chain: Chain
    all: tuple[Stage, ...]


def stages_of_module(spec: Spec, module: nn.Module, facts: ModelFacts) -> Stages | None:
    """None without pp. Raises SpecError for a module whose stages are not the module."""
    found = stages_of(spec, facts)
    if not found:
        return None
    chain = chain_of(spec, facts)
    if keeps_its_weights(module) and detect_fake_mode() is None:
        require_alike(module, found, chain.ends, chain.hidden, sample(module, spec))
    return Stages(chain, found)


def wrap_stages(module: nn.Module, spec: Spec, plan: Plan, mesh: Mesh, stages: Stages) -> Staged:
    """This rank's stages, first to last."""
    step = plan.pipeline
    assert step is not None
    _require_sums(plan)
    copies = {copied: name for name, copied in step.shared}
    parts = []
    for index in step.stages_of(mesh.coordinate(step.axis)):
        part = part_of(module, stages.all, index, stages.chain.ends)
        own = _stage_plan(plan, stages, index)
        # where it has no head it may, and nothing writes into what a stage hands on
        message = f".*module .FSDP{type(part).__name__}. returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
        parts.append(Part(index, part, wrap(part, spec, own, mesh, mesh.registry, copies)))
    return Staged(parts, step, mesh, stages.chain.hidden)


def _require_sums(plan: Plan) -> None:
    """Of a model that is not built in the algebra does not know whether its ends are tied."""
    step, units = plan.pipeline, plan.wrap
    if step is None or not step.shared or not isinstance(units, FlatUnits):
        return
    if units.consumed or units.gradients_tier is not Tier.DEVICE:
        finding = "not yet: gradients of a tied head, whose two ends on the first and the last "
        finding += "stage are summed on the device before the update"
        raise refused("placement", finding, "give gradients R or S, or a model that is not tied")


def _stage_plan(plan: Plan, stages: Stages, index: int) -> Plan:
    """Of one stage's part of the model: its units and its operators' roles."""
    stage, tensor = stages.all[index], plan.tensor
    if tensor is not None:
        roles = stage_roles(tensor.roles, stage, len(stages.all), stages.chain.ends)
        tensor = replace(tensor, roles=roles)
    return replace(plan, units=stage.units(plan.units), tensor=tensor)
