"""A missing loss term, and a collective without a wait, are each confirmed by undoing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.parts import average, looped, my_rows, rank, row_batches, size
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo


class Mixture(nn.Module):
    """A layer of four experts that returns the two usual router losses with its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 1)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.router(x)
        shares = scores.softmax(-1)
        mixed = sum(shares[:, [n]] * expert(x) for n, expert in enumerate(self.experts))
        z = scores.logsumexp(-1).square().mean()
        return {"out": self.out(mixed), "aux": (shares * shares).sum(-1).mean(), "z": z}


def loss_of(fault: str) -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        its = model(rows[:, :8])
        aux, z = its["aux"] * (1.0 if fault == "weight" else 0.1), its["z"] * 0.05
        aux, z = aux.detach() if fault == "aux" else aux, z.detach() if fault == "z" else z
        distilled = its["out"].tanh().abs().mean() * (0.3 if fault == "distilled" else 0.2)
        return F.mse_loss(its["out"], rows[:, 8:]) + aux + z + distilled

    return loss


def verify_terms(fault: str) -> dict[str, Any]:
    def loop() -> ptrain.Job:
        model = Mixture()
        return looped(model, loss=loss_of(fault), before_update=lambda: average(model.parameters()))

    verdict = ptrain.verify(
        lambda: looped(Mixture(), loss=loss_of("")), loop, row_batches(), share=my_rows
    )
    return {"holds": verdict.holds, "text": str(verdict)}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("aux", "The term output['aux'] of the loss gets no gradient"),
        ("z", "The term output['z'] of the loss gets no gradient"),
        ("weight", "The term output['aux'] of the loss has 10 times its weight"),
        ("distilled", "has 1.5 times its weight beside the other terms"),
    ],
)
def test_a_term_of_the_loss_is_named(ranks: Ranks, fault: str, said: str) -> None:
    text = ranks.run(2, verify_terms, fault)[0]["text"]
    assert said in text
    assert "proven by trying: with the weight that it has in the reference" in text


def test_a_loss_of_several_terms_holds(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_terms, "")[0]
    assert verdict["holds"], verdict["text"]


def verify_waiting(waits: bool) -> dict[str, Any]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 2000), nn.GELU(), nn.Linear(2000, 500), nn.Linear(500, 1))

    def loss(called: nn.Module, rows: Tensor) -> Tensor:
        return called(rows).square().mean()

    def job(is_loop: bool) -> ptrain.Job:
        built, kept = model(), []

        def reduce() -> None:
            for parameter in built.parameters() if is_loop else ():
                assert parameter.grad is not None
                kept.append(dist.all_reduce(parameter.grad, async_op=True))
                if waits:
                    kept[-1].wait()
                parameter.grad /= size()

        optimizer = torch.optim.SGD(built.parameters(), lr=0.01)
        return looped(built, loss=loss, before_update=reduce, optimizer=optimizer)

    verdict = ptrain.verify(lambda: job(False), lambda: job(True), row_batches(), share=my_rows)
    return {"holds": verdict.holds, "text": str(verdict)}


def test_a_collective_without_a_wait_is_proven(ranks: Ranks) -> None:
    text = ranks.run(2, verify_waiting, False)[0]["text"]
    assert "gradients · collective not waited for" in text
    assert "with every collective waited for where it starts" in text


def test_a_collective_with_a_wait_holds(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_waiting, True)[0]
    assert verdict["holds"], verdict["text"]


def verify_reordered_collectives() -> dict[str, Any]:
    """Return the verdict of a loop in which rank 1 starts the collectives of two groups in the
    other order than rank 0; `wrong`: one gradient counts twice."""

    def job(is_loop: bool) -> ptrain.Job:
        torch.manual_seed(0)
        built = nn.Linear(9, 1)
        groups = [dist.new_group(range(size())) for _ in range(2)]

        def reduce() -> None:
            works = []
            pairs = list(zip((built.weight, built.bias), groups, strict=True))
            for parameter, group in pairs[:: 1 - 2 * rank()] if is_loop else ():
                works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
            for work in works:
                work.wait()
            for parameter in built.parameters() if is_loop else ():
                assert parameter.grad is not None
                parameter.grad += parameter.grad.square()

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            return called(rows).square().mean()

        return looped(built, loss=loss, before_update=reduce)

    verdict = ptrain.verify(lambda: job(False), lambda: job(True), row_batches(), share=my_rows)
    return {"holds": verdict.holds, "text": str(verdict)}


def test_the_diagnosis_does_not_hang_if_ranks_reorder_collectives(ranks: Ranks) -> None:
    text = ranks.run(2, verify_reordered_collectives, timeout=60)[0]["text"]
    assert "waiting for every collective where it starts was not tried" in text


class TwoOutputs(nn.Module):
    """A model with an output that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


def verify_unused_output() -> dict[str, Any]:
    def job(model: nn.Module) -> ptrain.Job:
        return looped(model, loss=lambda called, rows: called(rows[:, :8])[0].square().mean())

    verdict = ptrain.verify(
        lambda: job(TwoOutputs()),
        lambda: job(DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)),
        row_batches(),
        share=my_rows,
    )
    return {"holds": verdict.holds, "text": str(verdict)}


def test_an_output_that_ddp_gives_no_gradient_is_no_error(ranks: Ranks) -> None:
    verdict = ranks.run(2, verify_unused_output)[0]
    assert verdict["holds"], verdict["text"]
