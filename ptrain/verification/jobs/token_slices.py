"""Where a rank's slice of the tokens lies in one device's samples, told by the tokens; and the same
part of whatever one device has of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptrain.verification.jobs.record import ForwardCall

_MOST_PAIRS = 1 << 26  # of tokens that are compared, 5 bytes for each: 8k of 8k


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlice:
    """`rows` [samples] and `columns` [tokens] of one device's tokens, whose shape is `whole`."""

    rows: Tensor
    columns: Tensor
    whole: torch.Size

    def of(self, tensor: Tensor | None, like: Tensor) -> Tensor | None:
        """Return this part of a tensor of one device: the tokens' dimension cut to the columns, the
        samples' to the rows; None where that does not give the shape of `like`."""
        if tensor is None or tensor.dim() != like.dim():
            return None
        for dim, size in enumerate(like.shape):
            if tensor.size(dim) == size:
                continue
            for index, whole in ((self.columns, self.whole[1]), (self.rows, self.whole[0])):
                if tensor.size(dim) == whole and size == index.numel():
                    tensor = tensor.index_select(dim, index.to(tensor.device))
                    break
            else:
                return None
        if len(set(self.whole)) == 1 and tensor.dim() > 1:
            return None  # samples and tokens cannot be told apart
        return tensor


def tokens_of(call: ForwardCall) -> Tensor | None:
    """Return what the model was given as tokens: [samples, tokens] of whole numbers."""
    leaves = tree_leaves((call.args, call.kwargs))
    return next(
        (
            leaf for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()
            and not isinstance(leaf, DTensor)
        ),
        None,
    )  # fmt: skip


def slice_of(reference: Sequence[ForwardCall], run: Sequence[ForwardCall]) -> TokenSlice | None:
    """Return the slice that this rank's only pass has of one device's only pass; None where it has
    whole samples, or its tokens are not found there."""
    if len(reference) != 1 or len(run) != 1:
        return None
    whole, own = tokens_of(reference[0]), tokens_of(run[0])
    if whole is None or own is None or own.size(1) >= whole.size(1):
        return None
    count = own.size(0)
    for start in range(0, whole.size(0) - count + 1, count):
        columns = _columns(whole[start : start + count], own)
        if columns is not None:
            rows = torch.arange(start, start + count)
            return TokenSlice(rows=rows, columns=columns, whole=whole.shape)
    return None


def _columns(whole: Tensor, own: Tensor) -> Tensor | None:
    """Return which columns these are: those of a usual way to cut, where one fits, else the ones
    that follow each other where several are alike."""
    for columns in _usual_cuts(whole.size(1), own.size(1)):
        if torch.equal(whole[:, columns.to(whole.device)], own):
            return columns
    if whole.size(1) * own.size(1) > _MOST_PAIRS:
        return None
    alike = torch.ones(own.size(1), whole.size(1), dtype=torch.bool, device=own.device)
    for of_whole, of_own in zip(whole, own, strict=True):
        alike &= of_own[:, None] == of_whole
    if not bool(alike.any(1).all()):
        return None
    return _following(alike.cpu())


def _usual_cuts(whole: int, own: int) -> Iterator[Tensor]:
    """Yield columns: a slice in one piece; an early and a late one (zigzag), as rank r of n has
    the slices r and 2n - 1 - r; every n-th token."""
    if not own or whole % own:
        return
    count = whole // own
    tokens = torch.arange(whole)
    yield from tokens.chunk(count)
    if own % 2 == 0:
        chunks = tokens.chunk(2 * count)
        yield from (torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(count))
    yield from (tokens[rank::count] for rank in range(count))


def _following(alike: Tensor) -> Tensor | None:
    """[own, whole]: which are alike."""
    runs = _longest_runs(alike)
    chosen: list[int] = []
    for place in range(alike.size(0)):
        following = chosen[-1] + 1 if chosen else -1
        fits = 0 <= following < alike.size(1) and bool(alike[place, following])
        chosen.append(following if fits else int(runs[place].argmax()))
    columns = torch.tensor(chosen)
    return columns if columns.unique().numel() == columns.numel() else None


def _longest_runs(alike: Tensor) -> Tensor:
    """[own, whole]: for how many columns from there on both go on alike."""
    runs = alike.int()
    for place in range(alike.size(0) - 2, -1, -1):
        runs[place, :-1] += torch.where(alike[place, :-1], runs[place + 1, 1:], 0)
    return runs
