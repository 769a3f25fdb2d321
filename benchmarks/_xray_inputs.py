"""Inputs of the fetched scripts: seeded tokens and weights of small models instead of downloads."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any


def write_nanogpt(folder: Path, case: dict[str, Any]) -> None:
    """Write seeded tokens where nanoGPT reads a prepared dataset."""
    data = folder / "data" / "tokens"
    data.mkdir(parents=True)
    draw = random.Random(0)
    for name in ("train.bin", "val.bin"):
        tokens = array("H", (draw.randrange(256) for _ in range(20_000)))
        (data / name).write_bytes(tokens.tobytes())


def write_picotron(folder: Path, case: dict[str, Any]) -> None:
    """Write a picotron config, and a small Llama where picotron reads a downloaded one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "hf_model_safetensors")
    for name in ("tiny", "hf_model/tiny"):
        config.save_pretrained(folder / name)
    options = json.loads((folder / "template" / "base_config.json").read_text(encoding="utf-8"))
    options["distributed"] |= {"use_cpu": True, **case["degrees"]}
    options["model"] |= {"name": "tiny", "num_hidden_layers": 4, "num_key_value_heads": 4}
    options["model"]["num_attention_heads"] = 4
    options["training"] |= {
        "total_train_steps": 8,
        "seq_length": 32,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_samples": None,
    }
    options["environment"] |= {"FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    (folder / "job.json").write_text(json.dumps(options), encoding="utf-8")
