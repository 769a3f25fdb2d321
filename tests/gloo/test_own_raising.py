"""A rank that raises in a step ends the verification on the ranks that wait for it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ptrain
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.gloo


def raise_on_rank_1() -> None:
    """Raise in the second step of rank 1 while rank 0 waits for it."""
    rank = dist.get_rank()

    def job(is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = iter(range(9))

        def step(rows: Tensor) -> None:
            model(rows).square().mean().backward()
            if is_loop and rank == 1 and next(steps) == 1:
                raise ValueError("no such sample")
            for parameter in model.parameters() if is_loop else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()

        return ptrain.Job(model=model, step=step)

    batches = list(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)))
    try:
        ptrain.verify(job(False), job(True), batches, share=lambda batch: batch.chunk(2)[rank])
    except ValueError:
        os._exit(1)  # what ends the wait of the other rank is the end of this process


def test_a_rank_that_raises_is_named_on_the_ranks_that_wait_for_it(ranks: Ranks) -> None:
    with pytest.raises(RankError) as raised:
        ranks.run(2, raise_on_rank_1, timeout=30.0)
    causes = raised.value.causes
    assert "verify: rank 1 raised ValueError: no such sample" in causes[0]
