"""Rounding to float16 is distinguished from a recomputation with another input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ptrain
from ptrain.report.finding import Certainty
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


class RecomputedLayer(torch.autograd.Function):
    """A layer whose backward reruns it with `kept` as its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(kept, weight, bias)
        return torch.tanh(nn.functional.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, bias = (its.detach().requires_grad_() for its in ctx.saved_tensors)
        with torch.enable_grad():
            again = torch.tanh(nn.functional.linear(kept, weight, bias))
        x, *others = torch.autograd.grad(again, (kept, weight, bias), gradient)
        return x, None, *others


class Layer(nn.Linear):
    kept = staticmethod(lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        return RecomputedLayer.apply(x, self.kept(x.detach()), self.weight, self.bias)


KEPT = {
    "input rounded": lambda x: x.half().float(),
    "other input": lambda x: x + 1e-3 * x.roll(1, 0),
}


def verify_rounding(fault: str) -> tuple[str, str, str]:
    """Return the factor and the certainty of the root cause, and the text."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def job(is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Layer(8, 8), nn.Linear(8, 1))
        if is_loop and fault in KEPT:
            model[1].kept = KEPT[fault]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(rows: Tensor) -> Tensor:
            loss = model(rows).square().mean()
            loss.backward()
            for parameter in model.parameters() if is_loop else ():
                if fault == "gradients rounded":
                    parameter.grad = parameter.grad.half().float()
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
                if fault == "means rounded":
                    parameter.grad = parameter.grad.half().float()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    batches = list(torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1)))
    verdict = ptrain.verify(
        lambda: job(False), lambda: job(True), batches,
        share=lambda batch: batch.chunk(size)[rank],
    )  # fmt: skip
    cause = verdict.root_cause
    assert cause is not None
    return cause.factor, str(cause.certainty), str(verdict)


@pytest.mark.parametrize("fault", ["gradients rounded", "means rounded", *KEPT])
def test_rounding_is_distinguished_from_another_input_of_the_recomputation(
    ranks: Ranks, fault: str
) -> None:
    factor, certainty, text = ranks.run(2, verify_rounding, fault)[0]
    assert (factor == "rounded to float16") == (fault == "means rounded"), text
    # addends that were rounded before their sum are no numbers of a dtype any more: nothing is said
    expected = Certainty.FITS if fault == "means rounded" else Certainty.UNEXPLAINED
    assert certainty == expected, text
