"""Moving averages of the parameters compared with one device: correct ones hold, faulty ones are
named. One process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ptrain
from ptrain.report.finding import Certainty
from ptrain.verification.jobs.job import Tolerance

ROWS = list(torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1)))


def job(way: str = "by hand", decay: float = 0.99, fault: str = "") -> Callable[[], ptrain.Job]:
    """A loop that keeps an average: `by hand`, `torch's` or the `mean` of all steps."""

    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average, follow = _average(way, model, decay)
        steps, copies = itertools.count(), list[dict[str, Tensor]]()
        if fault == "zeros":
            average["0.weight"].zero_()

        def step(rows: Tensor) -> Tensor:
            loss = (model(rows) - rows[:, :2]).square().mean()
            loss.backward()
            copies.append({name: its.detach().clone() for name, its in model.named_parameters()})
            if fault == "before":
                follow()
            optimizer.step()
            optimizer.zero_grad()
            number = next(steps)
            times = {"before": 0, "never": 0, "twice": 2, "every other": number % 2}
            times["not at first"] = min(number, 1)
            if fault == "old copy":
                for name, its in copies[max(number - 1, 0)].items():
                    average[name].mul_(decay).add_(its, alpha=1 - decay)
                return loss
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
@pytest.mark.parametrize("fault", ["twice", "before", "old copy", "never", "every other", "zeros"])
def test_a_faulty_average_is_named(fault: str, decay: float) -> None:
    root_cause = ptrain.verify(job(decay=decay), job(decay=decay, fault=fault), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.state, root_cause.step) == ("moving average", 0)
    assert root_cause.certainty is Certainty.FITS


def test_another_decay_is_named() -> None:
    root_cause = ptrain.verify(job(decay=0.99), job(decay=0.9), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.state == "moving average"


def test_an_average_is_not_blamed_for_parameters_that_depart() -> None:
    def slower() -> ptrain.Job:
        loop = job()()
        return ptrain.Job(
            model=loop.model, average=loop.average, step=lambda rows: loop.step(rows * 1.1)
        )

    root_cause = ptrain.verify(job(), slower, ROWS).root_cause
    assert root_cause is not None
    assert root_cause.state != "moving average"


def test_an_average_that_is_right_again_after_a_step_is_named_all_the_same() -> None:
    root_cause = ptrain.verify(
        job(decay=0.0), job(decay=0.0, fault="not at first"), ROWS
    ).root_cause
    assert root_cause is not None
    assert root_cause.state == "moving average"


def test_a_tolerance_of_nothing_holds_for_the_same_bits() -> None:
    exact = Tolerance(gradients=0.0, outputs=0.0, updates=0.0, losses=0.0)
    terms = ptrain.Terms(tolerance=exact)
    verdict = ptrain.verify(job(), job(), ROWS, terms=terms)
    assert verdict.holds, verdict
    assert not ptrain.verify(job(), job(decay=0.9), ROWS, terms=terms).holds
