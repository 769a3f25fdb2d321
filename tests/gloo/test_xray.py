"""The X-ray of unmodified scripts on two ranks: placements, traps, and errors of short jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ptrain.cli.main import main

MODEL = """
import sys, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
def train(model, optimizer, steps=6, draws=0, micro=1):
    torch.manual_seed(draws)
    for step in range(steps):
        for _ in range(micro):
            model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
# Forked ranks share one import of torch.
FORKED = """
import os, tempfile
from torch.nn.parallel import DistributedDataParallel
import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, ptrain.xray.watch
folder, rank = tempfile.mkdtemp(), 0
if os.fork() == 0:
    rank = 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
"""
LAUNCHED = """
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
train(model, torch.optim.AdamW(model.parameters()), draws=rank, micro=2)
"""
FSDP2 = """
from torch.distributed.fsdp import fully_shard
for block in model[:2]:
    fully_shard(block)
fully_shard(model)
train(model, torch.optim.AdamW(model.parameters()), draws=rank)
"""
TENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
for block in model[:2]:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(model, torch.optim.AdamW(model.parameters(), foreach=False))
"""
END = "\ndist.barrier()\ndist.destroy_process_group()\n"
RUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def xray(folder: Path, capfd: Any, script: str, *launcher: str, code: int = 0) -> dict[str, Any]:
    """Return the record of a script's X-ray, or its error."""
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    assert main(["xray", "--json", "--", sys.executable, *launcher, str(path)]) == code
    record: dict[str, Any] = json.loads(capfd.readouterr().out)
    return record


def placement(record: dict[str, Any]) -> list[str]:
    (axis,) = record["axes"]
    states = ("parameters", "optimizer", "gradients", "activations")
    return [axis["kind"], *(axis[state] for state in states)]


def test_a_script_of_ddp_shows_its_placement_and_its_missing_no_sync(tmp_path, capfd):
    wait = "\nif rank == 0:\n    os.wait()\n"
    record = xray(tmp_path, capfd, MODEL + FORKED + DDP + END + wait)
    assert placement(record) == ["data", "R", "R", "R", "R"]
    assert record["accumulation"] == 2 and record["recomputation"] == []
    assert [finding["code"] for finding in record["findings"]] == ["accumulation-reduces"]
    numbers = 2 * (16 * 32 + 32 + 32 * 16 + 16) + 16 * 4 + 4
    memory = {row["state"]: row["device_bytes"] for row in record["memory"] if row["rank"] == 0}
    assert memory["parameters"] == memory["gradients"] == 4 * numbers
    (reduced,) = (row for row in record["traffic"] if row["state"] == "gradients")
    assert reduced["payload_bytes"] == 2 * 4 * numbers


@pytest.mark.nightly
def test_a_script_of_fsdp2_shows_its_placement_and_the_kept_root(tmp_path, capfd):
    record = xray(tmp_path, capfd, MODEL + LAUNCHED + FSDP2 + END, *RUN)
    assert placement(record) == ["data", "S*", "S", "S", "R"]
    assert [finding["code"] for finding in record["findings"]] == ["not-resharded"]


@pytest.mark.nightly
def test_a_script_of_tensor_parallelism_shows_its_placement(tmp_path, capfd):
    record = xray(tmp_path, capfd, MODEL + LAUNCHED + TENSOR + END, *RUN)
    assert placement(record) == ["tensor", "S", "S", "S", "R"] and not record["findings"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "no torch optimizer stepped"),
        ("train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)", "ended after 4"),
    ],
    ids=("no-step", "short"),
)
def test_a_job_that_cannot_be_watched_is_one_message(tmp_path, capfd, lines, message):
    assert message in xray(tmp_path, capfd, MODEL + lines, code=2)["error"]
