"""What a loss asks of each token, told by the gradient of the logits: cross-entropy's is the
probabilities less 1 at the target, times a positive number, so it is negative there alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 1 << 22  # logits that are looked at at once, in fp64


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    """What a rank's loss asks of its tokens beside one device's: how many have another target, how
    many have none where one device has one, whether all of these stand at the end of the slice, the
    factor of the others' gradient, and the `count` of the targets that one device has here."""

    other: int
    lacking: int
    at_end: bool
    factor: float
    count: int

    @classmethod
    def of(cls, own: Tensor, truth: Tensor) -> AskedTokens:
        """[samples, tokens, vocabulary] both: gradients of logits."""
        pieces = [
            _AskedPiece.of(*both)
            for both in zip(
                own.flatten(0, 1).split(_piece(own)), truth.flatten(0, 1).split(_piece(own)),
                strict=True,
            )
        ]  # fmt: skip
        other, lacking = (
            torch.cat(its).view(own.shape[:2])
            for its in zip(*((piece.other, piece.lacking) for piece in pieces), strict=True)
        )
        wrong = other | lacking
        product, square = (sum(its) for its in zip(*(p.products for p in pieces), strict=True))
        return cls(
            other=int(other.sum()), lacking=int(lacking.sum()),
            at_end=bool(wrong.any()) and not bool(wrong[:, :-1].any()),
            factor=product / square if square else 1.0,
            count=sum(piece.count for piece in pieces),
        )  # fmt: skip

    @property
    def is_right(self) -> bool:
        return not (self.other or self.lacking)


@dataclass(frozen=True, slots=True)
class _AskedPiece:
    """Of some tokens: which are asked for another target, which for none, the `products` of their
    gradient with one device's and of that with itself where both ask alike, and the number of one
    device's targets."""

    other: Tensor
    lacking: Tensor
    products: tuple[float, float]
    count: int

    @classmethod
    def of(cls, own: Tensor, truth: Tensor) -> _AskedPiece:
        """[tokens, vocabulary] both."""
        (has, targets), (should, right_targets) = map(targets_of, (own, truth))
        other = has & should & (targets != right_targets)
        lacking = should & ~own.any(-1)
        right = (should & ~(other | lacking)).double()
        product, square = ((side.double() * truth).sum(-1) @ right for side in (own, truth))
        return cls(other, lacking, (float(product), float(square)), int(truth.any(-1).sum()))


def targets_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens have a target, and the target that each has, by the gradient of logits
    [..., vocabulary]."""
    return (gradient < 0).sum(-1) == 1, gradient.argmin(-1)


def _piece(logits: Tensor) -> int:
    """Return how many tokens are looked at at once."""
    return max(_MOST // max(logits.size(-1), 1), 1)
