"""Causal language models of transformers: built from a class and a config with the names and sizes
of transformers, and one message per mistake."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.models.initialize import build_model, keeps_its_weights
from ptrain.models.pretrained import ignored_fields
from ptrain.models.units import unit_modules
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.load import load
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape
from ptrain.spec.spec import require_transformers
from tests.published import PUBLISHED

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
    ("lama", {}, "model.hf", "no causal language model 'lama'", "Did you mean 'llama'"),
    ("BertModel", {}, "model.hf", "'BertModel'", "Did you mean"),
    ("nothing-like-it-at-all", {}, "model.hf", "no causal", "LlamaForCausalLM"),
    ("llama", {"hiden_size": 3}, "model.config.hiden_size", "no field", "mean 'hidden_size'"),
    ("llama", {"blue": 3}, "model.config.blue", "no field 'blue'", "hidden_size"),
    ("llama", {"num_key_value_heads": 3}, "model.config", "must match", "Change"),
    ("llama", {"num_attention_heads": 5}, "model.config", "", "Change"),
    ("llama", {"num_attention_heads": 0}, "model.config", "division", "Change"),
    ("llama", {"hidden_size": "wide"}, "model.config.hidden_size", "", "Change"),
    ("llama", {"hidden_act": "sulu"}, "model.config", "sulu", "Change"),
    ("llama", {"max_position_embeddings": 4}, "model.config", "16 tokens", "to 16 or more"),
    ("llama", {"use_cache": True}, "model.config.use_cache", "by training", "Remove it"),
    ("llama", {"dtype": "bfloat16"}, "model.config.dtype", "by precision", "Remove it"),
]


def build_class(hf: str = "llama", **config: Any) -> torch.nn.Module:
    return build_model(HuggingFaceModel(hf=hf, config=CONFIG | config), sequence=SEQUENCE, seed=1)


@pytest.mark.parametrize(("hf", "config", "place", "finding", "remedy"), FAULTS)
def test_an_error_states_place_finding_and_fix(hf, config, place, finding, remedy):
    with pytest.raises(SpecError) as caught:
        build_model(HuggingFaceModel(hf=hf, config=CONFIG | config), sequence=SEQUENCE)
    (fault,) = caught.value.faults
    assert fault.place == place and finding in fault.finding and remedy in fault.remedy


@pytest.mark.parametrize("hf", ["llama", "LlamaForCausalLM"])
def test_names_and_logits_are_those_of_transformers(hf):
    model = build_class(hf)
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
def test_the_default_attention_is_the_best_of_the_class(hf, kind):
    assert build_class(hf).config._attn_implementation == kind


def test_attention_that_is_named_and_that_the_class_lacks_is_rejected():
    model = HuggingFaceModel(hf="gemma2", config=CONFIG, attention=Attention.SDPA)
    with pytest.raises(SpecError, match=r"does not support sdpa(.|\n)*Use `attention=eager`"):
        build_model(model, sequence=SEQUENCE)


def test_weights_follow_from_the_seed_and_the_generator_is_left_alone():
    before = torch.get_rng_state()
    one, other = build_class(), build_class()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert keeps_its_weights(one)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied):
    model = build_class(tie_word_embeddings=tied)
    names = [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" not in names) is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_units_are_the_blocks_that_the_class_names():
    assert unit_modules(build_class()) == (("model.layers.0",), ("model.layers.1",), ("",))
    neox = build_model(HuggingFaceModel(hf="gpt_neox", config=NEOX), sequence=SEQUENCE)
    assert unit_modules(neox) == (("gpt_neox.layers.0",), ("gpt_neox.layers.1",), ("",))


def test_units_may_be_parts_of_blocks():
    units = unit_modules(build_class(num_hidden_layers=1), UnitSize(kind=UnitKind.SUB_BLOCK))
    assert units == (
        ("model.layers.0.self_attn",),
        ("model.layers.0.mlp",),
        ("model.layers.0",),
        ("",),
    )


def test_without_transformers_the_fix_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SpecError, match=r"pip install 'transformers>="):
        build_class()


def test_a_built_in_model_does_not_import_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    shape = ModelShape(family="llama", layers=1, hidden=8, heads=2, kv_heads=2, ffn=8, vocab=260)
    require_transformers(shape)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_config_is_taken_whole(kind):
    whole = PUBLISHED[kind]
    named = whole["architectures"][0]
    ours = build_model(HuggingFaceModel(hf=named, config=whole), sequence=SEQUENCE)
    theirs = getattr(transformers, named)
    with torch.device("meta"):
        model = theirs(theirs.config_class.from_dict(whole))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {name: tuple(tensor.shape) for name, tensor in ours.named_parameters()} == shapes


def test_fields_without_effect_are_named_and_harmless_ones_are_not():
    ignored = ignored_fields(HuggingFaceModel(hf="gemma2", config=PUBLISHED["gemma2"]))
    assert ignored == ("hidden_act (ignored)", "sliding_window_size (ignored)")
    eager = PUBLISHED["llama"] | {"attn_implementation": "eager"}
    ignored = ignored_fields(HuggingFaceModel(hf="llama", config=eager))
    assert ignored == ("attn_implementation (set by attention)",)
    neox = ignored_fields(HuggingFaceModel(hf="gpt_neox", config=PUBLISHED["gpt_neox"]))
    assert neox == (), "fields that a config converts are read"
    assert ignored_fields(HuggingFaceModel(hf="llama", config=CONFIG)) == ()


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "torch_dtype": "bfloat16",
}


def test_a_field_that_a_class_declares_and_never_reads_is_named():
    ignored = ignored_fields(HuggingFaceModel(hf="DeepseekV3ForCausalLM", config=DEEPSEEK))
    assert ignored == (
        "num_nextn_predict_layers (ignored)",
        "scoring_func (ignored)",
    )
    off = DEEPSEEK | {"num_nextn_predict_layers": 0, "auto_map": {}}
    ignored = ignored_fields(HuggingFaceModel(hf="DeepseekV3ForCausalLM", config=off))
    assert ignored == ("scoring_func (ignored)",)
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    inline = ignored_fields(HuggingFaceModel(hf="DeepseekV3ForCausalLM", config=fields))
    assert inline == ("num_nextn_predict_layers (ignored)",)


@pytest.mark.parametrize("empty", [{}, None])
@pytest.mark.parametrize("field", ["auto_map", "quantization_config", "vision_config"])
def test_an_empty_field_names_no_code_and_no_second_model(field, empty):
    config = PUBLISHED["llama"] | {field: empty}
    model = HuggingFaceModel(hf="LlamaForCausalLM", config=config)
    assert build_model(model, sequence=SEQUENCE) is not None
    assert ignored_fields(model) == ()


def test_all_faults_of_a_config_come_at_once():
    bad = {"auto_map": {"AutoModel": "x--y"}, "quantization_config": {"bits": 4}}
    bad |= {"hidden_size": "wide", "vocab_size": "large", "mlp_bia": True}
    config = {name: value for name, value in PUBLISHED["llama"].items() if name != "mlp_bias"} | bad
    with pytest.raises(SpecError) as caught:
        build_model(HuggingFaceModel(hf="LlamaForCausalLM", config=config), sequence=SEQUENCE)
    places = [fault.place.removeprefix("model.config.") for fault in caught.value.faults]
    assert places == ["auto_map", "quantization_config", "mlp_bia", "vocab_size", "hidden_size"]
    with pytest.raises(SpecError) as caught:
        build_model(HuggingFaceModel(hf="NoClass", config=config), sequence=SEQUENCE)
    assert len(caught.value.faults) == 3, "code, quantized weights, and the class itself"


@pytest.mark.parametrize(
    ("fields", "place", "finding"),
    [
        ({"auto_map": {"AutoModel": "x--y"}}, "model.config.auto_map", "never runs"),
        (
            {"vision_config": {"depth": 2}},
            "model.config.vision_config",
            "a nested model, as in multimodal",
        ),
        ({"quantization_config": {"bits": 4}}, "model.config.quantization_config", "quantized"),
        ({"model_type": "qwen2"}, "model.config.model_type", "'qwen2', but LlamaForCausalLM has"),
        ({"hiden_size": 32, "hidden_size": None}, "model.config.hiden_size", "has no field"),
    ],
)
def test_forbidden_fields_of_a_published_config_are_rejected(fields, place, finding):
    whole = {**PUBLISHED["llama"], **fields}
    config = {field: value for field, value in whole.items() if value is not None}
    with pytest.raises(SpecError) as caught:
        build_model(HuggingFaceModel(hf="LlamaForCausalLM", config=config), sequence=SEQUENCE)
    (fault,) = caught.value.faults
    assert fault.place == place and finding in fault.finding and fault.remedy


def test_head_dim_is_a_field_of_qwens_experts():
    config = CONFIG | {"head_dim": 16, "moe_intermediate_size": 8, "num_experts": 8}
    model = build_model(HuggingFaceModel(hf="qwen3_moe", config=config), sequence=SEQUENCE)
    query = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert query.shape == (4 * 16, 32)


def test_a_file_next_to_the_spec_is_read_and_names_its_class(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama"]))
    spec = tmp_path / "mine.yaml"
    rest = "mesh: {dp_shard: 2}\nplacement: zero2\nbatch: {micro: 2, sequence: 8}\n"
    spec.write_text(f"model: {{config: config.json}}\n{rest}")
    model = load(str(spec)).spec.model
    assert model.hf == "LlamaForCausalLM" and model.config == PUBLISHED["llama"]
    assert load(load(str(spec)).spec.resolved).spec.model == model
    spec.write_text(f"model: {{config: none.json}}\n{rest}")
    with pytest.raises(SpecError, match=r"model.config: none.json: No such file"):
        load(str(spec))
    spec.write_text(f"model: {{config: {{model_type: llama}}}}\n{rest}")
    with pytest.raises(SpecError, match=r"Add `model\.hf`"):
        load(str(spec))
