"""Which shares of a sum are in what a rank has of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ptrain.verification.causes.scene import EXACT
from ptrain.verification.factors import ABSENT, combination


def lacking(own: Tensor, shares: Sequence[Tensor]) -> list[int]:
    """Return which of the shares a rank's own sum lacks, of those that are not zero; none where it
    is no sum of them."""
    known = [number for number, share in enumerate(shares) if bool(share.any())]
    fit = combination(own, [shares[number] for number in known])
    if not fit.holds(EXACT):
        return []
    usual = max(map(abs, fit.coefficients))
    return [
        number
        for number, share in zip(known, fit.coefficients, strict=True)
        if abs(share) <= ABSENT * usual
    ]
