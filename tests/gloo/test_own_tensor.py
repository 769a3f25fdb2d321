"""User models and transformers models on tp and within data ranks, by their plans, compute the
result of one device at exactly the predicted cost."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.spec.spec import Spec
from tests.gloo.tensor_cases import DATA, tensor_spec
from tests.gloo.tensor_runs import MATRIX
from tests.models_external import PAIRS_PLAN
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
NIGHTLY = pytest.mark.nightly

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "pad_token_id": 32,  # a space: a row of the embedding that is never updated
}
NEOX = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "pad_token_id")}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hf": "LlamaForCausalLM", "config": LLAMA},
    "neox": {"hf": "gpt_neox", "config": NEOX},  # LayerNorm, biases, fused heads, parallel parts
    "tied": {"hf": "llama", "config": {**LLAMA, "tie_word_embeddings": True, "vocab_size": 259}},
    "qwen2": {"hf": "qwen2", "config": LLAMA},
    "qwen3": {"hf": "qwen3", "config": LLAMA | {"head_dim": 8}},
    "pairs": {"target": "tests.models_external:pairs"},
    "tied-pairs": {"target": "tests.models_external:pairs", "arguments": {"tied": True}},
    "ours-llama": {"target": "tests.models_external:ours"},
    "ours-gpt": {"target": "tests.models_external:ours", "arguments": {"family": "gpt"}},
    "unplanned": {"target": "tests.models_external:pairs", "arguments": {"planned": False}},
}


def user_tensor_spec(model: str, data: str = "", **sections: Any) -> Spec:
    """Return a spec on tp 2, within 2 data ranks if a data placement is given."""
    whose = "hf" if "hf" in MODELS[model] else "own"
    if whose == "hf":
        pytest.importorskip("transformers")
    axis = "dp_replicate" if data == "ddp" else "dp_shard"
    placed = {axis: data} if data else None
    name = f"{whose}-{model}"
    return tensor_spec(data=placed, own=MODELS[model], name=name, **sections)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("neox", ""),
        pytest.param("llama", "zero3", marks=pytest.mark.nightly),
        pytest.param("llama", "", marks=pytest.mark.nightly),
        pytest.param("neox", "zero3", marks=pytest.mark.nightly),
    ],
)
def test_a_model_of_transformers_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, data: str
) -> None:
    assert not MATRIX.differences(ranks, user_tensor_spec(model, data))


@pytest.mark.parametrize("data", [pytest.param("ddp", marks=pytest.mark.nightly), "zero3"])
def test_a_model_with_a_tp_plan_runs_on_the_data_axes(ranks: Ranks, data: str) -> None:
    assert not MATRIX.differences(ranks, user_tensor_spec("tied", data, degree=1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "data"),
    [("fsdp-mixed", "fsdp-mixed"), ("zero16", "zero3"), ("fp16", "zero2")],
)
def test_user_models_over_tp_in_true_dtypes_are_exact(ranks: Ranks, layout: str, data: str) -> None:
    assert not MATRIX.differences(
        ranks, user_tensor_spec("tied", data, precision={"layout": layout})
    )


@pytest.mark.nightly
def test_the_plan_of_a_user_function_is_exact_and_equals_one_device(ranks: Ranks) -> None:
    assert not MATRIX.differences(ranks, user_tensor_spec("pairs"))


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["ours-gpt", "ours-llama"])
def test_a_function_may_return_a_model_of_ours(ranks: Ranks, model: str) -> None:
    assert not MATRIX.differences(ranks, user_tensor_spec(model))


@pytest.mark.nightly
def test_a_plan_of_the_spec_is_exact_and_equals_one_device(ranks: Ranks) -> None:
    plan = PAIRS_PLAN | {"table": "vocabulary"}
    assert not MATRIX.differences(
        ranks, user_tensor_spec("unplanned", "zero1", tensor={"plan": plan})
    )


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["", *DATA])
@pytest.mark.parametrize("model", ["tied", "qwen2", "qwen3", "tied-pairs"])
def test_more_models_within_data_ranks(ranks: Ranks, model: str, data: str) -> None:
    assert not MATRIX.differences(ranks, user_tensor_spec(model, data))


@pytest.mark.nightly
@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_logits_may_be_whole(ranks: Ranks, head: bool, loss_parallel: bool) -> None:
    plan = {name: word for name, word in PAIRS_PLAN.items() if head or word != "head"}
    tensor = {"plan": plan, "loss_parallel": loss_parallel}
    assert not MATRIX.differences(ranks, user_tensor_spec("unplanned", tensor=tensor))
