"""Fields of config.json files as their authors publish them, with sizes for a laptop."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "use_cache": True}
_LLAMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128,
    "eos_token_id": [129, 130],
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 260,
}


def _file(kind: str, architecture: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {"architectures": [architecture], "model_type": kind, "transformers_version": "4.43.0"}
    whole: dict[str, Any] = {**named, **_COMMON}
    for part in (*parts, more):
        whole |= part
    return whole


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": _file(
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        mlp_bias=False,
        pretraining_tp=1,
        rope_scaling=LLAMA3_ROPE,
        rope_theta=500000.0,
    ),
    "qwen2": _file(
        "qwen2",
        "Qwen2ForCausalLM",
        {key: value for key, value in _LLAMA.items() if key != "attention_bias"},
        max_window_layers=28,
        rope_theta=1000000.0,
        sliding_window=32768,
        use_sliding_window=False,
    ),
    "qwen3_moe": _file(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _LLAMA,
        decoder_sparse_step=1,
        head_dim=16,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "gemma2": _file(
        "gemma2",
        "Gemma2ForCausalLM",
        {key: value for key, value in _LLAMA.items() if key != "tie_word_embeddings"},
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=8,
        hidden_activation="gelu_pytorch_tanh",
        pad_token_id=0,
        query_pre_attn_scalar=8,
        rope_theta=10000.0,
        sliding_window=8,
        sliding_window_size=8,
    ),
    "gpt2": _file(
        "gpt2",
        "GPT2LMHeadModel",
        activation_function="gelu_new",
        attn_pdrop=0.1,
        bos_token_id=250,
        embd_pdrop=0.1,
        eos_token_id=250,
        initializer_range=0.02,
        layer_norm_epsilon=1e-05,
        n_ctx=64,
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=64,
        resid_pdrop=0.1,
        summary_activation=None,
        summary_first_dropout=0.1,
        summary_proj_to_labels=True,
        summary_type="cls_index",
        summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
        vocab_size=260,
    ),
    "gpt_neox": _file(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        bos_token_id=0,
        eos_token_id=0,
        hidden_act="gelu",
        hidden_size=32,
        initializer_range=0.02,
        intermediate_size=40,
        layer_norm_eps=1e-05,
        max_position_embeddings=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        rotary_emb_base=10000,
        rotary_pct=0.25,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        vocab_size=260,
    ),
}
