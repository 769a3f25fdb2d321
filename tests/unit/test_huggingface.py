"""Causal language models of transformers: built from a class and a config, under the names and with
the numbers that transformers gives them, and every mistake has its message."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.models.build import build
from ptrain.models.initialize import keeps_its_weights
from ptrain.models.units import unit_modules
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.extras import require_transformers
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape

transformers = pytest.importorskip("transformers")

SEQUENCE = 16
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
NEOX = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
FAULTS = [
    ("lama", {}, "model.hf", "no causal language model 'lama'", "did you mean 'llama'"),
    ("BertModel", {}, "model.hf", "'BertModel'", "did you mean"),
    ("nothing-like-it-at-all", {}, "model.hf", "no causal", "LlamaForCausalLM"),
    ("llama", {"hiden_size": 3}, "model.config.hiden_size", "no field", "mean 'hidden_size'"),
    ("llama", {"blue": 3}, "model.config.blue", "no field 'blue'", "hidden_size"),
    ("llama", {"num_key_value_heads": 3}, "model.config", "must match", "change"),
    ("llama", {"num_attention_heads": 5}, "model.config", "", "change"),
    ("llama", {"num_attention_heads": 0}, "model.config", "division", "change"),
    ("llama", {"hidden_size": "wide"}, "model.config", "", "change"),
    ("llama", {"hidden_act": "sulu"}, "model.config", "sulu", "change"),
    ("llama", {"max_position_embeddings": 4}, "model.config", "16 tokens", ": 16 or more"),
    ("llama", {"use_cache": True}, "model.config.use_cache", "by training", "remove it"),
    ("llama", {"dtype": "bfloat16"}, "model.config.dtype", "by precision", "remove it"),
]


def built(hf: str = "llama", **config: Any) -> torch.nn.Module:
    return build(HuggingFaceModel(hf=hf, config=CONFIG | config), sequence=SEQUENCE, seed=1)


@pytest.mark.parametrize(("hf", "config", "place", "finding", "remedy"), FAULTS)
def test_a_fault_says_where_what_and_what_instead(hf, config, place, finding, remedy):
    with pytest.raises(SpecError) as caught:
        build(HuggingFaceModel(hf=hf, config=CONFIG | config), sequence=SEQUENCE)
    (fault,) = caught.value.faults
    assert fault.place == place and finding in fault.finding and remedy in fault.remedy


@pytest.mark.parametrize("hf", ["llama", "LlamaForCausalLM"])
def test_names_and_logits_are_those_of_transformers(hf):
    model = built(hf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    assert type(model).__name__ == type(theirs).__name__
    state = theirs.state_dict()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    assert torch.equal(model(tokens), theirs(input_ids=tokens).logits)


@pytest.mark.parametrize(("hf", "kind"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_attention_that_nobody_names_is_the_best_that_the_class_has(hf, kind):
    assert built(hf).config._attn_implementation == kind


def test_attention_that_is_named_and_that_the_class_lacks_is_refused():
    model = HuggingFaceModel(hf="gemma2", config=CONFIG, attention=Attention.SDPA)
    with pytest.raises(SpecError, match=r"does not have sdpa(.|\n)*write attention: eager"):
        build(model, sequence=SEQUENCE)


def test_weights_follow_from_the_seed_and_the_generator_is_left_alone():
    before = torch.get_rng_state()
    one, other = built(), built()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert keeps_its_weights(one)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied):
    model = built(tie_word_embeddings=tied)
    names = [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" not in names) is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_units_are_the_blocks_that_the_class_names():
    assert unit_modules(built()) == (("model.layers.0",), ("model.layers.1",), ("",))
    neox = build(HuggingFaceModel(hf="gpt_neox", config=NEOX), sequence=SEQUENCE)
    assert unit_modules(neox) == (("gpt_neox.layers.0",), ("gpt_neox.layers.1",), ("",))


def test_units_may_be_parts_of_blocks():
    units = unit_modules(built(num_hidden_layers=1), UnitSize(kind=UnitKind.SUB_BLOCK))
    assert units == (
        ("model.layers.0.self_attn",),
        ("model.layers.0.mlp",),
        ("model.layers.0",),
        ("",),
    )


def test_without_transformers_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SpecError, match=r"pip install 'transformers>="):
        built()


def test_a_built_in_model_asks_for_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    shape = ModelShape(family="llama", layers=1, hidden=8, heads=2, kv_heads=2, ffn=8, vocab=260)
    require_transformers(shape)
