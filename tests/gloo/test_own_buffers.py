"""A buffer that differs after a step is explained: by rounding, by local values per rank, or by an
identical fault on all ranks."""

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


class Averaging(nn.Module):
    """A linear layer with a running mean of all its input rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def verify_buffer(fault: str) -> tuple[bool, str, str, str]:
    """Return whether the verdict holds, the factor, the certainty and the text."""

    def job(is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        inner = Averaging()
        model = DistributedDataParallel(inner, broadcast_buffers=False) if is_loop else inner
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> Tensor:
            loss = model(rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = rows.mean(0)
            if is_loop and fault != "not reduced":
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            times = 2 if is_loop and fault == "twice" else 1
            inner.seen += times * mean
            if is_loop and fault == "rounded":
                inner.seen.copy_(inner.seen.bfloat16())
            return loss

        return ptrain.Job(model=model, step=step)

    rows = list(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)))
    rank, size = dist.get_rank(), dist.get_world_size()
    verdict = ptrain.verify(
        lambda: job(False), lambda: job(True), rows, share=lambda batch: batch.chunk(size)[rank]
    )
    cause = verdict.root_cause
    said = ("", "") if cause is None else (cause.factor, str(cause.certainty))
    return verdict.holds, *said, str(verdict)


@pytest.mark.parametrize(
    ("fault", "factor", "certainty"),
    [
        ("", "", ""),
        ("not reduced", "ranks differ", Certainty.FITS),
        ("twice", "× 2", Certainty.FITS),
        ("rounded", "rounded to bfloat16", Certainty.FITS),
    ],
)
def test_a_buffer_that_differs_is_explained(
    ranks: Ranks, fault: str, factor: str, certainty: str
) -> None:
    told = ranks.run(2, verify_buffer, fault)
    assert told[0] == told[1]
    assert told[0][:3] == (not fault, factor, certainty), told[0][3]
    assert not fault or "buffers · " in told[0][3]
