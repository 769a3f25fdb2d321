"""User models and transformers models on token slices over cp compute the result of one device at
exactly the predicted cost."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from ptrain.spec.spec import Spec
from tests.gloo.context_cases import HYBRID, VARIANTS, context_spec
from tests.gloo.context_runs import MATRIX
from tests.gloo.test_context import DATA, OPERATORS, STATES, nightly_except
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
PLACED: dict[str, Any] = {"target": "tests.models_sliced:placed"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hf": "LlamaForCausalLM", "config": LLAMA},
    "tied": {"hf": "llama", "config": {**LLAMA, "tie_word_embeddings": True}},
    "qwen2": {"hf": "qwen2", "config": LLAMA},
    "qwen3": {"hf": "qwen3", "config": LLAMA | {"head_dim": 8}},
    "gpt2": {"hf": "gpt2", "config": GPT2 | NO_DROPOUT},  # learned positions, a fused projection
    "placed": PLACED,  # the user's: learned positions by an argument
    "few": {"hf": "llama", "config": LLAMA | {"num_key_value_heads": 1}},  # Ulysses repeats them
    "pairs": {"target": "tests.models_external:pairs"},  # the user's, without positions
}


def user_context_spec(attention: Any, model: str = "llama", **sections: Any) -> Spec:
    """Return a spec on cp 2; transformers models require transformers."""
    whose = "hf" if "hf" in MODELS[model] else "own"
    if whose == "hf":
        pytest.importorskip("transformers")
    return context_spec(attention, f"{whose}-{model}", own=MODELS[model], **sections)


@pytest.mark.parametrize(
    ("attention", "model"), nightly_except([*product(VARIANTS, MODELS)], {("zigzag", "qwen3")})
)
def test_user_models_over_cp_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str
) -> None:
    assert not MATRIX.differences(ranks, user_context_spec(attention, model))


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["qwen2", "gpt2", "placed"])
@pytest.mark.parametrize("attention", [*VARIANTS[:3], HYBRID], ids=str)
def test_user_models_over_cp_on_four_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, attention: Any, model: str
) -> None:
    assert not MATRIX.differences(ranks, user_context_spec(attention, model, degree=4))


@pytest.mark.nightly
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("model", ["tied", "placed"])
def test_user_models_with_states_sharded_over_cp_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, states: str
) -> None:
    assert not MATRIX.differences(ranks, user_context_spec("zigzag", model, states=states))


@pytest.mark.nightly
@pytest.mark.parametrize("data", DATA, ids=str)
@pytest.mark.parametrize(
    ("attention", "model", "states"),
    [("zigzag", "qwen3", "S*,S,S"), ("ring", "gpt2", "R,R,R"), ("ulysses", "placed", "R,S,R")],
)
def test_user_models_over_cp_with_data_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, states: str, data: dict[str, str]
) -> None:
    assert not MATRIX.differences(
        ranks, user_context_spec(attention, model, states=states, other=data)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("operators", OPERATORS, ids=str)
@pytest.mark.parametrize(
    ("attention", "model"),
    [("zigzag", "llama"), ("ring", "qwen3"), ("all-gather", "tied"), ("zigzag", "pairs")],
)
def test_user_models_over_cp_with_tp_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, operators: dict[str, str]
) -> None:
    assert not MATRIX.differences(ranks, user_context_spec(attention, model, other=operators))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    ("attention", "model"), [("zigzag", "llama"), ("ring", "gpt2"), ("ulysses", "placed")]
)
def test_user_models_over_cp_with_pp_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, schedule: str
) -> None:
    spec = user_context_spec(
        attention, model, other={"pp": "S,S,S,R"}, accumulate=4, pipeline={"schedule": schedule}
    )
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kept",
    [
        {"activations": "M"},
        {"activations": "M", "recompute": "selective"},
        {"activations": "O"},
        {"loss": {"chunk": 4}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("attention", "model"), [("zigzag", "llama"), ("ulysses", "placed")])
def test_user_models_over_cp_with_every_activation_mode_are_exact_and_equal_one_device(
    ranks: Ranks, attention: str, model: str, kept: dict[str, Any]
) -> None:
    assert not MATRIX.differences(ranks, user_context_spec(attention, model, **kept))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["fp32", "bf16", "zero16"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_user_models_over_cp_in_true_dtypes_are_exact(
    ranks: Ranks, attention: str, layout: str
) -> None:
    spec = user_context_spec(attention, "tied", precision={"layout": layout})
    assert not MATRIX.differences(ranks, spec)
