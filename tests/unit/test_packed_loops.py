"""Several documents in a sample: labels that cross their ends are detected if the end token is
named. One process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from ptrain.verification.jobs.job import LoopVerdict

END, WORDS = 0, 11


class Writer(nn.Module):
    """A causal model: a token sees the mean of those up to it, of its own document alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        sees = torch.ones(length, length).tril().bool().expand(len(tokens), -1, -1)
        document = (tokens == END).cumsum(1) - (tokens == END).long()
        sees = sees & (document[:, :, None] == document[:, None, :])
        weights = sees / sees.sum(-1, keepdim=True)
        return self.head(weights.double() @ self.embed(tokens))


def verify_packed(*, across: bool, end: int | None = END) -> LoopVerdict:
    tokens = torch.randint(1, WORDS, (3, 6, 13), generator=torch.Generator().manual_seed(2))
    tokens[:, :, 5] = END

    def made() -> ptrain.Job:
        torch.manual_seed(0)
        model = Writer().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(batch: Tensor) -> Tensor:
            labels = batch[:, 1:].clone()
            if not across:
                labels[batch[:, :-1] == END] = -100
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    make: Callable[[], ptrain.Job] = made
    return ptrain.verify(make, make, list(tokens), terms=ptrain.Terms(document_end=end))


def test_labels_across_documents_are_named() -> None:
    root_cause = verify_packed(across=True).root_cause
    assert root_cause is not None
    assert root_cause.factor == "labels across documents"
    assert "6 of 6" not in root_cause.sentence and "6 of 6 tokens 0" in root_cause.tried


def test_labels_that_stay_within_their_document_hold() -> None:
    verdict = verify_packed(across=False)
    assert verdict.holds, verdict
    assert "ok   shared code: no label is of another document" in str(verdict)


def test_without_the_end_token_a_note_says_that_this_was_not_checked() -> None:
    verdict = verify_packed(across=True, end=None)
    assert verdict.holds, verdict
    assert any("Terms(document_end=...)" in note for note in verdict.notes)
