"""What a layer of experts asks of all tokens of its samples: how often each expert was chosen, and
how often before. Where a rank has all of them, it asks nobody.

Legend of shape suffixes: B samples, K choices of a token, T tokens, E experts.
"""

from __future__ import annotations

from torch import Tensor


class SampleTokens:
    """The tokens of samples that a rank has: all. `slices` are those that a sample's are cut
    into."""

    slices = 1

    def summed(self, counts_BE: Tensor) -> Tensor:
        """Return the counts of all tokens, of those of the rank's own."""
        return counts_BE

    def before(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        """Return how many choices of all tokens fall on a choice's expert before it, of those of
        the rank's own that do: first choices come before second ones, earlier tokens before later
        ones."""
        return before_BKT
