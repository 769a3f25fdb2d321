"""Specs of user models: legal keys, and the resolved spec."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ptrain.algebra.legality import require_runnable
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.spec.load import load
from ptrain.spec.placement import Role
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml

SPEC: dict[str, Any] = {
    "name": "own",
    "model": {"hf": "llama", "config": {"hidden_size": 64}},
    "mesh": {"tp": 2},
    "placement": {"tp": "S,S,S,R"},
    "batch": {"global": 2, "micro": 1, "sequence": 16},
}
PLAN = {"layers.*.up": "column", "layers.*": "whole input", "table": "vocabulary"}


def facts_of(spec: Spec) -> ModelFacts:
    return ModelFacts.of_units((("layers.0",), ("",)), spec.tensor.roles)


FAULTS = [
    ({"model": {"hf": "a b"}}, "model.hf", "a class or a model type", ""),
    (
        {"model": {"hf": "llama", "arguments": {}}},
        "model.arguments",
        "but `hf` names a",
        "model.config",
    ),
    ({"model": {"hf": "llama", "preset": "a"}}, "model.preset", "but `hf` names a", "model.config"),
    ({"model": {"target": "a:b", "hf": "llama"}}, "model.hf", "but `target` builds", "remove it"),
    (
        {"model": {"preset": "llama-tiny", "config": {}}},
        "model.config",
        "requires `hf`",
        "model.hf",
    ),
    ({"tensor": {"plan": {"a": "colum"}}}, "tensor.plan", "a: must be one of", "mean 'column'?"),
    ({"tensor": {"plan": {"a": "block"}}}, "tensor.plan", "experts; got the string 'block'", ""),
    ({"tensor": {"plan": {"a.*": ["row"]}}}, "tensor.plan", "a.*: must be one of column", ""),
    ({"tensor": {"plan": {"a": {"b": "row"}}}}, "tensor.plan", "got a mapping", ""),
    ({"tensor": {"plan": {"a": "row", "b": True}}}, "tensor.plan", "b: must be one of", ""),
    ({"tensor": {"plan": ["row"]}}, "tensor.plan", "a mapping of module names to roles", ""),
    ({"tensor": {"plan": "paird"}}, "tensor.plan", "'paird'", "Did you mean 'paired'"),
    ({"model": {"hf": "llama", "config": {"vocab_size": 9}}}, "vocab_size", "9 is", "259"),
    (
        {"mesh": {"tp": 2, "pp": 2}, "placement": {"tp": "S,S,S,S", "pp": "S,S,S,R"}},
        "placement.tp.activations",
        "not supported yet",
        "placement.tp.activations=R",
    ),
    (
        {
            "model": {"preset": "llama-tiny"},
            "placement": {"tp": "S,S,S,S"},
            "tensor": {"plan": "naive"},
        },
        "tensor.plan",
        "not supported yet: naive",
        "placement.tp.activations=R",
    ),
    (
        {"model": {"preset": "llama-tiny"}, "tensor": {"plan": PLAN}},
        "tensor.plan",
        "built-in",
        "`tensor.plan=paired` or `tensor.plan=naive`",
    ),
]


@pytest.mark.parametrize(("change", "place", "finding", "remedy"), FAULTS)
def test_an_error_states_place_finding_and_fix(change, place, finding, remedy):
    with pytest.raises(SpecError) as caught:
        require_runnable(load(SPEC | change))
    fault = next(fault for fault in caught.value.faults if place in fault.place)
    assert finding in fault.finding and remedy in fault.remedy


@pytest.mark.parametrize("tensor", [{}, {"plan": "naive"}, {"plan": PLAN}])
def test_a_resolved_spec_loads_to_itself(tensor):
    spec = load(SPEC | {"tensor": tensor}).spec
    assert load(yaml.safe_load(to_yaml(spec.resolved))).spec == spec


def test_a_plan_keeps_its_order():
    roles = load(SPEC | {"tensor": {"plan": PLAN}}).spec.tensor.roles
    assert roles == (
        ("layers.*.up", Role.COLUMN),
        ("layers.*", Role.WHOLE_INPUT),
        ("table", Role.VOCABULARY),
    )


def test_a_shown_plan_has_the_roles_of_a_user_model():
    spec = load(SPEC | {"tensor": {"plan": PLAN}}).spec
    lines = format_plan(spec, lower(spec, facts_of(spec))).splitlines()
    assert lines[-3:] == [
        "roles    column: layers.*.up",
        "roles    whole input: layers.*",
        "roles    vocabulary: table",
    ]


@pytest.mark.parametrize(
    ("model", "tensor", "words"),
    [
        (SPEC["model"], {"plan": PLAN}, "logits replicated, since no head is sharded"),
        (SPEC["model"], {"plan": PLAN | {"head": "head"}}, "logits sharded over the vocabulary"),
        (SPEC["model"], {"plan": {"a": "head"}, "loss_parallel": False}, "logits all-gathered"),
        ({"preset": "gpt-tiny"}, {}, "logits sharded over the vocabulary"),
        ({"preset": "llama-tiny"}, {}, "logits sharded over the vocabulary"),
    ],
)
def test_a_plan_derives_the_logits_from_its_head(model, tensor, words):
    spec = load(SPEC | {"model": model, "tensor": tensor}).spec
    assert f"{words}\n" in format_plan(spec, lower(spec, facts_of(spec)))
