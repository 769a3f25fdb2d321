"""The kinds of attention: one function in three implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ptrain.errors import SpecError
from ptrain.models.attention import FlexCore, require_trainable
from ptrain.models.cross_entropy import token_loss_sum
from ptrain.models.initialize import build_model
from ptrain.models.ledger import Ledger
from ptrain.spec.model import Attention, HuggingFaceModel, ModelShape
from tests.unit.shapes import ODD_SHAPE, SHAPES, SMALL_GPT
from tests.unit.test_models import real, tokens_of

LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}


def with_kind(shape: ModelShape, kind: Attention, dtype=torch.float64):
    return real(replace(shape, attention=kind), dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_eager_attention_equals_torchs_within_rounding(shape):
    rows, found = tokens_of(shape), []
    for kind in (Attention.SDPA, Attention.EAGER):
        model = with_kind(shape, kind)
        loss = token_loss_sum(model(rows), rows)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_grouped_attention_equals_that_with_copies_of_keys_and_values_within_rounding():
    shape = replace(ODD_SHAPE, kv_heads=1)
    rows, found = tokens_of(shape), []
    assert shape.heads > 1
    for kind in (Attention.SDPA, Attention.SDPA_GQA):
        model = with_kind(shape, kind)
        loss = token_loss_sum(model(rows), rows)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_eager_attention_drops_what_torchs_drops():
    """torch's implementation goes operator by operator if probabilities are dropped."""
    shape, logits = replace(SMALL_GPT, dropout=0.3), []
    for kind in (Attention.SDPA, Attention.EAGER):
        torch.manual_seed(0)
        logits.append(with_kind(shape, kind)(tokens_of(shape)))
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-12)
    assert torch.equal(
        *(with_kind(shape, k).eval()(tokens_of(shape)) for k in [Attention.EAGER] * 2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_of_eager_attention_have_a_separate_storage(dtype):
    class Births(Ledger):
        sizes_born: list[int]

        def on_allocation(self, key, storage, operator):
            self.sizes_born.append(storage.nbytes())

    sizes = {}
    for kind in (Attention.SDPA, Attention.EAGER):
        model, ledger = with_kind(SMALL_GPT, kind, dtype), Births()
        ledger.sizes_born = []
        with ledger:
            model(tokens_of(SMALL_GPT, samples=5, tokens=11))
        sizes[kind] = ledger.sizes_born
    scores = 5 * SMALL_GPT.heads * 11 * 11 * dtype.itemsize
    assert scores in sizes[Attention.EAGER]
    assert scores not in sizes[Attention.SDPA]


def test_flex_attention_equals_torchs_without_gradients():
    shape = SHAPES[0]
    with torch.no_grad(), Ledger():
        own, flex = (
            with_kind(shape, kind)(tokens_of(shape)) for kind in (Attention.SDPA, Attention.FLEX)
        )
    torch.testing.assert_close(own, flex, rtol=1e-12, atol=1e-12)


def test_flex_attention_is_rejected_where_it_has_no_backward_pass():
    model = HuggingFaceModel(hf="LlamaForCausalLM", attention=Attention.FLEX)
    require_trainable(model, torch.device("cuda"))
    require_trainable(replace(model, attention=Attention.EAGER), torch.device("cpu"))
    with pytest.raises(SpecError, match=r"no backward pass on cpu\n.*`attention=sdpa`"):
        require_trainable(model, torch.device("cpu"))
    q = torch.zeros(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError):  # when torch has it, nothing is to be refused
        FlexCore()(q, q, q)


def test_flex_attention_rejects_dropout():
    shape = replace(SMALL_GPT, dropout=0.1, attention=Attention.FLEX)
    with pytest.raises(SpecError, match="flex_attention has no dropout"):
        build_model(shape, sequence=8)


@pytest.mark.parametrize("kind", [kind for kind in Attention if kind is not Attention.SDPA_GQA])
def test_transformers_classes_use_the_attention_of_the_spec(kind):
    pytest.importorskip("transformers")
    model = build_model(HuggingFaceModel(hf="llama", config=LLAMA, attention=kind), sequence=8)
    wanted = {Attention.FLEX: "flex_attention"}.get(kind, kind.value)
    assert model.config._attn_implementation == wanted


def test_a_class_of_transformers_without_the_kind_is_rejected():
    pytest.importorskip("transformers")
    model = HuggingFaceModel(hf="bloom", config={"hidden_size": 16, "n_head": 2, "n_layer": 1})
    with pytest.raises(SpecError, match=r"does not support sdpa\n.*`attention=eager`"):
        build_model(replace(model, attention=Attention.SDPA), sequence=8)
    build_model(replace(model, attention=Attention.EAGER), sequence=8)
