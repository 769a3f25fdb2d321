"""Transformers classes that add a term to their loss are rejected: ptrain computes the loss from
logits."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from ptrain.errors import SpecError
from ptrain.models.initialize import accept_module, build_model
from ptrain.models.pretrained import _MORE_LOSS, build_meta_module, ignored_fields
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "num_experts_per_tok": 2,
}
CLASSES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe")
# The term is no addition to the loss of the logits: the class has a loss for each of its codebooks.
CODEBOOKS = "loss_fct(codebook_logits"


def build_class(hf: str, **config: Any) -> Any:
    return build_model(HuggingFaceModel(hf=hf, config={**SIZES, **config}), sequence=16)


@pytest.mark.parametrize("hf", CLASSES)
@pytest.mark.parametrize("published", [False, True])
def test_a_router_loss_is_rejected_with_the_override_that_drops_it(
    hf: str, published: bool
) -> None:
    fields = {"model_type": hf} if published else {}
    with pytest.raises(SpecError) as caught:
        build_class(hf, output_router_logits=True, **fields)
    (fault,) = caught.value.faults
    assert fault.place == "model.config.output_router_logits"
    assert "adds a term to its loss" in fault.finding
    assert "`model.config.output_router_logits=False`" in fault.remedy
    assert build_class(hf, output_router_logits=False, **fields) is not None
    assert build_class(hf, **fields) is not None, "no class has it by itself"


def test_the_fix_is_an_override(ptrain, capsys) -> None:
    model = ", ".join(f"{key}: {value}" for key, value in SIZES.items())
    words = (
        f"model={{hf: mixtral, config: {{{model}, output_router_logits: true}}}}",
        "batch={global: 4, micro: 2, sequence: 16}",
    )
    ptrain("predict", "zero3", *words, code=2)
    ptrain("predict", "zero3", *words, "model.config.output_router_logits=False")


def test_a_loss_of_large_logits_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"Use `model\.config\.z_loss_coefficient=0\.0`"):
        build_model(HuggingFaceModel(hf="bamba", config={"z_loss_coefficient": 1e-4}), sequence=16)


def test_a_given_model_is_rejected_too() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True)
    module = transformers.MixtralForCausalLM(config)
    spec = load("zero3", ("batch={global: 4, micro: 2, sequence: 16}",)).spec
    with pytest.raises(SpecError, match=r"Use `model\.config\.output_router_logits=False`"):
        accept_module(module, spec)
    module.config.output_router_logits = False
    accept_module(module, spec)


def test_layers_of_multi_token_prediction_are_named_as_fields_without_effect() -> None:
    """No class of transformers builds them: files with their weights load without them."""
    fields = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    model = HuggingFaceModel(hf="DeepseekV3ForCausalLM", config={**SIZES, **fields})
    assert any("num_nextn_predict_layers" in field for field in ignored_fields(model))
    names = {name for name, _ in build_meta_module(model).named_modules()}
    assert not [name for name in names if "mtp" in name or "nextn" in name]


@pytest.mark.nightly
def test_no_class_builds_layers_of_multi_token_prediction_or_adds_their_loss() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [named] if isinstance(named, str) else named:
            source = inspect.getsource(getattr(transformers, name))
            assert not re.search(r"self\.\w*(mtp|nextn)\w* =|(mtp|nextn)\w*_loss", source), name


@pytest.mark.nightly
def test_no_class_adds_a_term_for_another_field() -> None:
    """Read off the sources of all classes: which fields decide that the loss has another term."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    adding = 0
    for named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [named] if isinstance(named, str) else named:
            source = inspect.getsource(getattr(transformers, name).forward)
            if re.search(r"\bloss (\+=|= loss \+)", source) and CODEBOOKS not in source:
                assert any(field in source for field in _MORE_LOSS), name
                adding += 1
    assert adding > 20
