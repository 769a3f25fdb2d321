"""Unusual correct loops hold, and a fault is not called proven without proof. One process, fp64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from ptrain.verification.jobs.job import TOLERANCES, LoopVerdict
from ptrain.verification.parts import Magnitude, difference

ROWS = list(torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)).double())

Change = Callable[[nn.Module], None]


def unchanged_gradients(model: nn.Module) -> None:
    """Leave the gradients unchanged."""


def job(
    build: Callable[[], nn.Module],
    *,
    between: Change = unchanged_gradients,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    after: Callable[[torch.optim.Optimizer], Callable[[], Any]] | None = None,
) -> Callable[[], ptrain.Job]:
    """A loop on the mean square; `after` makes what follows every update."""

    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = build()
        own = (optimizer or _adamw)(model)
        follow = after(own) if after else lambda: None

        def step(rows: Tensor) -> Tensor:
            loss = model(rows.to(next(model.parameters()).dtype)).square().mean()
            loss.backward()
            between(model)
            own.step()
            own.zero_grad()
            follow()
            return loss

        return ptrain.Job(model=model, step=step)

    return made


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Scaled(nn.Module):
    """A linear whose output one number scales, beside a matrix of zeros that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))
        self.spare = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Gated(nn.Module):
    """A branch behind a gate that is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 0.0 * self.branch(x)


class Ends(nn.Module):
    """Two linears, of which the first returns a little too much if it is told to."""

    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.first.register_forward_hook(lambda _, __, output: output * (1 + more))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def require_holds(verdict: LoopVerdict) -> None:
    assert verdict.holds, verdict


def test_a_parameter_without_dimensions_and_one_without_a_gradient_hold() -> None:
    sound = job(lambda: Scaled().double())
    require_holds(ptrain.verify(sound, sound, ROWS))


def test_a_branch_with_zero_gradient_holds_under_momentum() -> None:
    sound = job(
        lambda: Gated().double(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    verdict = ptrain.verify(sound, sound, ROWS)
    assert "emptied" not in str(verdict.root_cause)


def test_updates_below_the_dtypes_resolution_are_noted() -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).bfloat16()

    sound = job(norm, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4))
    verdict = ptrain.verify(sound, sound, ROWS)
    assert verdict.root_cause is None, verdict
    assert any("stays the same to the bit" in note for note in verdict.notes)


def test_a_schedule_that_ends_with_the_batches_holds_with_a_note() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(ROWS) + 1).step

    sound = job(lambda: nn.Linear(4, 3).double(), after=schedule)
    verdict = ptrain.verify(sound, sound, ROWS)
    require_holds(verdict)
    assert any("no step can be run again" in note for note in verdict.notes)


def test_a_gradient_with_a_nan_after_backward_is_no_multiple() -> None:
    def double(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad *= 2
        next(model.parameters()).grad[0, 0] = torch.nan

    verdict = ptrain.verify(
        job(lambda: Ends().double()), job(lambda: Ends().double(), between=double), ROWS
    )
    assert verdict.root_cause is not None
    assert verdict.root_cause.factor == "changed after backward"


def test_a_module_is_not_blamed_for_a_gradient_that_was_wrong_without_it() -> None:
    def scale(model: nn.Module) -> None:
        model.first.weight.grad[0] *= 1.5

    verdict = ptrain.verify(
        job(lambda: Ends().double()), job(lambda: Ends(1e-9).double(), between=scale), ROWS
    )
    assert verdict.root_cause is not None
    assert verdict.root_cause.certainty != "proven by trying", verdict


def test_swapped_betas_of_groups_are_described_in_words() -> None:
    def groups(first: tuple[float, float], last: tuple[float, float]) -> Callable[..., Any]:
        def made(model: nn.Module) -> torch.optim.Optimizer:
            settings = [
                {"params": list(part.parameters()), "betas": betas}
                for part, betas in ((model.first, first), (model.last, last))
            ]
            return torch.optim.AdamW(settings, lr=1e-2)

        return made

    ones, others = (0.9, 0.999), (0.8, 0.95)

    def build() -> nn.Module:
        return Ends().double()

    verdict = ptrain.verify(
        job(build, optimizer=groups(ones, others)), job(build, optimizer=groups(others, ones)), ROWS
    )
    assert verdict.root_cause is not None
    assert "betas" in verdict.root_cause.sentence


class Drawing(nn.Module):
    """A causal language model that drops out by F.dropout, with a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        x = self.embed(tokens)
        return self.head(x * (torch.rand(x.shape, generator=generator) > 0.1))


def _tokens(loss: Callable[[Tensor, Tensor], Tensor], build: Callable[[], nn.Module]) -> Any:
    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = build().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(tokens: Tensor) -> Tensor:
            value = loss(model(tokens), tokens)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return ptrain.Job(model=model, step=step)

    return made


TOKENS = list(torch.randint(0, 11, (3, 6, 10), generator=torch.Generator().manual_seed(2)))


def test_a_model_that_draws_at_run_time_is_not_reported_to_lack_a_mask() -> None:
    def following(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    made = _tokens(following, Drawing)
    verdict = ptrain.verify(made, made, TOKENS)
    assert "no causal mask" not in str(verdict)


class Copying(nn.Module):
    """Sees all tokens, and gives each of them back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + x.mean(1, keepdim=True))


def test_a_task_that_is_to_copy_is_a_note() -> None:
    def same(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    made = _tokens(same, Copying)
    verdict = ptrain.verify(made, made, TOKENS)
    require_holds(verdict)
    assert any("if the task is to copy" in note for note in verdict.notes)


def test_a_bias_gradient_with_cancelling_terms_is_as_exact_as_its_terms() -> None:
    scale = Magnitude(usual=0.1)
    bias, rounding = torch.tensor([3e-4]), 6e-8
    own = bias + rounding
    assert difference(own, bias, scale.scale_of(bias, bias)) < 1e-5
    assert difference(2 * bias, bias, scale.scale_of(bias, bias)) > 1e-2
    row = bias.expand(2)
    assert difference(row + rounding, row, scale.scale_of(row, row)) > 1e-5


class Called(nn.Module):
    """A module that another calls."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, rows: Tensor) -> Tensor:
        return self.part(rows)  # called here


class Squared(nn.Linear):
    """Another result than the plain module's."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).square()


def test_a_module_that_differs_is_named_with_the_line_that_calls_it() -> None:
    verdict = ptrain.verify(
        job(lambda: nn.Sequential(Called(nn.Linear(4, 4)), nn.ReLU())),
        job(lambda: nn.Sequential(Called(Squared(4, 4)), nn.ReLU())),
        ROWS,
    )
    source = Path(__file__)
    lines = source.read_text(encoding="utf-8").splitlines()
    line = next(at for at, text in enumerate(lines, 1) if text.endswith("# called here"))
    assert verdict.root_cause is not None
    assert verdict.root_cause.place == "0.part"
    assert Path(verdict.root_cause.called_at).name == f"{source.name}:{line}"
    assert f"where: 0.part, called at {verdict.root_cause.called_at}" in str(verdict)


def clipping(scale: float) -> Callable[[], ptrain.Job]:
    """A loop in fp32 that trains `scale` times the loss, and clips."""

    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(rows: Tensor) -> Tensor:
            loss = scale * model(rows.float()).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return made


def test_a_scaled_loss_hidden_by_clipping_is_not_reported_as_wrong() -> None:
    verdict = ptrain.verify(clipping(1.0), clipping(2.0), ROWS)
    assert verdict.root_cause is not None
    assert "match after clipping" in verdict.root_cause.sentence
    assert "reported loss" not in str(verdict)
    assert "a factor that clipping hides" in str(verdict)


def test_a_loss_of_steps_without_compared_gradients_does_not_claim_that_they_match() -> None:
    verdict = ptrain.verify(clipping(1.0), clipping(2.0), ROWS, terms=ptrain.Terms(examined=0))
    assert not verdict.holds
    assert "of this step were not compared" in str(verdict)


def stretched() -> nn.Module:
    """A sequence whose first layer returns more than it computes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()
    model[0].register_forward_hook(lambda module, args, output: 1.1 * output)
    return model


def plain_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).double()


def test_a_layer_of_a_plain_sequence_is_located_by_the_gradients_of_the_others() -> None:
    verdict = ptrain.verify(job(plain_sequence), job(stretched), ROWS)
    assert verdict.root_cause is not None
    assert (verdict.root_cause.place, verdict.root_cause.factor) == ("0", "× 1.1")
    assert "the other 2 gradients match the reference" in verdict.root_cause.tried


class Balanced(nn.Module):
    """Two classes with probabilities near one half: the gradient of the bias is a sum of addends of
    both signs that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 2)
        with torch.no_grad():
            self.outer.weight.mul_(1e-3)
            self.outer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


@pytest.mark.parametrize(
    ("factor", "updates", "holds"), [(1.0, 1e-3, True), (1.0005, 1e-3, False), (1.0, 2e-6, True)]
)
def test_a_gradient_that_cancels_and_its_update_may_round_as_its_addends_do_and_no_more(
    factor: float, updates: float, holds: bool
) -> None:
    torch.manual_seed(0)
    plain = Balanced()
    order = torch.randperm(256)
    batch = torch.randn(256, 64)[order], (torch.arange(256) % 2)[order]

    def in_parts(model: nn.Module, parts: int, factor: float) -> ptrain.Job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(samples: tuple[Tensor, Tensor]) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for rows, labels in zip(*(side.chunk(parts) for side in samples), strict=True):
                loss = torch.nn.functional.cross_entropy(model(rows), labels) / parts
                (loss * factor).backward()
                total += loss.detach()
            optimizer.step()
            return total

        return ptrain.Job(model=model, step=step)

    sides = (plain, 1, 1.0), (plain, 16, factor)
    limit = dataclasses.replace(TOLERANCES[torch.float32], updates=updates)
    verdict = ptrain.verify(
        *(lambda its=its: in_parts(copy.deepcopy(its[0]), *its[1:]) for its in sides), [batch],
        terms=ptrain.Terms(tolerance=limit),
    )  # fmt: skip
    assert verdict.holds is holds, verdict
    assert any("a sum that cancels" in note for note in verdict.notes)
