"""A training on one GPU holds what was predicted, whichever kernels its GPU has."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a training on a GPU needs one"),
]


@pytest.mark.parametrize(
    "words",
    [
        ("zero3", "mesh.dp_shard=1"),
        ("fsdp-mixed", "mesh.dp_shard=1"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=gpt-tiny", "model.dropout=0.1"),
        ("ddp", "mesh.dp_replicate=1", "model.preset=gpt-tiny", "precision.layout=bf16"),
    ],
)
def test_the_verdict_holds(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ptrain", "validate", *words, "device=cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verdict: holds" in ended.stdout
