"""The example that README shows, run as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ptrain.train import environment

pytestmark = [pytest.mark.gloo, pytest.mark.nightly]

EXAMPLE = """\
import copy, ptrain, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def job(model):  # your loop, for both
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
plain = copy.deepcopy(model)  # before it is wrapped
batches = torch.randn(3, 8, 8)  # three global batches of eight rows
share = lambda batch: batch.chunk(size)[rank]
print(ptrain.verify(job(plain), job(DistributedDataParallel(model)), batches, share=share))
"""
ROOT = Path(__file__).parents[2]


def test_the_example_prints_that_it_holds(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29571"]
    ended = subprocess.run(
        [sys.executable, *torchrun, str(script)],
        env=environment.alone([str(ROOT)]),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "verdict: holds" in ended.stdout
    assert "3 steps, 2 ranks against one device" in ended.stdout
