"""Which tokens of a sample notice another one: each is changed in turn, and what becomes of the
logits is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ptrain.models.arguments import first_real
from ptrain.verification.jobs.probe import autocast_of
from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.jobs.token_slices import tokens_of

_ROUNDED_AWAY = 4  # roundings of a logit: smaller effects are seen on one side by chance


def noticed(
    model: Callable[..., Any], call: ForwardCall, changed: Sequence[int], columns: Sequence[int]
) -> Tensor | None:
    """Return [changed, columns]: by how much logits are others, relative to the largest, when the
    token at a place of the whole sample is another one; roundings of their dtype are 1. `columns`:
    the places of the tokens that the model is given. None of a model that returns no logits of its
    tokens, or draws. All ranks call it alike."""
    tokens = tokens_of(call)
    assert tokens is not None, "the slice was found by them"
    (before, eps), (again, _) = (_logits(model, call, tokens) for _ in range(2))
    known = before.dim() == 3 and before.shape[:2] == tokens.shape and torch.equal(before, again)
    rows = []
    for place in changed:
        other = tokens.clone()
        if place in columns:
            column = list(columns).index(place)
            other[:, column] = tokens[:, column].roll(1) if tokens.size(0) > 1 else 0
            same = other[:, column] == tokens[:, column]
            other[same, column] = (tokens[same, column] + 1) % (int(tokens.max()) + 1)
        after, _ = _logits(model, call, other)  # where this rank has it not, another one has
        rows.append(_apart(after, before) if known else torch.zeros(1))
    largest = _finite(before).abs().max().double()
    return torch.stack(rows) / (eps * largest) if known else None


def _apart(after: Tensor, before: Tensor) -> Tensor:
    """Return by how much the logits of each token are others, at most: [tokens] in fp64, one after
    the other, as all of them in fp64 are larger than the model."""
    pairs = zip(after.unbind(1), before.unbind(1), strict=True)
    return torch.stack([(_finite(a).double() - _finite(b)).abs().max() for a, b in pairs])


def _finite(logits: Tensor) -> Tensor:
    """Return logits of which those that a mask makes infinite are nothing."""
    return logits.nan_to_num(posinf=0, neginf=0)


def seen_by_one(those: Tensor, others: Tensor) -> Tensor:
    """Return where `those` notice, by more than what is rounded away, and `others` nothing."""
    return (those > _ROUNDED_AWAY) & (others == 0)


@torch.no_grad()
def _logits(model: Callable[..., Any], call: ForwardCall, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the logits, and the roundings of their dtype."""
    first = tokens_of(call)

    def instead(leaf: Any) -> Any:
        return tokens if leaf is first else leaf

    args, kwargs = tree_map(instead, (call.args, call.kwargs))
    with autocast_of([call]):
        output = model(*args, **kwargs)
    logits = first_real(output)
    assert logits is not None, "it returned some before"
    return logits, torch.finfo(logits.dtype).eps
