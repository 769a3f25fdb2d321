"""Ranks with an uneven share of a global batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from ptrain.report.finding import Certainty
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


def verify_missing_sample() -> tuple[str, Certainty, str]:
    """Verify a loop whose ranks skip one sample and run a collective per sample."""
    rank = dist.get_rank()

    def job(is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model = DistributedDataParallel(plain) if is_loop else plain
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> float:
            optimizer.zero_grad()
            total = 0.0
            for row in rows.split(1):
                loss = model(row).square().mean() / len(rows)
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            return total

        return ptrain.Job(model=model, step=step)

    batches = list(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)))
    verdict = ptrain.verify(
        lambda: job(False), lambda: job(True), batches,
        share=lambda rows: rows[2 * rank : 2 * rank + 2],
    )  # fmt: skip
    said = verdict.root_cause
    assert said is not None
    return said.factor, said.certainty, said.tried


def test_a_share_that_would_be_uneven_is_not_run(ranks: Ranks) -> None:
    """With 3 samples on one rank and 2 on the other the step would never end."""
    factor, certainty, tried = ranks.run(2, verify_missing_sample)[0]
    assert (factor, certainty) == ("missing", Certainty.PROVEN)
    assert "with all of the global batch on each rank" in tried
