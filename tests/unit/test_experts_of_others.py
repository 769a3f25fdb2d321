"""Experts of user models: recognized modules, and sorted rows that give the result of tokens."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptrain.errors import SpecError
from ptrain.facts.model import ExpertLayers
from ptrain.models.facts import expert_layers_of, untraced_facts
from ptrain.models.initialize import build_model
from ptrain.models.moe import RoutedRows, route_rows
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.models_routing import EXPERTS, HIDDEN, AllExperts, Planned

TOKENS = 8
MIXTRAL = {
    "hf": "mixtral",
    "config": {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "num_local_experts": 6, "num_experts_per_tok": 2,
    },
}  # fmt: skip
OWN = {"target": "tests.models_routing:planned"}


def spec_of(model: dict[str, Any], **sections: Any) -> Spec:
    beside = {
        "mesh": {"ep": 2},
        "placement": {"ep": "ddp"},
        "batch": {"global": 2, "micro": 1, "sequence": TOKENS},
    }
    return load({"name": "experts", "model": model, **beside, **sections}).spec


def test_a_transformers_model_names_its_experts():
    pytest.importorskip("transformers")
    spec = spec_of(MIXTRAL)
    model = build_model(spec.model, sequence=TOKENS)
    names = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
    assert expert_layers_of(model, spec) == ExpertLayers(
        modules=names, number=6, chosen=2, features=32
    )
    assert {(name,) for name in names} < {
        unit.modules for unit in untraced_facts(model, spec).units
    }
    assert not any(isinstance(module, RoutedRows) for module in model.modules())


@pytest.mark.parametrize("place", ["tp_plan", "tensor.plan"])
def test_a_user_model_has_a_plan_or_its_spec_names_the_experts(place, monkeypatch):
    sections = {}
    if place == "tensor.plan":
        monkeypatch.setattr(Planned, "tp_plan", None)
        sections = {"tensor": {"plan": {"h.*.experts": "experts"}}}
    found = expert_layers_of(Planned("row"), spec_of(OWN, **sections))
    names = ("h.0.experts", "h.1.experts")
    assert found == ExpertLayers(modules=names, number=EXPERTS, chosen=2, features=HIDDEN)


def test_without_ep_experts_are_not_inspected():
    whole = {"mesh": {"dp_shard": 2}, "placement": "zero3"}
    assert expert_layers_of(nn.Linear(2, 2), spec_of(OWN, **whole)) is None


class Differing(Planned):
    """The layers have another number of experts each."""

    def __init__(self) -> None:
        super().__init__("row")
        experts: Any = self.h[1].experts
        experts.num_experts = EXPERTS + 1
        for name in ("up", "down"):
            whole = getattr(experts, name)
            setattr(experts, name, nn.Parameter(torch.cat([whole, whole[:1]]).detach()))


class Late(Planned):
    """Not all tokens reach the experts."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT[:, 1:])


class Sorted(Planned):
    """Its experts are given rows and where those of each end."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_NC: Tensor = self.emb(tokens_BT).flatten(0, 1)
        for block in self.h:
            x_NC = block.experts(x_NC, torch.arange(EXPERTS))
        return x_NC


def counting() -> Planned:
    model = Planned("row")
    for block in model.h:
        block.experts.num_experts = EXPERTS - 1
    return model


def planned_experts(**plan: str) -> Planned:
    model = Planned("row")
    vars(model)["tp_plan"] = {name.replace("_", "."): word for name, word in plan.items()}
    return model


REFUSALS = [
    (
        planned_experts(head="head"),
        "declares no module that holds all experts of a layer",
        "tp_plan",
    ),
    (planned_experts(blocks="experts"), "no module is named blocks", "tp_plan"),
    (planned_experts(h="experts"), "h does not stack all experts of a layer", "stacks all experts"),
    (counting(), f"num_experts is {EXPERTS - 1}, but the first dimension", "stacks all"),
    (Differing(), "MoE layers that differ: 4 experts", "dp_shard"),
    (Late("row"), f"receives {TOKENS - 1} rows for a sample of {TOKENS} tokens", "dp_shard"),
    (Sorted("row"), "h.0.experts receives [8, 16], [4]; it must define", "one module"),
]


@pytest.mark.parametrize(("model", "finding", "remedy"), REFUSALS, ids=str)
def test_a_module_with_some_of_a_layers_experts_is_rejected_in_one_message(model, finding, remedy):
    with pytest.raises(SpecError, match=re.escape(finding)) as raised:
        expert_layers_of(model, spec_of(OWN))
    (fault,) = raised.value.faults
    assert fault.place == "model.target" and remedy in fault.remedy


def routing(features: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, of which none goes to the last expert, with two experts each and their weights."""
    torch.manual_seed(0)
    x_NC = torch.randn(20, features, dtype=dtype, requires_grad=True)
    scores_NE = torch.randn(20, experts, dtype=dtype)
    scores_NE[:, -1] = -9.0
    return x_NC, *reversed(scores_NE.softmax(-1).topk(2))


def experts_of(kind: str) -> nn.Module:
    if kind in ("row", "loop"):
        return AllExperts(kind)
    pytest.importorskip("transformers")
    config = dict(MIXTRAL["config"])
    if kind != "mixtral":
        config |= {"num_experts": config.pop("num_local_experts"), "moe_intermediate_size": 24}
        config["pad_token_id"] = 32
    spec = spec_of({"hf": kind, "config": config})
    return deepcopy(build_model(spec.model, sequence=TOKENS).model.layers[0].mlp.experts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["row", "loop", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_sorted_rows_have_the_results_and_gradients_of_tokens(kind, dtype):
    owner = nn.Module()
    owner.experts = experts_of(kind).to(dtype)
    whole, number = deepcopy(owner.experts), len(next(owner.parameters()))
    route_rows(owner, ["experts"], number)
    assert isinstance(owner.experts, RoutedRows) and type(owner.experts).__name__ in f"{whole}"
    results = []
    for experts in (whole, owner.experts):
        features = HIDDEN if kind in ("row", "loop") else 32
        x_NC, chosen_NK, weights_NK = routing(features, number, dtype)
        weights_NK = weights_NK.clone().requires_grad_()
        y_NC = experts(x_NC, chosen_NK, weights_NK)
        inputs = (x_NC, weights_NK, *experts.parameters())
        results.append((y_NC, *torch.autograd.grad((y_NC * y_NC).sum(), inputs)))
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compute", ["fp64", None])
def test_sizes_depend_on_no_token_in_any_dtype_of_experts_of_transformers(compute):
    pytest.importorskip("transformers")
    precision = {"layout": "fp32"} | ({"compute": compute} if compute else {})
    facts = facts_of(spec_of(MIXTRAL, precision=precision))
    assert not facts.by_data and not facts.others and not facts.untraced
    assert [len(places) for places in (*facts.stage_passes, *facts.stage_rows)] == [2, 2]


def test_data_dependent_experts_are_unknown():
    facts = facts_of(spec_of(OWN | {"arguments": {"by": "loop"}}))
    assert facts.timeline is None and not facts.others
    assert "the rows of other ranks have no known bound" in facts.untraced
