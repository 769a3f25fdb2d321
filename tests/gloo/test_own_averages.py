"""Moving averages on ranks: replicated or sharded, on some ranks or all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
DECAY = 0.99


def verify_average(way: str, fault: str = "") -> dict[str, Any]:
    """Return the verdict. `way`: ddp, fsdp2 (a sharded average) or first (only rank 0 keeps one);
    `fault`: rank (rank 1 does not update its average)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))

    def job(wrap: str = "") -> ptrain.Job:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        if wrap == "fsdp2":
            model = fully_shard(model)
            average = {name: value.detach().clone() for name, value in model.named_parameters()}
        else:
            average = copy.deepcopy(dict(model.named_parameters()))
            model = DistributedDataParallel(model) if wrap else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(batch: Tensor) -> Tensor:
            loss = (model(batch) - batch[:, :2]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not (wrap and fault == "rank" and rank == 1):
                for kept, value in zip(average.values(), model.parameters(), strict=True):
                    kept.data.mul_(DECAY).add_(value.data, alpha=1 - DECAY)
            return loss.detach()

        keeps = wrap != "first" or rank == 0
        return ptrain.Job(model=model, step=step, average=average if keeps else None)

    verdict = ptrain.verify(
        job, lambda: job(way), rows, share=lambda batch: batch.chunk(size)[rank]
    )
    return {"holds": verdict.holds, "text": str(verdict)}


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "first"])
def test_a_sound_average_holds(ranks: Ranks, way: str) -> None:
    verdict = ranks.run(2, verify_average, way)[0]
    assert verdict["holds"], verdict["text"]
    assert "moving averages" in verdict["text"]


def test_an_average_that_one_rank_does_not_update_is_named(ranks: Ranks) -> None:
    text = ranks.run(2, verify_average, "ddp", "rank")[0]["text"]
    assert "root cause: moving average · axis ranks · differs by" in text
    assert "on rank 1" in text
