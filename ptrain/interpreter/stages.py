"""From a model to the stages of a rank: each is a piece of its own for the steps that follow, and
all together run under a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from ptrain.axes.context.run.rehearsal import require_slices
from ptrain.axes.pipeline.run.apply import Pipelined
from ptrain.axes.pipeline.run.cut import part_of, require_alike
from ptrain.axes.pipeline.run.stage import PassCallbacks
from ptrain.axes.pipeline.run.staged import LocalStage, Staged
from ptrain.axes.pipeline.stage_facts import chain_of, stage_roles, stages_of
from ptrain.errors import refused
from ptrain.facts.model import ModelFacts
from ptrain.internals.fakes import detect_fake_mode
from ptrain.interpreter.construction import Construction
from ptrain.interpreter.loss import StepLoss
from ptrain.interpreter.passes import Enter
from ptrain.interpreter.workpiece import Stages, Workpiece
from ptrain.models.initialize import keeps_its_weights
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline, Plan


def stages_of_module(spec: Spec, module: nn.Module, facts: ModelFacts) -> Stages | None:
    """None without pp. Raises SpecError for a module whose stages are not the module, or that is
    not on slices of the tokens what it is on all."""
    require_slices(module, spec, facts.attending)
    cut = stages_of(spec, facts)
    if not cut:
        return None
    chain = chain_of(spec, facts)
    if keeps_its_weights(module) and detect_fake_mode() is None:
        require_alike(module, cut, chain, spec)
    return Stages(chain, cut)


def cut_into_stages(step: Pipeline, rank: Construction) -> None:
    """From here on the rank's pieces are its stages, first to last, and their passes those of the
    schedule. Raises SpecError where the wrap cannot sum what two stages share."""
    _require_sums(step, rank.plan)
    stages = rank.stages
    assert stages is not None, "a plan with stages is lowered from them"
    rank.cut = partial(_pieces, step, stages)
    rank.join = partial(_joined, step, stages)
    rank.passes_of = _passes


def _pieces(step: Pipeline, stages: Stages, rank: Construction) -> Iterator[Workpiece]:
    copies = {copied: name for name, copied in step.shared}
    for index in step.stages_of(rank.mesh.coordinate(step.axis)):
        part = part_of(rank.module, stages.all, index, stages.chain)
        # where it has no head it may, and nothing writes into what a stage hands on
        message = f".*module .FSDP{type(part).__name__}. returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
        yield Workpiece(
            module=part,
            plan=_stage_plan(rank.plan, stages, index),
            index=index,
            is_whole=False,
            has_logits=index == step.stages - 1,
            copies=copies,
        )


def _joined(step: Pipeline, stages: Stages, rank: Construction) -> tuple[Staged, nn.Module]:
    parts = []
    for piece in rank.pieces:
        assert piece.wrapped is not None
        parts.append(LocalStage(piece.index, piece.module, piece.wrapped))
    staged = Staged(parts, step, rank.mesh, stages.chain)
    return staged, staged.module


def _passes(rank: Construction, loss: StepLoss, enter: Enter) -> Pipelined:
    staged = rank.wrapped
    assert isinstance(staged, Staged), "what the stages were joined into"
    callbacks = PassCallbacks(
        loss.forward, loss.given, loss.of_last_stage, loss.of_output, loss.seed, enter
    )
    return Pipelined(rank.spec, rank.plan, rank.mesh, staged, callbacks)


def _require_sums(step: Pipeline, plan: Plan) -> None:
    """Of a model that is not built in the algebra does not know whether its ends are tied."""
    if step.shared and not plan.wrap.keeps_gradients_on_device:
        finding = "not yet: gradients of a tied head, whose two ends on the first and the last "
        finding += "stage are summed on the device before the update"
        raise refused("placement", finding, "give gradients R or S, or a model that is not tied")


def _stage_plan(plan: Plan, stages: Stages, index: int) -> Plan:
    """Of one stage's part of the model: its units and its operators' roles."""
    stage, tensor = stages.all[index], plan.tensor
    if tensor is not None:
        roles = stage_roles(tensor.roles, stage, len(stages.all), stages.chain.ends)
        plan = plan.having(replace(tensor, roles=roles))
    return replace(plan, units=stage.units(plan.units))
