"""The presets of specs/models have as many parameters as transformers' class of the same config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ptrain.facts.model import ModelFacts, TensorFacts
from ptrain.facts.parameters import facts
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape

transformers = pytest.importorskip("transformers")

SEQUENCE = 2048  # learned positions; GPT-2 has 1024
ORDER = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
THEIRS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GEMMA3 = {"head_dim": 256, "pad_token_id": None}
QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768}

# The sizes of their configs, in ORDER, and what else a count depends on.
CONFIGS: Mapping[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama2-7b": ("Llama", (32, 4096, 32, 32, 11008, 32000), {}),
    "llama2-13b": ("Llama", (40, 5120, 40, 40, 13824, 32000), {}),
    "llama2-70b": ("Llama", (80, 8192, 64, 8, 28672, 32000), {}),
    "llama3-8b": ("Llama", (32, 4096, 32, 8, 14336, 128256), {}),
    "llama3-70b": ("Llama", (80, 8192, 64, 8, 28672, 128256), {}),
    "llama3-405b": ("Llama", (126, 16384, 128, 8, 53248, 128256), {}),
    "llama3.1-8b": ("Llama", (32, 4096, 32, 8, 14336, 128256), {}),
    "llama3.1-70b": ("Llama", (80, 8192, 64, 8, 28672, 128256), {}),
    "llama3.1-405b": ("Llama", (126, 16384, 128, 8, 53248, 128256), {}),
    "llama3.2-1b": ("Llama", (16, 2048, 32, 8, 8192, 128256), TIED),
    "llama3.2-3b": ("Llama", (28, 3072, 24, 8, 8192, 128256), TIED),
    "qwen2-0.5b": ("Qwen2", (24, 896, 14, 2, 4864, 151936), TIED),
    "qwen2-1.5b": ("Qwen2", (28, 1536, 12, 2, 8960, 151936), TIED),
    "qwen2-7b": ("Qwen2", (28, 3584, 28, 4, 18944, 152064), {}),
    "qwen2-72b": ("Qwen2", (80, 8192, 64, 8, 29568, 152064), {}),
    "qwen2.5-0.5b": ("Qwen2", (24, 896, 14, 2, 4864, 151936), TIED),
    "qwen2.5-1.5b": ("Qwen2", (28, 1536, 12, 2, 8960, 151936), TIED),
    "qwen2.5-7b": ("Qwen2", (28, 3584, 28, 4, 18944, 152064), {}),
    "qwen2.5-72b": ("Qwen2", (80, 8192, 64, 8, 29568, 152064), {}),
    "qwen3-0.6b": ("Qwen3", (28, 1024, 16, 8, 3072, 151936), TIED),
    "qwen3-1.7b": ("Qwen3", (28, 2048, 16, 8, 6144, 151936), TIED),
    "qwen3-4b": ("Qwen3", (36, 2560, 32, 8, 9728, 151936), TIED),
    "qwen3-8b": ("Qwen3", (36, 4096, 32, 8, 12288, 151936), {}),
    "qwen3-14b": ("Qwen3", (40, 5120, 40, 8, 17408, 151936), {}),
    "qwen3-32b": ("Qwen3", (64, 5120, 64, 8, 25600, 151936), {}),
    "mistral-7b": ("Mistral", (32, 4096, 32, 8, 14336, 32000), {}),
    "mixtral-8x7b": ("Mixtral", (32, 4096, 32, 8, 14336, 32000), {"num_local_experts": 8}),
    "mixtral-8x22b": ("Mixtral", (56, 6144, 48, 8, 16384, 32000), {"num_local_experts": 8}),
    "qwen3-30b-a3b": ("Qwen3Moe", (48, 2048, 32, 4, 6144, 151936), QWEN3_MOE),
    "gemma2-2b": ("Gemma2", (26, 2304, 8, 4, 9216, 256000), {"head_dim": 256}),
    "gemma2-9b": ("Gemma2", (42, 3584, 16, 8, 14336, 256000), {"head_dim": 256}),
    "gemma2-27b": ("Gemma2", (46, 4608, 32, 16, 36864, 256000), {"head_dim": 128}),
    "gemma3-1b": ("Gemma3", (26, 1152, 4, 1, 6912, 262144), GEMMA3),
    "gemma3-4b": ("Gemma3", (34, 2560, 8, 4, 10240, 262208), GEMMA3),
    "gemma3-12b": ("Gemma3", (48, 3840, 16, 8, 15360, 262208), GEMMA3),
    "gemma3-27b": ("Gemma3", (62, 5376, 32, 16, 21504, 262208), GEMMA3 | {"head_dim": 128}),
    "phi-1.5": ("Phi", (24, 2048, 32, 32, 8192, 51200), {}),
    "phi-2": ("Phi", (32, 2560, 32, 32, 10240, 51200), {}),
    "phi-3-mini": ("Phi3", (32, 3072, 32, 32, 8192, 32064), {}),
    "starcoder2-3b": ("Starcoder2", (30, 3072, 24, 2, 12288, 49152), {}),
    "starcoder2-7b": ("Starcoder2", (32, 4608, 36, 4, 18432, 49152), {}),
    "starcoder2-15b": ("Starcoder2", (40, 6144, 48, 4, 24576, 49152), UNTIED),
}
GPT2 = {
    "gpt2-124m": (12, 768, 12),
    "gpt2-355m": (24, 1024, 16),
    "gpt2-774m": (36, 1280, 20),
    "gpt2-1558m": (48, 1600, 25),
    "gpt3-125m": (12, 768, 12),
    "gpt3-350m": (24, 1024, 16),
    "gpt3-760m": (24, 1536, 16),
    "gpt3-1.3b": (24, 2048, 16),
    "gpt3-2.7b": (32, 2560, 32),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12288, 96),
}
AT_ONCE = {"llama3.2-1b", "qwen2-0.5b", "qwen3-0.6b", "gemma2-2b", "gemma3-1b", "phi-1.5"}
AT_ONCE |= {"mixtral-8x7b", "phi-3-mini", "starcoder2-3b", "mistral-7b", "gpt2-124m"}


def shape_of(preset: str) -> ModelShape:
    model = load("zero3", [f"model.preset={preset}"]).spec.model
    assert isinstance(model, ModelShape)
    return model


def count_parameters(kind: str, **config: Any) -> int:
    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset in AT_ONCE else pytest.mark.nightly)
        for preset in (*CONFIGS, *GPT2)
    ],
)
def test_a_preset_has_as_many_parameters_as_the_class_of_transformers(preset):
    if preset in GPT2:
        layers, hidden, heads = GPT2[preset]
        expected = count_parameters(
            "GPT2LMHeadModel", n_layer=layers, n_embd=hidden, n_head=heads, n_positions=SEQUENCE
        )
    else:
        name, sizes, more = CONFIGS[preset]
        config = {THEIRS[key]: size for key, size in zip(ORDER, sizes, strict=True)}
        expected = count_parameters(f"{name}ForCausalLM", **config, **more)
    assert facts(shape_of(preset), SEQUENCE).numel == expected


def test_deepseek_v3_has_the_parameters_of_its_class_with_a_custom_config():
    """Without the multi-token prediction module, which transformers omits too."""
    with torch.device("meta"):
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    known = facts(shape_of("deepseek-v3"), SEQUENCE)
    assert known.numel == expected == 671_026_404_352
    biases = [size for name, size in known.buffers if name.endswith(".bias_E")]
    assert len(biases) == 58 and sum(biases) == 58 * 256 * 4


def test_its_shape_without_latent_attention_has_the_other_parameters():
    whole, shape = (
        facts(shape_of(name), SEQUENCE) for name in ("deepseek-v3", "deepseek-v3-shape")
    )

    def besides_attention(known: ModelFacts) -> list[TensorFacts]:
        return [tensor for tensor in known.tensors if ".attention." not in tensor.name]

    assert besides_attention(whole) == besides_attention(shape)
    assert whole.buffers[2:] == shape.buffers[2:]  # behind the tables of angles
    assert shape.numel - whole.numel == 28_655_484_928 - 11_413_547_008
