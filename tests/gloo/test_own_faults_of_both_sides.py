"""Faults of both sides: the loop trains like one device, and one device trains wrong. Rerunning the
reference with changes that must not matter, or with inputs that must not be visible, detects
them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from tests.gloo.own_loops import WORDS

WIDTH, LENGTH = 8, 12


class Attentive(nn.Module):
    """A mean over the tokens that a token may attend to, added to its features."""

    def __init__(self, is_causal: bool = True, is_detached: bool = False) -> None:
        super().__init__()
        self.is_detached = is_detached
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.is_causal = is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.detach() if self.is_detached else x
        seen = F.scaled_dot_product_attention(x, x, self.mix(x), is_causal=self.is_causal)
        return self.head(x + seen)


Loss = Callable[[Tensor, Tensor], Tensor]


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def same_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def shifted_twice(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-2].flatten(0, 1), tokens[:, 2:].flatten())


def loss_of_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return next_token(logits.softmax(-1), tokens)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, WORDS, (6, LENGTH), generator=generator) for _ in range(3)]


def verify_same_fault(
    *,
    loss: Loss = next_token,
    is_causal: bool = True,
    is_detached: bool = False,
    zeroes: bool = True,
    left_out: str = "-",
    weight: float | None = None,
    rate: tuple[float, ...] = (1e-2,) * 3,
    keeps: bool = True,
) -> ptrain.verification.jobs.job.LoopVerdict:
    """Return the verdict of a loop that both sides run: with another loss, mask or initialization,
    a step that does not zero gradients, parameters that no optimizer has, another learning rate, or
    an optimizer that loses its state."""

    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = Attentive(is_causal, is_detached).double()
        if weight is not None:
            for linear in (model.mix, model.head):
                nn.init.constant_(linear.weight, weight)
                nn.init.zeros_(linear.bias)
            nn.init.constant_(model.embed.weight, weight)
        given = [p for name, p in model.named_parameters() if not name.startswith(left_out)]
        optimizer = torch.optim.AdamW(given, lr=1e-2)
        rates = iter(rate)

        def step(tokens: Tensor) -> Tensor:
            optimizer.param_groups[0]["lr"] = next(rates, 1e-2)
            value = loss(model(tokens), tokens)
            value.backward()
            if not keeps:
                optimizer.state.clear()
            optimizer.step()
            if zeroes:
                model.zero_grad()
            return value

        return ptrain.Job(model=model, step=step)

    return ptrain.verify(job, job, batches())


def test_a_correct_language_model_holds_under_every_relation() -> None:
    verdict = verify_same_fault()
    assert verdict.holds, verdict
    tried = [check.name for check in verdict.checks if check.name.startswith("shared code")]
    assert len(tried) == 8
    assert [note.partition(":")[0] for note in verdict.notes] == ["labels across documents"]


@pytest.mark.parametrize(
    ("fault", "factor", "place"),
    [
        ({"loss": same_token}, "labels not shifted", "labels"),
        ({"loss": shifted_twice}, "labels shifted twice", "labels"),
        ({"is_causal": False}, "no causal mask", "attention"),
        ({"zeroes": False}, "previous step added, in the reference too", "embed.weight"),
        ({"left_out": "mix"}, "not updated in the reference either", "mix.bias, mix.weight"),
        ({"loss": loss_of_probabilities}, "softmax before cross-entropy", "loss"),
        ({"weight": 0.1}, "identical units", "mix.weight"),
        ({"is_detached": True}, "no gradient in the reference either", "embed"),
        ({"rate": (1e-2, 0.0, 0.0)}, "no update in the reference either", "all parameters"),
        ({"keeps": False}, "emptied in every step", "embed.weight"),
    ],
)
def test_a_fault_of_both_sides_is_proven(fault: dict, factor: str, place: str) -> None:
    verdict = verify_same_fault(**fault)
    assert not verdict.holds
    assert verdict.root_cause is not None
    assert verdict.root_cause.factor.startswith(factor), verdict
    assert verdict.root_cause.place.startswith(place)
    assert verdict.root_cause.certainty == "proven by trying"


def test_a_model_without_token_inputs_lists_the_skipped_relations() -> None:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: Tensor) -> Tensor:
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    verdict = ptrain.verify(job, job, torch.randn(3, 4, 4, dtype=torch.float64))
    assert verdict.holds, verdict
    assert "no logits of tokens" in verdict.notes[0]
