"""Accumulating micro-batches in 16 bits is detected, although the error is below the 16-bit
tolerance."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ptrain
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
COUNT = 4  # micro-batches of a rank


def verify_accumulation(way: str) -> tuple[bool, str, str]:
    """Return whether the verdict holds, the factor and the text. `way` is the loop's accumulation
    dtype; the reference accumulates in float32, and both compute in bfloat16."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def job(count: int, is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        if is_loop and way == "model":
            model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(rows: Tensor) -> Tensor:
            total = torch.zeros(())
            for part in rows.chunk(count):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(part.to(next(model.parameters()))).float().square().mean() / count
                loss.backward()
                total += loss.detach()
            for parameter in model.parameters():
                if is_loop and size > 1:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
            optimizer.step()
            optimizer.zero_grad()
            return total

        return ptrain.Job(model=model, step=step)

    batches = list(torch.randn(2, COUNT * size, 16, generator=torch.Generator().manual_seed(1)))
    verdict = ptrain.verify(
        lambda: job(COUNT * size, False), lambda: job(COUNT, True), batches,
        share=lambda batch: batch.chunk(size)[rank],
        terms=ptrain.Terms(dtype=torch.bfloat16),
    )  # fmt: skip
    return verdict.holds, verdict.root_cause.factor if verdict.root_cause else "", str(verdict)


@pytest.mark.parametrize("way", ["", "model"])
def test_an_accumulator_in_bf16_is_found_below_the_tolerance_of_bf16(
    ranks: Ranks, way: str
) -> None:
    holds, factor, text = ranks.run(2, verify_accumulation, way)[0]
    assert holds == (not way), text
    assert factor == ("accumulated in bfloat16" if way else ""), text
