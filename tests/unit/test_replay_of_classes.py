"""`ptrain simulate` of a transformers class by a few of its blocks gives the figures of running
all; every block runs if their equality is not proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ptrain.simulation import execute
from ptrain.simulation.equal_blocks import EqualBlocks, equal_blocks
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.spec import Spec
from tests.unit.test_replay_of_blocks import assert_equal_to_every_block

modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

LAYERS = 9
nightly = pytest.mark.nightly
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 261,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_head": 4, "vocab_size": 261, "n_positions": 64}
BATCH = "batch={global: 4, micro: 1, sequence: 16}"
LLAMA = "LlamaForCausalLM"


def of_class(hf: str, strategy: str, *changes: str, layers: int = LAYERS, **config: Any) -> Spec:
    shape = {**GPT2, "n_layer": layers} if hf.startswith("GPT2") else SMALL
    counted = {"num_hidden_layers": layers} if shape is SMALL else {}
    fields = {**shape, **counted, **config}
    attention = "attention=eager" if hf.startswith("Gemma2") else "attention=sdpa"
    return load(
        strategy, [f"model={{hf: {hf}, config: {fields}}}", BATCH, attention, *changes]
    ).spec


def blocks(spec: Spec) -> EqualBlocks | None:
    return equal_blocks(spec, 0, fewest=3, least=LAYERS)


@pytest.mark.parametrize(
    ("hf", "strategy", "changes"),
    [
        (LLAMA, "zero3", ()),
        pytest.param("GPT2LMHeadModel", "fsdp-mixed", ("activations=M",), marks=nightly),
        pytest.param("Qwen3ForCausalLM", "zero3", (), marks=nightly),
        pytest.param(LLAMA, "zero3", ("activations=M",), marks=nightly),
        pytest.param(LLAMA, "zero3", ('activations={"0-3": M, "4-8": M}',), marks=nightly),
        pytest.param(LLAMA, "zero3", ("unit=sub-block",), marks=nightly),
        pytest.param(LLAMA, "fsdp-offload", (), marks=nightly),
        pytest.param(LLAMA, "muon", (), marks=nightly),
        pytest.param(LLAMA, "tp", ("batch={global: 1, micro: 1, sequence: 16}",), marks=nightly),
        pytest.param("GPT2LMHeadModel", "zero1", ("cluster.preset=h100-8",), marks=nightly),
    ],
)
def test_a_few_identical_blocks_of_a_class_represent_all(
    hf: str, strategy: str, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "FEWEST", 3)
    monkeypatch.setattr(execute, "LEAST", LAYERS)
    few = assert_equal_to_every_block(of_class(hf, strategy, *changes))
    assert few.replayed == LAYERS


@nightly
def test_a_few_blocks_represent_all_in_stages_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "FEWEST", 3)
    monkeypatch.setattr(execute, "LEAST", LAYERS)
    spec = of_class(LLAMA, "pp-1f1b", "pipeline.split=[9, 9]", layers=18)
    assert assert_equal_to_every_block(spec).replayed == 9


@nightly
def test_a_bucket_that_later_blocks_may_fill_is_not_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute, "LEAST", LAYERS)
    assert assert_equal_to_every_block(of_class(LLAMA, "ddp")).replayed is None


@pytest.mark.parametrize(
    ("hf", "equal", "differing"),
    [
        # every other block attends in a window
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * LAYERS}, {}),
        ("Qwen2ForCausalLM", {}, {"use_sliding_window": True, "max_window_layers": 5}),
        ("GPT2LMHeadModel", {}, {"scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_where_blocks_of_a_class_differ_every_one_runs(
    hf: str, equal: dict[str, Any], differing: dict[str, Any]
) -> None:
    assert blocks(of_class(hf, "zero3", **equal)) is not None
    assert blocks(of_class(hf, "zero3", **differing)) is None


def test_of_fewer_blocks_than_pay_for_the_runs_every_one_runs() -> None:
    assert blocks(of_class(LLAMA, "zero3", layers=LAYERS - 1)) is None


def test_a_list_with_the_same_entry_for_each_layer_is_cut() -> None:
    kinds = ["full_attention"] * LAYERS
    of_rank = blocks(of_class("Gemma2ForCausalLM", "zero3", layer_types=kinds))
    assert of_rank is not None
    model = of_rank.cut_to(4).model
    assert isinstance(model, HuggingFaceModel)
    assert model.config["layer_types"] == kinds[:4]
    assert model.config["num_hidden_layers"] == 4


def of_block(index: int, then: Callable[[Any], Any]) -> Callable[..., Any]:
    """A block's forward pass, after which one of them does more with its output."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = forward(self, *args, **kwargs)
        return then(y) if self.self_attn.layer_idx == index else y

    return patched


@pytest.mark.parametrize("index", [1, 7])
def test_a_block_that_does_more_by_its_index_is_seen_to(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = of_class(LLAMA, "zero3")
    assert blocks(spec) is not None
    forward = of_block(index, lambda y: y * 2)
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    assert blocks(spec) is None


def test_a_block_with_an_input_from_an_earlier_block_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[torch.Tensor] = []
    forward = modeling_llama.LlamaDecoderLayer.forward

    def skipping(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(hidden_states)
        taken = given[-2] if self.self_attn.layer_idx == 6 else hidden_states
        return forward(self, taken, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", skipping)
    assert blocks(of_class(LLAMA, "zero3")) is None


def test_a_block_with_another_attribute_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize = modeling_llama.LlamaDecoderLayer.__init__

    def marked(self: Any, config: Any, layer_idx: int) -> None:
        initialize(self, config, layer_idx)
        self.is_late = layer_idx > 6

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", marked)
    assert blocks(of_class(LLAMA, "zero3")) is None


def test_blocks_of_a_user_model_are_not_assumed_identical() -> None:
    spec = load("zero3", ["model={target: 'tests.models_external:necks'}", BATCH]).spec
    assert blocks(spec) is None
