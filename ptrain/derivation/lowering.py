"""The plan of a spec whose model is known by its facts: `ptrain.lower(spec)`."""

from __future__ import annotations

from dataclasses import replace

from ptrain.axes.pipeline.stage_facts import stages_of
from ptrain.derivation.estimate import own_facts
from ptrain.facts.model import ModelFacts
from ptrain.plan import lower as lowering
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


def lower(spec: Spec, facts: ModelFacts | None = None) -> Plan:
    """Return the plan of a legal spec. A built-in model needs no `facts`; any other model's are
    read off the model itself (`read_facts`)."""
    facts = own_facts(spec) if facts is None else facts
    spec = spec if facts.model is None else replace(spec, model=facts.model)
    stages = stages_of(spec, facts)
    return lowering.lower(
        spec, facts.unit_modules, facts.roles, stages, facts.blocks, facts.fusions, facts.experts
    )
