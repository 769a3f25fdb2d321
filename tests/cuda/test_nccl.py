"""Ranks that share one GPU train over NCCL as predicted, and equal a single device."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]


def ptrain(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ptrain", *words],
        env={**os.environ, "PTRAIN_SHARE_GPUS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("ddp",),
        ("zero1",),
        ("zero2",),
        ("zero3",),
        ("fsdp-mixed",),
        ("hsdp",),
        ("tp",),
        ("tp-sp",),
        ("pp-1f1b",),
        ("pp-zbv",),
        ("cp-ring",),
        ("cp-ulysses",),
        ("cp-all-gather",),
        ("ep",),
        ("3d", "mesh.pp=2", "mesh.dp_shard=1", "mesh.tp=2"),
    ],
    ids=" ".join,
)
def test_the_verdict_holds_over_nccl(words: tuple[str, ...]) -> None:
    ended = ptrain("validate", *words, "cluster=null", "device=cuda", "backend=nccl")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verdict: holds" in ended.stdout


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "tp-sp", "pp-1f1b", "cp-ulysses", "ep"])
def test_a_step_over_nccl_equals_one_device(name: str) -> None:
    ended = ptrain("verify", name, "--quick", "cluster=null", "device=cuda", "backend=nccl")
    assert ended.returncode == 0, ended.stdout + ended.stderr
