"""Small masks that several modules draw equally are replayed in their place; a draw in a later step
only is detected. One process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ptrain
from ptrain.verification.jobs.draws import DrawRecorder, RandomDraw

ROWS = list(torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1)).double())
RATE = 0.3


def drop_branches(x: Tensor) -> Tensor:
    """One number a sample: whole branches are dropped."""
    return x * x.new_empty(x.size(0), 1).bernoulli_(1 - RATE) / (1 - RATE)


class Branch(nn.Module):
    """Two branches that a module drops itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + drop_branches(torch.tanh(self.left(x)))
        return x + drop_branches(torch.tanh(self.right(x)))


class Branches(nn.Module):
    """The last two blocks are the same one; all are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[-1]):
            x = checkpoint(block, x, use_reentrant=False)
        return x


class OtherMask:
    """Replaces every draw by the next mask of a list; keeps what stood where."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, draw: RandomDraw) -> Tensor:
        row = torch.rand(draw.value.shape, generator=self.generator, dtype=draw.value.dtype)
        return (row < 1 - RATE).to(draw.value)


@pytest.mark.parametrize("seed", range(6))
def test_a_tensor_in_place_of_a_mask_is_recomputed(seed: int) -> None:
    torch.manual_seed(0)
    model = Branches().double()
    gradients = []
    for keeps in (True, False):
        model.zero_grad()
        torch.manual_seed(seed)
        with DrawRecorder(model, replace=OtherMask()):
            x = ROWS[0]
            for block in (*model.blocks, model.blocks[-1]):
                x = checkpoint(block, x, use_reentrant=False) if keeps else block(x)
            x.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def with_rates(
    rates: Callable[[int], float], lr: float = 1e-3, seed: int = 0
) -> Callable[[], ptrain.Job]:
    """A loop whose dropout changes from step to step."""

    def made() -> ptrain.Job:
        torch.manual_seed(seed)
        drop = nn.Dropout()
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), drop, nn.Linear(8, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        steps = iter(range(100))

        def step(rows: Tensor) -> Tensor:
            drop.p = rates(next(steps))
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return made


def begins_late(step: int) -> float:
    return 0.0 if step < 2 else 0.2


def rests_once(step: int) -> float:
    return 0.0 if step == 1 else 0.2


@pytest.mark.parametrize("rates", [begins_late, rests_once])
@pytest.mark.parametrize("are_jobs", [False, True])
def test_dropout_that_is_off_in_some_steps_is_replayed(
    rates: Callable[[int], float], are_jobs: bool
) -> None:
    make = with_rates(rates)
    both = (make(), make()) if are_jobs else (make, make)
    verdict = ptrain.verify(*both, ROWS)
    assert not verdict.mismatches, str(verdict)
    assert "are replayed in the reference" in str(verdict)


def always(step: int) -> float:
    return 0.5


@pytest.mark.parametrize("seed", range(4))
def test_the_effect_of_a_small_update_is_not_hidden_by_other_masks(seed: int) -> None:
    make = with_rates(always, 1e-4, seed)
    verdict = ptrain.verify(make, make, ROWS)
    assert verdict.holds, str(verdict)


class Stray(nn.Module):
    """It draws what nothing depends on, if it does."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.body = draws, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            drop_branches(x)
        return self.body(x)


def once_wrong(draws: bool, wrong_pass: int) -> ptrain.Job:
    """A loop that leaves a part of the gradients out in one pass, and not when that is repeated."""
    torch.manual_seed(0)
    model = Stray(draws).double()
    optimizer = torch.optim.AdamW(model.parameters())
    passes = iter(range(100))

    def step(rows: Tensor) -> Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        if next(passes) == wrong_pass:
            model.body.weight.grad[:, ::2] = 0
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


def test_a_fault_that_a_repetition_has_not_is_not_put_down_to_dropout() -> None:
    root_cause = ptrain.verify(once_wrong(False, -1), once_wrong(True, 2), ROWS).root_cause
    assert root_cause is not None
    assert root_cause.step == 2
    assert "dropout" not in root_cause.factor
    assert root_cause.certainty != "proven by trying"


def test_slopes_that_are_drawn_are_seen_and_others_put_in_their_place() -> None:
    model, x = nn.RReLU(), ROWS[0].clone().requires_grad_()
    with DrawRecorder(model, replace=lambda draw: torch.full_like(draw.value, 0.5)) as drawn:
        out = model(x)
        out.sum().backward()
    assert len(drawn.draws) == 1
    assert torch.equal(out, x * 0.5)
    assert torch.equal(x.grad, torch.full_like(x, 0.5))


class Twice(nn.Module):
    """A part that is frozen and drops out runs without gradients, and then everything twice on the
    same samples, whose two outputs are to agree."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(8, 8), nn.Dropout(RATE))
        self.head = nn.Sequential(nn.Dropout(RATE), nn.Linear(8, 1))


def agreeing(build: Callable[[], Twice], micro_batches: int) -> Callable[[], ptrain.Job]:
    def made() -> ptrain.Job:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> None:
            for part in rows.chunk(micro_batches):
                with torch.no_grad():
                    features = model.frozen(part)
                first, second = model.head(features), model.head(features)
                loss = first.square().mean() + (first - second).square().mean()
                (loss / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()

        return ptrain.Job(model=model, step=step)

    return made


def twice() -> Twice:
    torch.manual_seed(0)
    return Twice().double()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_masks_without_gradients_and_of_a_second_pass_are_replayed(micro_batches: int) -> None:
    verdict = ptrain.verify(agreeing(twice, 1), agreeing(twice, micro_batches), ROWS)
    assert verdict.holds, verdict
