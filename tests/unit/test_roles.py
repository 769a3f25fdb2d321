"""The roles of user models from transformers' plans, the user's function or the spec, and roles
that cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptrain.algebra.legality import require_runnable
from ptrain.errors import SpecError
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import roles_of
from ptrain.models.initialize import build_model
from ptrain.models.roles import module_roles
from ptrain.plan.lower import lower
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.placement import Role, Roles
from ptrain.spec.spec import Spec
from tests.models_external import PAIRS_PLAN, ours, pairs
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
    return require_runnable(load(mapping))


def roles_of_module(module: nn.Module, spec: Spec) -> Roles:
    roles, _ = module_roles(module, spec)
    return roles


def of_hugging_face(hf: str, config: dict[str, Any], tp: int = 2) -> dict[str, Role]:
    pytest.importorskip("transformers")
    model = build_model(HuggingFaceModel(hf=hf, config=config), sequence=16)
    return dict(roles_of_module(model, spec_of({"hf": hf, "config": config}, tp)))


def fault(module: nn.Module, spec: Spec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        roles_of_module(module, spec)
    (found,) = caught.value.faults
    return found.place, found.finding, found.remedy


def test_a_llama_has_its_plan():
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
def test_an_entry_that_gathers_inside_a_block_is_rejected_by_name(hf):
    gathers = r"self_attn\.q.*_proj: colwise_\w+ all-gathers the output of a module that is not"
    with pytest.raises(SpecError, match=rf"{gathers}(.|\n)*fused column"):
        of_hugging_face(hf, CONFIG | {"pad_token_id": None})


def test_a_class_without_a_plan_needs_one():
    with pytest.raises(
        SpecError, match=r"gpt_bigcode has no tensor-parallel plan(.|\n)*tensor: \{plan:"
    ):
        of_hugging_face("gpt_bigcode", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 260})


def test_heads_are_not_divided():
    with pytest.raises(
        SpecError, match=r"num_key_value_heads: 2(.|\n)*Use one of 1, 2 for `mesh\.tp`"
    ):
        of_hugging_face("llama", CONFIG, tp=4)


def test_the_functions_plan_and_the_specs_give_the_same_roles():
    given = roles_of_module(pairs(), spec_of())
    assert given == tuple((pattern, Role(word)) for pattern, word in PAIRS_PLAN.items())
    assert given == roles_of_module(pairs(planned=False), spec_of(plan=PAIRS_PLAN))


def test_the_specs_plan_wins():
    plan = {"layers.*.up": "column", "layers.*.down": "row"}
    assert dict(roles_of_module(pairs(), spec_of(plan=plan))) == plan


def test_without_tp_roles_are_not_read():
    mapping = {"name": "one", "model": {"target": TARGET}, "mesh": {"dp_shard": 2}}
    placed = {"placement": {"dp_shard": "zero3"}, "batch": {"micro": 1, "sequence": 16}}
    assert roles_of_module(pairs(planned=False), require_runnable(load(mapping | placed))) == ()


MISTAKES = [
    ({}, "model.target", "has no tensor-parallel plan", "tp_plan"),
    ({"layers.*.mixin": "column"}, "tensor.plan", "no module is named", "layers.*.mixing.query"),
    ({"layers.*": "column"}, "tensor.plan", "layers.0 is a Pair", "Remove its role"),
    ({"table": "head"}, "tensor.plan", "table is an Embedding; the role head needs Linear", ""),
    ({"layers.*.up": "column", "layers.0.up": "row"}, "tensor.plan", "two roles", "one"),
    (
        {key: word for key, word in PAIRS_PLAN.items() if not key.endswith("scale")},
        "tensor.plan",
        "layers.0.mixing.scale.weight is used on a shard",
        "layers.*.mixing.scale the role `shared`",
    ),
    (
        {"layers.*.up": "head", "layers.*.down": "row"},
        "tensor.plan",
        "layers.1.up both have the role head",
        "column",
    ),
    ({"layers.*.mixing": "whole input"}, "tensor.plan", "shards nothing", "or use `mesh.tp=1`"),
]


@pytest.mark.parametrize(("plan", "place", "finding", "remedy"), MISTAKES)
def test_an_impossible_plan_is_rejected_with_a_reason(plan, place, finding, remedy):
    found = fault(pairs(planned=False), spec_of(**({"plan": plan} if plan else {})))
    assert found[0] == place and finding in found[1] and remedy in found[2]


def test_a_word_of_the_functions_plan_that_is_none_is_rejected():
    model = pairs()
    model.tp_plan = {"head": "sideways"}  # type: ignore[assignment]
    place, finding, remedy = fault(model, spec_of())
    assert place == "model.target" and "head: sideways" in finding and "column" in remedy


def test_a_degree_that_does_not_divide_is_rejected_once_with_those_that_divide_everything():
    with pytest.raises(SpecError) as caught:
        roles_of_module(pairs(hidden=12), spec_of(tp=5))
    found = [(fault.place, fault.finding, fault.remedy) for fault in caught.value.faults]
    choices = "Use one of 1, 2, 3, 4, 6, 12 for `mesh.tp`."
    assert found == [
        ("mesh.tp", "tp=5 does not divide the 12 outputs of layers.0.mixing.query", choices),
        ("mesh.tp", "tp=5 does not divide the 24 outputs of layers.0.up", choices),
    ]


def test_heads_and_layers_are_divided_by_the_same_degrees():
    with pytest.raises(SpecError) as caught:
        of_hugging_face("llama", CONFIG, tp=3)
    findings = [fault.finding for fault in caught.value.faults]
    assert {fault.remedy for fault in caught.value.faults} == {"Use one of 1, 2 for `mesh.tp`."}
    assert findings[:2] == [
        "tp=3 does not divide num_attention_heads: 4",
        "tp=3 does not divide num_key_value_heads: 2",
    ]
    assert len(findings) > 2 and all("of model.layers.0." in each for each in findings[2:])


def test_unequal_logits_are_not_gathered():
    place, _, remedy = fault(pairs(vocab=259), spec_of(loss_parallel=False))
    assert place == "tensor.loss_parallel" and "multiple of 2" in remedy


def test_a_given_module_has_its_roles_instead_of_the_built_in_models():
    shape = {"preset": "llama-tiny"}
    roles = roles_of_module(pairs(), spec_of(shape))
    assert dict(roles) == PAIRS_PLAN
    place, finding, _ = fault(pairs(planned=False), spec_of(shape))
    assert place == "model" and finding.startswith("Pairs has no tensor-parallel plan")
    mapping = {"name": "a", "model": shape, "mesh": {"tp": 2}, "placement": {"tp": "S,S,S,S"}}
    sliced = require_runnable(load(mapping | {"batch": {"micro": 1, "sequence": 16}}))
    assert dict(roles_of_module(pairs(), sliced))["layers.0"] is Role.FIRST_BLOCK
    assert lower(spec_of(shape), ModelFacts(units=(), roles=roles)).tensor.roles == roles


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_model_of_ours_that_a_function_returns_has_the_roles_of_its_family(family):
    model = ours(family)
    target = {"target": "tests.models_external:ours", "arguments": {"family": family}}
    assert roles_of_module(model, spec_of(target)) == roles_of(model.shape)
    with pytest.raises(SpecError, match=r"tp=3 does not divide heads: 4\n *remedy: .* 1, 2, 4"):
        roles_of_module(model, spec_of(target, tp=3))
    plan = {"embed": "vocabulary"}
    assert dict(roles_of_module(model, spec_of(target, plan=plan))) == plan


class Gated(nn.Module):
    """A sub-block with parameters beside its operators, used where `at` says."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.ones(()))
        self.gate = nn.Linear(16, 1)

    def forward(self, x_BTC: Tensor, is_known_BT1: Tensor) -> Tensor:
        used = self.norm(x_BTC) * self.gain if self.at == "before" else x_BTC
        cut = self.up(used).tanh() * is_known_BT1
        match self.at:
            case "between":
                cut = cut * self.gain
            case "in place":
                cut.mul_(self.gain.expand(32))
            case "gate":
                cut = cut * self.gate(x_BTC)
        out: Tensor = self.down(cut)
        return self.norm(out) * self.gain if self.at == "behind" else out


class Gates(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(260, 16), nn.Linear(16, 260)
        self.parts = nn.ModuleList(Gated(at) for _ in range(2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.table(tokens_BT)
        for part in self.parts:
            x_BTC = x_BTC + part(x_BTC, (tokens_BT != 3)[..., None].float())
        logits: Tensor = self.head(x_BTC)
        return logits


PAIR = {"parts.*.up": "column", "parts.*.down": "row"}
WHOLE = {"parts.*": "whole input"}


@pytest.mark.parametrize("head", [{}, {"table": "vocabulary", "head": "head"}])
@pytest.mark.parametrize(
    ("at", "beside"),
    [
        ("before", {}),
        ("behind", {}),
        ("behind", WHOLE),
        ("between", {"parts.*": "shared"}),
        ("in place", {"parts.*": "shared"}),
    ],
)
def test_parameters_outside_a_pair_are_replicated_or_shared(at, beside, head):
    plan = PAIR | beside | head
    assert dict(roles_of_module(Gates(at), spec_of(plan=plan))) == plan


@pytest.mark.parametrize(
    ("at", "beside", "finding", "remedy"),
    [
        ("between", {}, "parts.0.gain is used on a shard", "parts.* the role `shared`"),
        ("between", WHOLE, "parts.0.gain is used on a shard", "a separate module"),
        ("in place", {}, "parts.0.gain is used on a shard", "parts.* the role `shared`"),
        ("before", WHOLE, "the input of parts.0 (role whole input) is combined", "Remove the role"),
        (
            "before",
            {"parts.*": "shared"},
            "parts.0.gain is used on all features",
            "Remove the role",
        ),
        ("gate", {}, "sharded output of parts.0.up is combined", "the role `row`"),
        ("", {"head": "column"}, "returns the output of head", "the role `head`"),
        (
            "",
            {"parts.*.gate": "row", "parts.*.down": "column"},
            "down has the role column, but",
            "row",
        ),
    ],
)
def test_an_unsummed_gradient_is_rejected(at, beside, finding, remedy):
    place, found, right = fault(Gates(at), spec_of(plan={**PAIR, **beside}))
    assert place == "tensor.plan" and finding in found and remedy in right


@pytest.mark.parametrize(
    ("alone", "finding", "remedy"),
    [
        (
            "parts.*.up",
            "up has the role column, but parts.0.down",
            "Give parts.*.down the role `row`",
        ),
        ("parts.*.down", "parts.0.down has the role row", "the layer before it the role `column`"),
    ],
)
def test_a_column_and_a_row_need_one_another(alone, finding, remedy):
    place, found, right = fault(Gates(""), spec_of(plan={alone: PAIR[alone]}))
    assert place == "tensor.plan" and finding in found and remedy in right


def test_looking_at_a_model_changes_nothing_in_it():
    model = Gates("behind")
    model.parts[0].norm = nn.BatchNorm1d(16)  # its buffers follow what it sees
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    roles_of_module(model, spec_of(plan=PAIR))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_built_in_module_has_those_of_its_family():
    spec = spec_of({"preset": "llama-tiny"})
    assert roles_of_module(build_model(spec.model, sequence=16), spec) == ()
    assert lower(spec, ModelFacts(units=())).tensor.roles == roles_of(spec.model)
