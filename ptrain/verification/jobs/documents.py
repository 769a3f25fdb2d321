"""Several documents in one sample: the token that ends one is asked for nothing, as the next token
is another document's; and what a document notices of the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ptrain.verification.jobs.tasks import TokenTask


def num_ends(task: TokenTask, end: int) -> int:
    """Return how many documents end before another one begins."""
    return int(_ends(task.tokens, end).sum())


def num_asked_across(task: TokenTask, end: int) -> int:
    """Return how many of these ends have a label."""
    return int((_ends(task.tokens, end) & task.has_label).sum())


def after_first_documents(tokens: Tensor, end: int) -> Tensor:
    """[rows, positions]: those of a later document than the sample's first."""
    return (
        _ends(tokens, end)
        .cumsum(1)
        .roll(1, 1)
        .index_fill(1, torch.tensor([0], device=tokens.device), 0)
        > 0
    )


def instead_of_first_documents(tokens: Tensor, end: int) -> Tensor:
    """Return the tokens with others in the first document of each sample, but for its end."""
    is_first = ~after_first_documents(tokens, end) & (tokens != end)
    count = int(tokens.max()) + 1
    other = (tokens + 1) % count
    other = torch.where(other == end, (other + 1) % count, other)
    return torch.where(is_first, other, tokens)


def _ends(tokens: Tensor, end: int) -> Tensor:
    is_end = tokens == end
    is_end[:, -1] = False
    return is_end
