"""A composed model computes what transformers' class of the same config does, in fp64: weights are
copied by name, and logits compared. Where theirs computes in fp32 whatever the dtype (rotations,
norms, softmax), torch's fp32 is made fp64 while it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ptrain.models.build import build
from ptrain.models.initialize import cast
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape

transformers = pytest.importorskip("transformers")

SEQUENCE, VOCAB = 24, 260
BIAS = "e_score_correction_bias"
SIZES = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB}
THEIR_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",  # else by grouped products, of which torch has none in fp64
}
GEMMA = {
    "norm": "rms-plus-one",
    "norm_eps": 1e-6,
    "activation": "geglu",
    "post_norm": True,
    "head_dim": 16,
    "embedding_scale": 32**0.5,
    "attention_scale": 12**-0.5,
    "tied": True,
    "window": 7,
}
THEIR_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 7,
    "rms_norm_eps": 1e-6,
}

# By ptrain's name of a module, theirs; {} is a block's number.
LLAMA = {
    "embed": "model.embed_tokens",
    "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.{}.attention.query": "model.layers.{}.self_attn.q_proj",
    "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.{}.attention.key": "model.layers.{}.self_attn.k_proj",
    "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.{}.attention.value": "model.layers.{}.self_attn.v_proj",
    "blocks.{}.attention.output": "model.layers.{}.self_attn.o_proj",
    "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.{}.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.{}.mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
SANDWICH = LLAMA | {
    "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blocks.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
MOE = LLAMA | {
    "blocks.{}.mlp.router": "model.layers.{}.mlp.gate",
    **{
        f"blocks.{{}}.mlp.shared.{part}": f"model.layers.{{}}.mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
DEEPSEEK = MOE | {
    "blocks.{}.attention.query_down": "model.layers.{}.self_attn.q_a_proj",
    "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "blocks.{}.attention.query_up": "model.layers.{}.self_attn.q_b_proj",
    "blocks.{}.attention.kv_down": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "blocks.{}.attention.kv_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "blocks.{}.attention.kv_up": "model.layers.{}.self_attn.kv_b_proj",
}
OF_STREAM = DEEPSEEK | {
    "blocks.{}.attention.query_up": "model.layers.{}.self_attn.q_proj",
}
STARCODER = LLAMA | {
    "blocks.{}.mlp.up": "model.layers.{}.mlp.c_fc",
    "blocks.{}.mlp.down": "model.layers.{}.mlp.c_proj",
}
PHI = STARCODER | {
    "blocks.{}.attention.output": "model.layers.{}.self_attn.dense",
    "blocks.{}.mlp.up": "model.layers.{}.mlp.fc1",
    "blocks.{}.mlp.down": "model.layers.{}.mlp.fc2",
    "norm": "model.final_layernorm",
}
GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
    "blocks.{}.attention.output": "transformer.h.{}.attn.c_proj",
    "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.{}.mlp.up": "transformer.h.{}.mlp.c_fc",
    "blocks.{}.mlp.down": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
}
# DeepSeek-V3, small: heads of 6 features that do not turn and 4 that do, with values of 8.
TURNING = 4
THEIR_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": TURNING,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
OUR_DEEPSEEK = {
    "kv_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": TURNING,
    "v_head_dim": 8,
    "experts": 8,
    "experts_per_token": 3,
    "expert_groups": 4,
    "groups_per_token": 2,
    "shared_experts": 1,
    "expert_ffn": 20,
    "dense_layers": 1,
    "router": "sigmoid",
    "router_scale": 2.5,
    "bias_update_rate": 0.001,
    "norm_eps": 1e-6,
}
LONGER = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
          "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
          "original_max_position_embeddings": 16}  # fmt: skip
_FUSED = re.compile(r"blocks\.(\d+)\.attention\.(query|key|value)\.(weight|bias)")
_THIRDS = ("query", "key", "value")

Names = Mapping[str, str]
Case = tuple[str, dict[str, Any], dict[str, Any], Names]  # class, their config, our shape, names

CASES: Mapping[str, Case] = {
    "llama": ("LlamaForCausalLM", {"rms_norm_eps": 1e-5}, {}, LLAMA),
    "llama, as 3.1 scales": (
        "LlamaForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            "rope_base": 500.0,
            "rope_scaling": "llama3",
            "rope_factor": 8.0,
            "rope_original": 16,
        },
        LLAMA,
    ),
    "llama, linear": (
        "LlamaForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        },
        {"rope_scaling": "linear", "rope_factor": 3.0},
        LLAMA,
    ),
    "qwen2": ("Qwen2ForCausalLM", {}, {"bias": "qkv", "norm_eps": 1e-6}, LLAMA),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"head_dim": 24},
        {"qk_norm": True, "head_dim": 24, "norm_eps": 1e-6},
        LLAMA,
    ),
    "mistral": (
        "MistralForCausalLM",
        {"sliding_window": 5},
        {"window": 5, "norm_eps": 1e-6},
        LLAMA,
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**THEIR_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {**GEMMA, "global_every": 2, "attention_soft_cap": 3.0, "logit_soft_cap": 2.0},
        SANDWICH,
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **THEIR_GEMMA,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
        {
            **GEMMA,
            "global_every": 3,
            "qk_norm": True,
            "rope_base": 1e6,
            "window_rope_base": 1e4,
            "rope_scaling": "linear",
            "rope_factor": 8.0,
        },
        SANDWICH,
    ),
    "phi": (
        "PhiForCausalLM",
        {
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
            }
        },
        {
            "family": "gpt",
            "tied": False,
            "head_bias": True,
            "parallel": True,
            "activation": "gelu-tanh",
            "positions": "rope",
            "rotary": 0.5,
        },
        PHI,
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"sliding_window": 6},
        {"family": "gpt", "activation": "gelu-tanh", "positions": "rope", "window": 6},
        STARCODER,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        {"experts": 4, "experts_per_token": 2, "rope_base": 1e6},
        MOE,
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
            "head_dim": 8,
        },
        {
            "experts": 6,
            "experts_per_token": 3,
            "expert_ffn": 20,
            "router_norm": False,
            "qk_norm": True,
            "norm_eps": 1e-6,
        },
        MOE,
    ),
    # DeepSeek-V3's router, shared experts and dense layers, with attention as Qwen3's
    "dots1": (
        "Dots1ForCausalLM",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "layer_types": ["full_attention"] * 4,
        },
        {
            "experts": 6,
            "experts_per_token": 2,
            "shared_experts": 2,
            "expert_ffn": 20,
            "dense_layers": 1,
            "router": "sigmoid",
            "router_scale": 2.5,
            "qk_norm": True,
            "norm_eps": 1e-6,
        },
        MOE,
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", THEIR_DEEPSEEK, OUR_DEEPSEEK, DEEPSEEK),
    "deepseek-v3, queries of the stream": (
        "DeepseekV3ForCausalLM",
        THEIR_DEEPSEEK | {"q_lora_rank": None},
        {key: value for key, value in OUR_DEEPSEEK.items() if key != "q_lora_rank"},
        OF_STREAM,
    ),
    "deepseek-v3, for longer texts": (
        "DeepseekV3ForCausalLM",
        THEIR_DEEPSEEK | {"rope_parameters": LONGER},
        OUR_DEEPSEEK
        | {
            "rope_scaling": "yarn",
            "rope_factor": 40.0,
            "rope_high_factor": 32.0,
            "rope_original": 16,
            "attention_scale": 10**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2,
        },
        DEEPSEEK,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 48, "n_positions": SEQUENCE},
        {"family": "gpt", "activation": "gelu-tanh", "kv_heads": 4},
        GPT2,
    ),
}


def shape_of(fields: Mapping[str, Any], attention: str = "sdpa") -> ModelShape:
    model = load("ddp", [f"model={SIZES | dict(fields)}", f"attention={attention}"]).spec.model
    assert isinstance(model, ModelShape)
    return model


def theirs(name: str, config: Mapping[str, Any]) -> nn.Module:
    """A class of transformers, with weights of which none is 0 or 1."""
    kind = getattr(transformers, name)
    sizes = THEIR_SIZES if name != "GPT2LMHeadModel" else {"vocab_size": VOCAB}
    model = kind(kind.config_class(**{**sizes, **config, "attn_implementation": "eager"}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def copied(model: nn.Module, source: nn.Module, names: Names) -> None:
    """Put the weights of a class of transformers into a model of ours."""
    tensors = dict(source.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_theirs(name, tensors, names))
        for name, buffer in model.named_buffers():
            if name.endswith(".bias_E"):
                layer = name.split(".")[1]
                buffer.copy_(source.get_buffer(f"model.layers.{layer}.mlp.gate.{BIAS}"))


def _theirs(name: str, tensors: Mapping[str, Any], names: Names) -> Any:
    fused = _FUSED.fullmatch(name)
    if fused and names is GPT2:
        number, part, kind = fused.groups()
        whole = tensors[f"transformer.h.{number}.attn.c_attn.{kind}"]
        third = whole.chunk(3, dim=-1)[_THIRDS.index(part)]
        return third.T if kind == "weight" else third
    module, _, kind = name.rpartition(".")
    if ".mlp.experts." in module:
        return _of_experts(module, tensors)
    number = next(iter(re.findall(r"\d+", module)), "")
    tensor = tensors[f"{names[re.sub(r'[0-9]+', '{}', module)].format(number)}.{kind}"]
    if module.endswith((".query_up", ".kv_down")):
        return _turning_in_halves(module, tensor)
    is_transposed = names is GPT2 and "blocks." in name and tensor.dim() > 1
    return tensor.T if is_transposed else tensor


def _turning_in_halves(module: str, tensor: torch.Tensor) -> torch.Tensor:
    """What turns is behind in theirs, the two of a pair side by side; in ours a head has it in
    front, the first ones of all pairs ahead of the second ones."""
    heads = THEIR_SIZES["num_attention_heads"] if module.endswith("up") else 1
    by_head = tensor.unflatten(0, (heads, -1))
    still, turning = by_head.tensor_split((by_head.shape[1] - TURNING,), dim=1)
    halves = torch.cat((turning[:, 0::2], turning[:, 1::2]), dim=1)
    parts = (halves, still) if heads > 1 else (still, halves)
    return torch.cat(parts, dim=1).flatten(0, 1)


def _of_experts(module: str, tensors: Mapping[str, Any]) -> Any:
    """Theirs have gate and up in one tensor, the gates first."""
    _, layer, *_, kind = module.split(".")
    prefix = f"model.layers.{layer}.mlp.experts"
    if kind == "down":
        return tensors[f"{prefix}.down_proj"]
    gate, up = tensors[f"{prefix}.gate_up_proj"].chunk(2, dim=1)
    return gate if kind == "gate" else up


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within it what is fp32 by name is fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.FloatTensor.dtype)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (2, SEQUENCE), generator=generator)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_composed_model_computes_what_the_class_of_transformers_does(case, attention):
    name, config, fields, names = CASES[case]
    module = build(shape_of(fields, attention), sequence=SEQUENCE)
    cast(module, torch.float64)
    with in_fp64():
        reference = theirs(name, config)
        expected = reference(tokens(), use_cache=False).logits.detach()
    assert expected.dtype is torch.float64
    copied(module, reference, names)
    logits = module.eval()(tokens()).detach()
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
