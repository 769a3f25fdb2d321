"""Models of transformers beside compositions that compute the same: configs, names of modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
            "bias_update_rate": 0.001,
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
