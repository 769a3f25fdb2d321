"""Ranks that read other samples than the global batch, which does not divide among them."""

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


def missing_sample_said() -> tuple[str, Certainty, str]:
    """Verify a loop whose ranks leave one sample out, and run a collective for each sample."""
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
    factor, certainty, tried = ranks.run(2, missing_sample_said)[0]
    assert (factor, certainty) == ("missing", Certainty.PROVEN)
    assert "with all of the global batch on each rank" in tried
