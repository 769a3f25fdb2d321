"""Moving averages of the parameters beside one device's: sound ones hold, and what a faulty one was
made of is named, and tried. One process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ptrain

ROWS = list(torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1)))


def job(way: str = "by hand", decay: float = 0.99, fault: str = "") -> Callable[[], ptrain.Job]:
    """A loop that keeps an average: `by hand`, `torch's` or the `mean` of all steps."""

    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average, follow = _average(way, model, decay)
        steps = itertools.count()
        if fault == "zeros":
            average["0.weight"].zero_()

        def step(rows: Tensor) -> Tensor:
            loss = (model(rows) - rows[:, :2]).square().mean()
            loss.backward()
            if fault == "before":
                follow()
            optimizer.step()
            optimizer.zero_grad()
            times = {"before": 0, "never": 0, "twice": 2, "every other": next(steps) % 2}
            for _ in range(times.get(fault, 1)):
                follow()
            return loss

        return ptrain.Job(model=model, step=step, average=average)

    return made


def _average(way: str, model: nn.Module, decay: float) -> tuple[Any, Callable[[], None]]:
    if way != "by hand":
        rule = get_ema_multi_avg_fn(decay) if way == "torch's" else None
        averaged = AveragedModel(model, multi_avg_fn=rule)
        return averaged, lambda: averaged.update_parameters(model)
    copies = {name: value.detach().clone() for name, value in model.named_parameters()}

    def follow() -> None:
        for name, value in model.named_parameters():
            copies[name].mul_(decay).add_(value.detach(), alpha=1 - decay)

    return copies, follow


@pytest.mark.parametrize("way", ["by hand", "torch's", "mean"])
def test_a_sound_average_holds(way: str) -> None:
    verdict = ptrain.verify(job(way), job(way), ROWS)
    assert verdict.holds, verdict
    assert "moving averages" in str(verdict)


@pytest.mark.parametrize("decay", [0.9, 0.999])
@pytest.mark.parametrize(
    ("fault", "said", "step"),
    [
        ("twice", "two updates", 0),
        ("before", "the parameters of before the update", 1),
        ("never", "it is what it was before the step", 1),
        ("every other", "it was not updated in a step before", 1),
    ],
)
def test_what_a_faulty_average_was_made_of_is_named(
    fault: str, said: str, step: int, decay: float
) -> None:
    culprit = ptrain.verify(job(decay=decay), job(decay=decay, fault=fault), ROWS).culprit
    assert culprit is not None
    assert (culprit.state, culprit.step) == ("moving average", step)
    assert said in culprit.sentence
    assert culprit.certainty == "proven by trying"


def test_another_decay_is_named_with_both() -> None:
    culprit = ptrain.verify(job(decay=0.99), job(decay=0.9), ROWS).culprit
    assert culprit is not None
    assert "decay 0.9)" in culprit.sentence and "decay 0.99)" in culprit.sentence


def test_an_average_that_begins_elsewhere_is_named() -> None:
    culprit = ptrain.verify(job(), job(fault="zeros"), ROWS).culprit
    assert culprit is not None
    assert (culprit.factor, culprit.place) == ("begins elsewhere", "0.weight")


def test_an_average_is_not_blamed_for_parameters_that_depart() -> None:
    def slower() -> ptrain.Job:
        loop = job()()
        return ptrain.Job(
            model=loop.model, average=loop.average, step=lambda rows: loop.step(rows * 1.1)
        )

    culprit = ptrain.verify(job(), slower, ROWS).culprit
    assert culprit is not None
    assert culprit.state != "moving average"
