"""User models that run on token slices over cp, and the messages for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptrain.axes.context.run.rehearsal import require_slices
from ptrain.errors import SpecError
from ptrain.facts.model import AttentionFacts
from ptrain.models.facts import attending_of
from ptrain.models.initialize import accept_module, build_model, cast_module
from ptrain.spec.spec import Spec
from tests.gloo.context_cases import HYBRID, context_spec

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}
MASKED = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 260}


def hf(name: str, config: dict[str, Any]) -> dict[str, Any]:
    pytest.importorskip("transformers")
    return {"hf": name, "config": config}


def user_spec(name: str, **arguments: Any) -> dict[str, Any]:
    return {"target": f"tests.models_sliced:{name}", "arguments": arguments}


def looked_at(spec: Spec) -> AttentionFacts:
    """What slices need of a spec's model, where it is on slices what it is on all tokens."""
    model = build_model(spec.model, sequence=spec.batch.sequence, allow_import=True)
    cast_module(model, torch.float64)
    attending = attending_of(model, spec)
    assert attending is not None
    require_slices(model, spec, attending)
    return attending


def refusal(spec: Spec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as raised:
        looked_at(spec)
    (fault,) = raised.value.faults
    return fault.place, fault.finding, fault.remedy


@pytest.mark.parametrize("attention", ["ring", "zigzag", "ulysses"])
def test_transformers_models_use_the_given_positions(attention: str) -> None:
    attending = looked_at(context_spec(attention, own=hf("llama", TINY)))
    assert [module.name for module in attending.modules] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert {(own.heads, own.kv_heads, own.head_dim) for own in attending.heads} == {(4, 2, 8)}
    assert attending.positions == "position_ids"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2", TINY),
        ("qwen3", TINY | {"head_dim": 8}),
        ("gpt2", GPT2 | {"attn_pdrop": 0.0}),
        ("gpt_neox", {k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
        ("opt", {"hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2, "vocab_size": 260,
                 "num_attention_heads": 4, "word_embed_proj_dim": 32}),
        ("gemma3_text", TINY | {"head_dim": 8}),
    ],
)  # fmt: skip
def test_other_families_use_the_given_positions(name: str, config: dict[str, Any]) -> None:
    assert len(looked_at(context_spec("zigzag", own=hf(name, config))).modules) == 2


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("gemma2", TINY | {"head_dim": 8}, "no module of gemma2 calls torch.nn.functional."),
        ("gpt2", GPT2, "transformer.h.0.attn uses dropout 0.1"),
        ("falcon", MASKED, "transformer.h.0.self_attention uses a mask"),
        ("mistral", TINY | {"sliding_window": 8}, "sliding_window of mistral is 8, but a sample"),
        ("llama", TINY | {"max_position_embeddings": 8}, "max_position_embeddings is 8, but a"),
        (
            "llama",
            TINY | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
                                        "original_max_position_embeddings": 8}},
            "rotary embeddings of llama (dynamic)",
        ),
    ],
)  # fmt: skip
def test_a_transformers_model_that_ignores_positions_is_rejected_by_name(
    name: str, config: dict[str, Any], words: str
) -> None:
    _, finding, remedy = refusal(context_spec("ring", own=hf(name, config)))
    assert words in finding and remedy


def test_a_window_larger_than_the_sample_hides_nothing() -> None:
    assert looked_at(context_spec("ring", own=hf("mistral", TINY | {"sliding_window": 17})))


@pytest.mark.parametrize("attention", ["ring", "zigzag", "all-gather", "ulysses"])
def test_a_user_model_receives_positions_as_an_argument(attention: str) -> None:
    assert looked_at(context_spec(attention, own=user_spec("placed"))).positions == "positions"


def test_torchs_attention_module_is_supported() -> None:
    attending = looked_at(context_spec("zigzag", own=user_spec("with_attention", kind="multihead")))
    assert [module.name for module in attending.modules] == [
        "layers.0.mixing.inner",
        "layers.1.mixing.inner",
    ]


def test_a_model_without_positions_needs_none() -> None:
    pairs = {"target": "tests.models_external:pairs"}
    assert looked_at(context_spec("zigzag", own=pairs)).positions == ""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (user_spec("counting"), "the forward of tests.models_sliced:counting accepts no positions"),
        (user_spec("deaf"), "does not use the positions that it receives"),
        (user_spec("late"), "returns different logits than with all tokens"),
        (user_spec("by_length"), "returns different logits than with all tokens"),
        (
            user_spec("with_attention", kind="shifted"),
            "layers.0.mixing, given only tokens 8-15 of 16",
        ),
        (
            user_spec("with_attention", kind="bound"),
            "no module of tests.models_sliced:with_attention",
        ),
        (user_spec("with_attention", kind="open"), "layers.0.mixing is not causal"),
        (user_spec("with_attention", kind="dropping"), "layers.0.mixing uses dropout 0.1"),
        (
            user_spec("with_attention", kind="twice"),
            "layers.0.mixing calls attention twice per forward pass",
        ),
        (user_spec("with_attention", kind="windowed"), "layers.0.mixing uses a mask"),
    ],
)
def test_a_user_model_that_differs_on_slices_is_rejected_by_name(
    model: dict[str, Any], words: str
) -> None:
    place, finding, remedy = refusal(context_spec("ring", degree=2, own=model))
    assert place == "model.target" and words in finding and "cp" in remedy


def test_heads_that_ulysses_cannot_divide_are_named() -> None:
    three = TINY | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    place, finding, remedy = refusal(context_spec(HYBRID, degree=4, own=hf("llama", three)))
    assert place == "context.attention"
    assert finding == ("ulysses over 2 ranks does not divide 3 heads of model.layers.0.self_attn")
    assert remedy == "Use {ulysses: 1, ring: 4}, or `context.attention=zigzag`."


def test_a_given_transformers_module_is_inspected_like_a_named_one() -> None:
    transformers = pytest.importorskip("transformers")
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    spec = accept_module(module, context_spec("zigzag", own=hf("llama", TINY)))
    attending = attending_of(module, spec)
    assert attending is not None and attending.positions == "position_ids"
    require_slices(module, spec, attending)


@pytest.mark.parametrize(
    "kind", ["module", "in-place", "samples", "flat", "tokens-first", "places"]
)
@pytest.mark.parametrize("attention", ["ring", "zigzag"])
def test_dropout_per_token_is_sliced_and_dropout_per_sample_is_not(
    attention: str, kind: str
) -> None:
    names = looked_at(context_spec(attention, own=user_spec("dropping", kind=kind))).dropping
    assert names == ("drop", "")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bound", "drop draws random numbers itself (bernoulli_), with different shapes for local"),
        ("itself", "drop draws random numbers itself (rand_like), with different shapes for local"),
        ("channels", "drop draws random numbers itself (bernoulli_), with different shapes"),
        ("last", "drop applies dropout to [1, 16, 16], and with the local tokens to [1, 16, 8];"),
        ("features", "drop applies dropout to [1, 8], which has the size of the local tokens"),
        ("place", "given only tokens 8-15 of 16, passes a different query to attention than"),
    ],
)
def test_other_random_draws_are_rejected_with_their_module(kind: str, words: str) -> None:
    place, finding, remedy = refusal(context_spec("ring", own=user_spec("dropping", kind=kind)))
    assert place == "model.target"
    assert words in finding
    assert remedy.startswith(
        "Apply dropout to [samples, tokens, …] with torch.nn.functional.dropout"
    )
