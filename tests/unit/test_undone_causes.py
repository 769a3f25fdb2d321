"""Causes that are proven by a separate step in which only they are undone. One process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ptrain
from ptrain.report.finding import Certainty
from ptrain.verification.jobs.record import shared_buffers
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.trials import copy_pairs

ROWS = list(torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)).double())


class Counting(nn.Module):
    """A layer with a buffer that counts its rows; `again`: recomputed in backward, where it counts
    them once more."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()
        self.register_buffer("rows", torch.zeros(1))
        self.again = again

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.rows += len(x)
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        run = checkpoint(self.hidden, x, use_reentrant=False) if self.again else self.hidden(x)
        return self.outer(run)


def job(
    fault: str = "",
    model: Callable[[], nn.Module] = Counting,
    rate: float = 1e-2,
    clip: Callable[[Any], object] = list,
) -> Callable[[], ptrain.Job]:
    def made() -> ptrain.Job:
        built, steps = model(), 0
        optimizer = torch.optim.AdamW(built.parameters(), lr=rate)

        def step(rows: Tensor) -> Tensor:
            nonlocal steps
            steps += 1
            if fault == "ends" and steps > 1:
                raise ValueError("no more batches")
            if fault == "rounded in use" and steps == 2:
                for parameter in built.parameters():
                    parameter.data.copy_(parameter.bfloat16())
            given = rows.clone()
            times = 1.5 if fault == "begins" and steps < 3 else 1.0
            if fault == "right by chance":
                times += 0.1 * steps * (steps != 3)
            loss = built(given).square().mean() * times
            if fault == "overwritten":
                given.data.mul_(2.0)  # as a receive does, which no version counter sees
            loss.backward()
            for parameter in built.parameters() if fault == "scaled" else ():
                parameter.grad /= 8.0
            clip(built.parameters())
            if fault == "added":
                built.outer.weight.grad += torch.arange(8.0)
            if fault == "ends":
                built.outer.weight.grad += torch.arange(8.0)
            if fault == "one scaled":
                built.outer.weight.grad *= 2.0
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=built, step=step)

    return made


@pytest.mark.parametrize(
    ("fault", "factor"),
    [
        ("overwritten", "overwritten before backward"),
        ("scaled", "changed after backward, × 0.125"),
        ("one scaled", "changed after backward, × 2"),
    ],
)
def test_a_cause_is_proven_by_a_step_without_it(fault: str, factor: str) -> None:
    root_cause = ptrain.verify(job(), job(fault), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == (factor, Certainty.PROVEN)


def test_changed_gradients_are_clipped_when_the_change_is_undone() -> None:
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1e-2)
    for fault, factor in (("one scaled", ", × 2"), ("added", "")):
        root_cause = ptrain.verify(job(clip=clip), job(fault, clip=clip), ROWS).root_cause
        assert root_cause is not None
        assert root_cause.factor == f"changed after backward{factor}", root_cause
        assert root_cause.certainty is Certainty.PROVEN
        assert "as in the reference the gradients match" in root_cause.tried


def test_unchanged_gradients_are_not_tried_with_clipping_by_value() -> None:
    clip = partial(nn.utils.clip_grad_value_, clip_value=1e-2)
    root_cause = ptrain.verify(job(clip=clip), job("added", clip=clip), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.certainty is Certainty.UNEXPLAINED
    assert "the gradients that backward leaves were not tried" in root_cause.tried
    assert "with the gradients that backward leaves" not in root_cause.tried


def test_a_cause_next_to_a_wrong_update_is_not_proven() -> None:
    """With the gradients of backward the update still differs: there are two faults."""
    root_cause = ptrain.verify(job(), job("scaled", rate=2e-2), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == (
        "changed after backward, × 0.125", Certainty.FITS
    )  # fmt: skip
    assert "the update repeated with them still differs" in root_cause.tried


def test_a_multiple_next_to_a_wrong_update_is_not_proven() -> None:
    """The update is repeated with corrected gradients too."""

    def doubled(rate: float) -> Callable[[], ptrain.Job]:
        def made() -> ptrain.Job:
            its = job(rate=rate)()
            for parameter in its.model.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)
            return its

        return made

    right, wrong = (ptrain.verify(job(), doubled(rate), ROWS).root_cause for rate in (1e-2, 2e-2))
    assert right is not None and wrong is not None
    assert "the update" not in right.tried
    assert "the update repeated with them still differs" in wrong.tried


def test_a_buffer_that_a_recomputation_writes_again_is_proven() -> None:
    def again() -> Any:
        return Counting(again=True)

    root_cause = ptrain.verify(job(), job(model=again), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.place == "rows"
    assert root_cause.factor == "× 2, written again in backward"
    assert root_cause.certainty is Certainty.PROVEN


@pytest.mark.parametrize(("more", "certainty"), [(1.0, Certainty.PROVEN), (2.0, Certainty.FITS)])
def test_another_start_is_proven_only_if_nothing_else_differs(
    more: float, certainty: Certainty
) -> None:
    """`rows` is a buffer, which the named cause, other weights, does not undo."""

    def other() -> nn.Module:
        model = Counting()
        with torch.no_grad():
            model.inner.weight *= 1.5
            model.rows += more - 1
        return model

    root_cause = ptrain.verify(job(), job(model=other), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.place, root_cause.certainty) == ("inner.weight", certainty), root_cause


def test_a_trial_writes_into_the_buffers_themselves() -> None:
    """Not into copies on the host, as a meta tensor has none."""
    sides = [nn.Module(), nn.Module()]
    for side in sides:
        side.register_buffer("row", torch.zeros(2, device="meta"))
    ((_, right, own),) = shared_buffers(*sides)
    copy_pairs([(own, right)])
    assert own.is_meta


def test_a_shard_takes_its_elements_of_a_full_tensor() -> None:
    flat = torch.zeros(6)
    shard = ParameterShard("w", flat, torch.Size([2, 4]), torch.tensor([5, 2]), slice(1, 3))
    shard.write(torch.arange(8.0).view(2, 4))
    assert flat.tolist() == [0, 5, 2, 0, 0, 0]


def test_no_change_is_ruled_out_where_the_step_raises_when_it_is_run_again() -> None:
    verdict = ptrain.verify(job(), job("ends"), ROWS, terms=ptrain.Terms(steps=1))
    assert verdict.root_cause is not None
    assert "the step raises when it is run again" in verdict.root_cause.tried
    assert "backward" not in verdict.root_cause.tried
    assert "reproducible" not in verdict.root_cause.tried


def test_a_step_that_became_right_by_itself_proves_nothing() -> None:
    """The first two steps that run are wrong, so the next one is right in any case."""
    root_cause = ptrain.verify(job(), job("begins"), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.factor.startswith("× 1.5"), root_cause


def test_nothing_is_proven_by_one_run_of_a_step_that_differs_from_run_to_run() -> None:
    """The third run is right whatever is tried in it; all others are wrong."""
    root_cause = ptrain.verify(job(), job("right by chance"), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.certainty is Certainty.FITS, root_cause
    assert "they did not in all of 3 further runs" in root_cause.tried


def test_parameters_that_are_written_before_a_step_are_named_but_not_proven() -> None:
    root_cause = ptrain.verify(job(), job("rounded in use"), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == ("rounded to bfloat16", Certainty.FITS)


@pytest.mark.parametrize(("rate", "certainty"), [(1e-2, Certainty.PROVEN), (2e-2, Certainty.FITS)])
def test_a_buffer_that_starts_rounded_is_tried(rate: float, certainty: Certainty) -> None:
    class Scaled(Counting):
        def __init__(self, is_rounded: bool) -> None:
            super().__init__()
            row = torch.linspace(0.1, 1.3, 8)
            self.register_buffer("scale", row.bfloat16() if is_rounded else row)

        def hidden(self, x: Tensor) -> Tensor:
            return super().hidden(x) * self.scale

    loops = (lambda: Scaled(False)), (lambda: Scaled(True))
    root_cause = ptrain.verify(job(model=loops[0]), job("", loops[1], rate), ROWS).root_cause
    assert root_cause is not None
    assert (root_cause.place, root_cause.certainty) == ("scale", certainty), root_cause
