"""User models split into stages by their plans, alone and within other axes, compute the result of
one device at exactly the predicted cost."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.spec.spec import Spec
from tests.gloo.pipeline_cases import DATA, pipeline_spec
from tests.gloo.pipeline_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
NIGHTLY = pytest.mark.nightly

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 260,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 32}  # a space, never updated
TIED = {"tie_word_embeddings": True, "vocab_size": 259}
# Half of the layers see the last four tokens, and which half they are depends on their place.
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}
KINDS = ("bare", "written", "scaled", "tuples", "unlike", "byplace")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hf": "LlamaForCausalLM", "config": GROUPED},
    "tied": {"hf": "llama", "config": GROUPED | TIED},
    "qwen2": {"hf": "qwen2", "config": GROUPED | WINDOWS | {"use_sliding_window": True}},
    "qwen3": {"hf": "qwen3", "config": GROUPED | {"head_dim": 8}},
    "mistral": {"hf": "mistral", "config": GROUPED | {"head_dim": 8, "sliding_window": 4}},
    "neox": {"hf": "gpt_neox", "config": SIZES},
    "pairs": {"target": "tests.models_external:pairs", "arguments": {"layers": 3}},
    "tied-pairs": {
        "target": "tests.models_external:pairs",
        "arguments": {"layers": 4, "tied": True},
    },
    "gpt2": {
        "hf": "gpt2",
        "config": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 260, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "gemma3": {
        "hf": "Gemma3ForCausalLM",
        "config": GROUPED | {"head_dim": 8, "sliding_window": 4},
    },
    "container": {"target": "tests.models_staged:contained"},
    "tied-container": {"target": "tests.models_staged:contained", "arguments": {"tied": True}},
    **{
        kind: {"target": "tests.models_staged:staged", "arguments": {"kind": kind}}
        for kind in KINDS
    },
    "statistics": {"target": "tests.models_staged:staged", "arguments": {"kind": "statistics"}},
    "ours-llama": {"target": "tests.models_external:ours"},
    "ours-gpt": {"target": "tests.models_external:ours", "arguments": {"family": "gpt"}},
}
# They say nothing of how they are cut over tp; but for gemma3, whose norms compute in fp32 whatever
# they are given, so that over tp, with pp or without, it equals one device to 1e-7 alone.
UNCUT = ("gpt2", "gemma3", "container", "tied-container", *KINDS)
ALONE = {"pp": 2}
SHARDED = {"pp": 2, "dp_shard": 2}
REPLICATED = {"pp": 2, "dp_replicate": 2}
CUT = {"pp": 2, "tp": 2}


def user_pipeline_spec(
    model: str, mesh: dict[str, int], schedule: str = "1f1b", data: str = "zero3", **sections: Any
) -> Spec:
    whose = "hf" if "hf" in MODELS[model] else "own"
    if whose == "hf":
        pytest.importorskip("transformers")
    name = f"{whose}-{model}-{schedule}"
    return pipeline_spec(
        schedule=schedule, mesh=mesh, data=data, own=MODELS[model], name=name, **sections
    )


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("tied", ALONE),
        pytest.param("tied-pairs", CUT, marks=NIGHTLY),
        pytest.param("tied-pairs", SHARDED, marks=NIGHTLY),
    ],
    ids=str,
)
def test_stages_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, mesh: dict[str, int]
) -> None:
    assert not MATRIX.differences(ranks, user_pipeline_spec(model, mesh))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (model, mesh)
        for model in MODELS
        for mesh in (ALONE, SHARDED, REPLICATED, CUT)
        if model != "statistics" and (mesh is not CUT or model not in UNCUT)
    ],
    ids=str,
)
def test_every_user_model_on_every_mesh_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, mesh: dict[str, int]
) -> None:
    assert not MATRIX.differences(ranks, user_pipeline_spec(model, mesh))


@pytest.mark.nightly
def test_buffers_written_in_forward_belong_to_their_stage(ranks: Ranks) -> None:
    # alone: data ranks would each write what their samples give
    assert not MATRIX.differences(ranks, user_pipeline_spec("statistics", ALONE))


@pytest.mark.nightly
@pytest.mark.parametrize("data", DATA[:-1])
@pytest.mark.parametrize("model", ["tied", "tied-pairs"])
def test_shared_gradients_are_summed_for_every_shard(ranks: Ranks, model: str, data: str) -> None:
    assert not MATRIX.differences(ranks, user_pipeline_spec(model, SHARDED, data=data))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "schedule", ["naive", "gpipe", "bfs", "interleaved", "zero-bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize("model", ["qwen2", "tied", "gpt2", "gemma3", "written", "unlike"])
def test_every_schedule_is_exact_and_equals_one_device(
    ranks: Ranks, model: str, schedule: str
) -> None:
    assert not MATRIX.differences(ranks, user_pipeline_spec(model, ALONE, schedule))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["zero16", "fsdp-mixed"])
def test_user_models_over_pp_in_true_dtypes_are_exact(ranks: Ranks, layout: str) -> None:
    data = "fsdp-mixed" if layout == "fsdp-mixed" else "zero3"
    assert not MATRIX.differences(
        ranks, user_pipeline_spec("tied", SHARDED, data=data, precision={"layout": layout})
    )


@pytest.mark.nightly
def test_stages_may_be_listed_and_balanced_by_time(ranks: Ranks) -> None:
    for split in ([1, 3], "time"):
        assert not MATRIX.differences(
            ranks, user_pipeline_spec("tied", ALONE, pipeline={"split": split})
        )
