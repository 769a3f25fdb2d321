"""Roles of models that are not built in: from transformers' plans, from the user's function, from
the spec; and what of them cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ptrain.algebra.legality import require
from ptrain.axes.tensor.roles import roles_of
from ptrain.errors import SpecError
from ptrain.models.build import build
from ptrain.models.roles import roles_of_module
from ptrain.plan.lower import lower
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.role import Role
from ptrain.spec.spec import Spec
from tests.models_external import PAIRS_PLAN, pairs
from tests.unit.test_huggingface import CONFIG, NEOX

TARGET = "tests.models_external:pairs"


def spec_of(model: dict[str, Any] | None = None, tp: int = 2, **tensor: Any) -> Spec:
    mapping: dict[str, Any] = {
        "name": "roles",
        "model": model or {"target": TARGET},
        "mesh": {"tp": tp},
        "placement": {"tp": "S,S,S,R"},
        "batch": {"global": 2, "micro": 1, "sequence": 16},
        "tensor": tensor,
    }
    return require(load(mapping))


def of_hugging_face(hf: str, config: dict[str, Any], tp: int = 2) -> dict[str, Role]:
    pytest.importorskip("transformers")
    model = build(HuggingFaceModel(hf=hf, config=config), sequence=16)
    return dict(roles_of_module(model, spec_of({"hf": hf, "config": config}, tp)))


def fault(module: nn.Module, spec: Spec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        roles_of_module(module, spec)
    (found,) = caught.value.faults
    return found.place, found.finding, found.remedy


def test_a_llamas_plan_is_its_own():
    roles = of_hugging_face("llama", CONFIG)
    for part, names in {"self_attn": "qkv", "mlp": ("gate", "up")}.items():
        assert roles[f"model.layers.*.{part}"] is Role.WHOLE_INPUT
        for name in names:
            assert roles[f"model.layers.*.{part}.{name}_proj"] is Role.COLUMN
    assert roles["model.layers.*.self_attn.o_proj"] is Role.ROW
    assert roles["model.layers.*.mlp.down_proj"] is Role.ROW
    assert roles["lm_head"] is Role.HEAD


def test_a_tied_embedding_is_cut_as_its_head_is():
    of_llama = of_hugging_face("llama", CONFIG | {"tie_word_embeddings": True})
    assert of_llama["model.embed_tokens"] is Role.VOCABULARY
    roles = dict(roles_of_module(pairs(tied=True), spec_of()))
    assert roles["head"] is Role.HEAD and roles["table"] is Role.VOCABULARY


def test_another_architecture_has_other_names():
    roles = of_hugging_face("gpt_neox", NEOX)
    assert roles["gpt_neox.layers.*.attention.query_key_value"] is Role.COLUMN
    assert roles["gpt_neox.layers.*.mlp.dense_4h_to_h"] is Role.ROW


@pytest.mark.parametrize("hf", ["phi3", "olmo2"])
def test_an_entry_that_is_not_known_is_refused_by_name(hf):
    with pytest.raises(SpecError, match=r"self_attn\.q.*_proj: colwise_.* of a module that is not"):
        of_hugging_face(hf, CONFIG | {"pad_token_id": None})


def test_a_class_without_a_plan_needs_one():
    with pytest.raises(SpecError, match=r"gpt2 says nothing(.|\n)*tensor: \{plan:"):
        of_hugging_face("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 260})


def test_heads_are_not_divided():
    with pytest.raises(SpecError, match=r"num_key_value_heads: 2(.|\n)*choose tp from 1, 2"):
        of_hugging_face("llama", CONFIG, tp=4)


@pytest.mark.parametrize("key", ["attention_dropout", "hidden_dropout"])
def test_dropout_of_cut_activations_comes_later(key):
    with pytest.raises(SpecError, match=r"not yet: .*dropout"):
        of_hugging_face("gpt_neox", NEOX | {key: 0.1})


def test_the_functions_plan_and_the_specs_give_the_same_roles():
    given = roles_of_module(pairs(), spec_of())
    assert given == tuple((pattern, Role(word)) for pattern, word in PAIRS_PLAN.items())
    assert given == roles_of_module(pairs(planned=False), spec_of(plan=PAIRS_PLAN))


def test_the_specs_plan_wins():
    plan = {"layers.*.up": "column", "layers.*.down": "row"}
    assert dict(roles_of_module(pairs(), spec_of(plan=plan))) == plan


def test_where_nothing_is_cut_nobody_is_asked():
    mapping = {"name": "one", "model": {"target": TARGET}, "mesh": {"dp_shard": 2}}
    placed = {"placement": {"dp_shard": "zero3"}, "batch": {"micro": 1, "sequence": 16}}
    assert roles_of_module(pairs(planned=False), require(load(mapping | placed))) == ()


MISTAKES = [
    ({}, "model.target", "says nothing", "tp_plan"),
    ({"layers.*.mixin": "column"}, "tensor.plan", "no module is called", "layers.*.mixing.query"),
    ({"layers.*": "column"}, "tensor.plan", "layers.0 is a Pair", "no role"),
    ({"table": "head"}, "tensor.plan", "table is a Embedding; head is a role of Linear", ""),
    ({"layers.*.up": "column", "layers.0.up": "row"}, "tensor.plan", "two roles", "one"),
    (
        {key: word for key, word in PAIRS_PLAN.items() if not key.endswith("scale")},
        "tensor.plan",
        "layers.0.mixing.scale has parameters",
        "shared",
    ),
]


@pytest.mark.parametrize(("plan", "place", "finding", "remedy"), MISTAKES)
def test_a_plan_that_cannot_be_followed_says_why(plan, place, finding, remedy):
    found = fault(pairs(planned=False), spec_of(**({"plan": plan} if plan else {})))
    assert found[0] == place and finding in found[1] and remedy in found[2]


def test_a_word_of_the_functions_plan_that_is_none_is_refused():
    model = pairs()
    model.tp_plan = {"head": "sideways"}  # type: ignore[assignment]
    place, finding, remedy = fault(model, spec_of())
    assert place == "model.target" and "head: sideways" in finding and "column" in remedy


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do():
    place, finding, remedy = fault(pairs(hidden=12), spec_of(tp=8))
    assert (place, remedy) == ("mesh.tp", "choose tp from 1, 2, 3, 4, 6, 12")
    assert "12 outputs of layers.0.mixing.query" in finding


def test_unequal_logits_are_not_gathered():
    place, _, remedy = fault(pairs(vocab=259), spec_of(loss_parallel=False))
    assert place == "tensor.loss_parallel" and "multiple of 2" in remedy


def test_a_module_that_is_given_in_place_of_a_built_in_model_has_its_own_roles():
    shape = {"preset": "llama-tiny"}
    roles = roles_of_module(pairs(), spec_of(shape))
    assert dict(roles) == PAIRS_PLAN
    place, finding, _ = fault(pairs(planned=False), spec_of(shape))
    assert place == "model" and finding.startswith("Pairs says nothing")
    mapping = {"name": "a", "model": shape, "mesh": {"tp": 2}, "placement": {"tp": "S,S,S,S"}}
    sliced = require(load(mapping | {"batch": {"micro": 1, "sequence": 16}}))
    assert fault(pairs(), sliced)[0] == "placement.tp.activations"
    assert lower(spec_of(shape), ((""),), roles).tensor.roles == roles


def test_a_built_in_module_has_those_of_its_family():
    spec = spec_of({"preset": "llama-tiny"})
    assert roles_of_module(build(spec.model, sequence=16), spec) == ()
    assert lower(spec, (("",),)).tensor.roles == roles_of(spec.model)
