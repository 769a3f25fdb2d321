"""A training on one GPU has the predicted memory with the kernels of that GPU."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a training on a GPU needs one"),
]

CLASS = (
    "model={hf: LlamaForCausalLM, config: {num_hidden_layers: 2, hidden_size: 128, "
    "num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 256, vocab_size: 512}}"
)


@pytest.mark.parametrize(
    "words",
    [
        ("zero3", "mesh.dp_shard=1"),
        ("fsdp-mixed", "mesh.dp_shard=1"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=gpt-tiny", "model.dropout=0.1"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=gpt-tiny", "precision.layout=bf16"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=moe-tiny"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=moe-tiny", "precision.layout=bf16"),
        ("ddp", "mesh.dp_replicate=1", CLASS, "precision.layout=bf16"),
    ],
)
def test_the_verdict_holds(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ptrain", "validate", *words, "device=cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verdict: holds" in ended.stdout
