"""A published config.json read as a built-in model: all errors together, and ignored fields by
name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.published import PUBLISHED

Read = Callable[..., Spec]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(kind: str = "llama", *overrides: str, **fields: Any) -> Spec:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[kind] | fields))
        model = f"model={{pretrained: {tmp_path}}}"
        return load("zero3", [model, "batch.sequence=32", *overrides]).spec

    return read


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": {}, "quantization_config": {}, "rope_scaling": {}},
        {"auto_map": None, "quantization_config": None, "rope_scaling": None},
        {"attention_bias": None, "mlp_bias": None, "layer_types": None, "rope_parameters": None},
        {"layer_types": [], "num_nextn_predict_layers": 0, "residual_multiplier": 1.0},
    ],
)
def test_empty_fields_change_nothing(read: Read, fields: dict[str, Any]) -> None:
    plain = {"rope_scaling": None} if "rope_scaling" in fields else {}
    model = read(**fields).model
    assert model == read(**plain).model
    assert model.ignored == ()


def test_all_faults_of_a_config_come_at_once(read: Read) -> None:
    fields = {
        "auto_map": {"AutoModel": "x.Y"},
        "quantization_config": {"bits": 4},
        "num_nextn_predict_layers": 1,
        "hidden_act": "relu",
        "attention_bias": True,
        "hidden_size": None,
        "num_hidden_layers": "two",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "layer_types": ["sliding_attention"],
    }
    with pytest.raises(SpecError) as caught:
        read("llama", "train.steps=0", **fields)
    *faults, last = caught.value.faults
    findings = [fault.finding.partition("config.json: ")[2] for fault in faults]
    beginnings = [
        "auto_map: it refers to code",
        "quantization_config: its weights are quantized",
        "num_nextn_predict_layers is 1; the built-in model has no layers of multi-token",
        "hidden_size is missing",
        "hidden_act is 'relu'; the built-in model supports 'silu'",
        "attention_bias is True",
        "the rotary scaling has no low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings",
        "layer_types: layer 0 is 'sliding_attention'",
        "layers: must be an integer in 1..10000; got the string 'two'",
    ]
    assert len(findings) == len(beginnings)
    assert all(map(str.startswith, findings, beginnings))
    assert {fault.place for fault in faults} == {"model.pretrained"}
    assert all(fault.remedy for fault in faults)
    assert last.place == "train.steps", "a fault of another section stays"


def test_an_unknown_kind_does_not_hide_its_code(read: Read) -> None:
    with pytest.raises(SpecError) as caught:
        read(model_type="novel", auto_map={"AutoModel": "x.Y"})
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("llama", "num_nextn_predict_layers", 1),
        ("llama", "n_routed_experts", 8),
        ("qwen2", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "router_jitter_noise", 0.1),
        ("llama", "residual_multiplier", 0.22),
        ("gemma2", "kv_lora_rank", 16),
    ],
)
def test_a_field_that_adds_a_computation_is_rejected(
    read: Read, kind: str, field: str, value: object
) -> None:
    with pytest.raises(SpecError, match=f"{field} is {value}; the built-in model has no "):
        read(kind, **{field: value})


def test_fields_without_effect_are_a_warning_of_predictions(read: Read) -> None:
    spec = read(attention_dropout=0.1, novel_field=False, bos_token_id=1, sliding_window=None)
    named = (
        "attention_dropout (set model.attention_dropout=0.1)",
        "novel_field (ignored)",
    )
    assert spec.model.ignored == named
    (warning,) = derive(spec).exact.warnings
    assert warning == f"fields of the model's config without effect: {', '.join(named)}"


def test_a_field_that_the_spec_overrides_is_not_listed(read: Read) -> None:
    written = "model.attention_dropout=0.2"
    assert read("llama", written, attention_dropout=0.1).model.ignored == ()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2", "qwen3_moe"])
def test_no_field_of_a_kind_is_named_but_dropouts_and_losses(read: Read, kind: str) -> None:
    """The fields of each kind are silent, read or checked: a warning on each file is noise."""
    ignored = read(kind).model.ignored
    assert {phrase.split()[0] for phrase in ignored} <= {
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef",
        "hidden_act", "sliding_window_size",
    }  # fmt: skip
