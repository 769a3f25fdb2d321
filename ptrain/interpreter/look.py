"""What is read off a model before anything cuts it: its facts, its stages, and the plan.

A model that is not built in is looked at without its weights. What runs it is given a few numbers
of each parameter, again and again (`models.repeated`): which operators use what, and whether parts
compute what the whole does, depends on no more. Where its code does not run with these, or is found
to be what cannot be cut, the weights are read or drawn whole and have the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.facts.model import ModelFacts
from ptrain.internals.fakes import detect_fake_mode
from ptrain.interpreter.materialize import build_hollow, build_module
from ptrain.interpreter.stages import stages_of_module
from ptrain.interpreter.workpiece import Stages
from ptrain.models.boundary import boundary, said
from ptrain.models.drawn import DrawnWeights, LookedWeights
from ptrain.models.facts import untraced_facts
from ptrain.models.heads import head_of
from ptrain.models.hollow import NeedsValues
from ptrain.models.module_weights import ModuleWeights
from ptrain.models.repeated import repeated_values
from ptrain.models.units import ROOT
from ptrain.plan.lower import lower
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A model, and what is known of it. `weights`: those of one without values that is not built
    in; `whole_because`: why it has values all the same."""

    module: nn.Module
    facts: ModelFacts
    stages: Stages | None
    plan: Plan
    head: str
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""


def look_at(module: nn.Module, spec: Spec) -> Looked:
    """Raises SpecError for a model whose stages are not the model, or that is not on slices of the
    tokens what it is on all."""
    facts = untraced_facts(module, spec)
    stages = stages_of_module(spec, module, facts)
    plan = lower(spec, facts)
    head = head_of(module, spec) if plan.loss else ROOT
    return Looked(module=module, facts=facts, stages=stages, plan=plan, head=head)


def look_at_built(spec: Spec, device: torch.device, *, allow_import: bool = False) -> Looked:
    """Build the spec's model and look at it. `device` as of `build_module`. Raises SpecError as
    `look_at`, and for a model or a folder that is none."""
    because = ""
    if not isinstance(spec.model, ModelShape) and detect_fake_mode() is None:
        try:
            return _look_without_values(spec, allow_import=allow_import)
        except (NeedsValues, _Refused) as error:
            because = str(error)
    module = build_module(spec, device=device, allow_import=allow_import)
    return replace(look_at(module, spec), whole_because=because)


def why_built_whole(spec: Spec, *, allow_import: bool = False, looks: bool = True) -> str:
    """Return why `look_at_built` builds the whole model; empty if it does not.

    Large tensors are not drawn, and small ones are drawn from other seeds. Without `looks` only
    the constructor runs, so that a reason that the look finds is missed.
    """
    if isinstance(spec.model, ModelShape):
        return ""
    try:
        with torch.random.fork_rng(devices=[]):
            if looks:
                _look_without_values(spec, allow_import=allow_import, draws=False)
            else:
                build_hollow(spec, allow_import=allow_import, draws=False)
    except (NeedsValues, _Refused) as error:
        return str(error)
    return ""


class _Refused(Exception):
    """A model that is refused without its weights; the message is the finding."""


def _look_without_values(spec: Spec, *, allow_import: bool, draws: bool = True) -> Looked:
    """`draws` as of `build_hollow`. Raises NeedsValues or _Refused."""
    module, weights = build_hollow(spec, allow_import=allow_import, draws=draws)

    def fault(error: BaseException) -> Fault:
        return Fault(place="model", finding=said(error), remedy="build it with its weights")

    try:
        looked_at = LookedWeights(weights) if isinstance(weights, DrawnWeights) else weights
        with boundary(fault), repeated_values(module, looked_at):
            looked = look_at(module, spec)
    except PtrainError as error:
        raise _Refused(" ".join(_finding(error).split())) from error
    return replace(looked, weights=weights)


def _finding(error: PtrainError) -> str:
    """Return what an error finds, without its place and remedy: it is no fault of the spec here."""
    faults = error.faults if isinstance(error, SpecError) else ()
    return "; ".join(fault.finding for fault in faults) or str(error)
