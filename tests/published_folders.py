"""Folders of small models as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 259,
    "head_dim": 8,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 259, "n_positions": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# By case, the prefix of its classes and the fields of its config.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama, tied, as 3.2": (
        "Llama",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 12}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 16}),
    "gemma2": ("Gemma2", {**SIZES, "sliding_window": 8, "query_pre_attn_scalar": 12}),
    "gpt2": ("GPT2", _GPT2),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
}
_NO_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
_PADDED = {**_NO_DIM, "pad_token_id": 0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA3 = {**SIZES, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 12}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
# By model type, likewise: classes that are read as they are (`hf:`), most without a built-in twin.
CLASSES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", _PADDED),
    "gemma3_text": (
        "Gemma3Text",
        _GEMMA3,
    ),
    "starcoder2": ("Starcoder2", _NO_DIM),
    "gpt_neox": (  # its head has another name in files
        "GPTNeoX",
        {name: size for name, size in _NO_DIM.items() if name != "num_key_value_heads"},
    ),
    "phimoe": ("Phimoe", {**_NO_DIM, **_EXPERTS}),  # a router too, and experts are separate tensors
    "deepseek_v3": (  # a buffer that files have
        "DeepseekV3",
        {
            **_NO_DIM,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 2,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
            **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
            "n_routed_experts": 4,
        },
    ),
    "phi": ("Phi", _NO_DIM),
    "olmo2": ("Olmo2", _PADDED),
    "granite": ("Granite", {**_NO_DIM, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "mixtral": CASES["mixtral"],
    "gpt_oss": ("GptOss", {**SIZES, **_EXPERTS, "sliding_window": 8, "pad_token_id": 0}),
    "granitemoe": ("GraniteMoe", {**_NO_DIM, **_EXPERTS}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_NO_DIM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
}
CASES = {
    **CASES,
    "gemma3": CLASSES["gemma3_text"],
    "gemma3, scaled": ("Gemma3Text", {**_GEMMA3, "rope_parameters": _GEMMA3_ROPE}),
    "starcoder2": CLASSES["starcoder2"],
    "phi3": CLASSES["phi3"],
    "starcoder2, with windows": ("Starcoder2", {**_NO_DIM, "sliding_window": 8}),
}


def save_folder(case: str, folder: Path, max_shard_size: str = "1GB", **others: Any) -> Path:
    """Save a model of this case with `others` of its fields to a new folder, in files of limited
    size; no weight is 0 or 1."""
    import torch
    import transformers

    prefix, fields = {**CLASSES, **CASES}[case]
    config = getattr(transformers, f"{prefix}Config")(
        **{"bos_token_id": 1, "eos_token_id": 2, **fields, **others}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(0.05, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of all files of a folder by name."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
