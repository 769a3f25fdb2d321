"""What a loss asks of a model's logits, told by its gradient alone: which token every position is
asked for, and whether it takes the logits as they are; and where a sample has several documents,
whether the token that ends one is asked for the next one's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ptrain.verification.factors import multiple
from ptrain.verification.jobs.asked_tokens import targets_of
from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.jobs.token_slices import tokens_of

_NEARLY_ALL = 0.99  # of the positions that have a target
_RARELY = 0.9
_FEWEST = 8  # positions from which a task is told
_FITS = 1e-4  # of a gradient's rows, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTask:
    """`shift`: how far behind a position (in tokens) is what it is asked for; None where that is
    no token of the input. `count`: how many positions have a target; `has_label` [rows, positions]:
    which."""

    tokens: Tensor
    shift: int | None
    count: int
    has_label: Tensor


def task_of(call: ForwardCall) -> TokenTask | None:
    """Tell the targets of a cross-entropy by its gradient. None of a model that is given no tokens
    [rows, positions], or returns no logits of them."""
    tokens = tokens_of(call)
    gradient = call.upstream.get(0)
    if tokens is None or gradient is None or gradient.dim() != 3:
        return None
    if gradient.shape[:2] != tokens.shape or int(tokens.max()) >= gradient.size(2):
        return None
    has_target, targets = targets_of(gradient)
    shares = {}
    for shift in range(3):
        length = tokens.size(1) - shift
        has = has_target[:, :length]
        if int(has.sum()) < _FEWEST:
            return None
        right = targets[:, :length][has] == tokens[:, shift:][has]
        shares[shift] = float(right.double().mean())
    likeliest = max(shares, key=lambda shift: shares[shift])
    others = max(share for shift, share in shares.items() if shift != likeliest)
    is_clear = shares[likeliest] >= _NEARLY_ALL and others <= _RARELY
    return TokenTask(
        tokens=tokens, shift=likeliest if is_clear else None, count=int(has_target.sum()),
        has_label=has_target,
    )  # fmt: skip


def softmaxed(call: ForwardCall) -> str:
    """Return what the loss is given in the place of logits, in words; nothing where it is given
    these. The gradient of a cross-entropy of a softmax is told from that of the logits."""
    output, gradient = call.output, call.upstream.get(0)
    if output is None or gradient is None or gradient.shape != output.shape or output.dim() < 2:
        return ""
    if output.size(-1) < 3:
        return ""
    rows, slopes = (tensor.double().flatten(0, -2) for tensor in (output, gradient))
    has = slopes.abs().amax(-1) > 0
    rows, slopes = rows[has], slopes[has]
    if len(rows) < _FEWEST:
        return ""
    targets = torch.nn.functional.one_hot(slopes.argmin(-1), rows.size(-1)).double()
    plain = rows.softmax(-1) - targets
    if _is_multiple(slopes, plain):
        are = bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < _FITS).all())
        return "probabilities, whose rows add up to one" if are else ""
    shares = rows.softmax(-1)
    twice = shares.softmax(-1) - targets
    back = shares * (twice - (shares * twice).sum(-1, keepdim=True))
    return "their softmax" if _is_multiple(slopes, back) else ""


def _is_multiple(slopes: Tensor, expected: Tensor) -> bool:
    return multiple(slopes.flatten(), expected.flatten()).holds(_FITS)


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
