"""What rows go through on their way to their experts and back, in one forward pass: nothing, where
a rank has all experts.

Legend of shape suffixes: M rows, sorted by expert, E experts, S places of an expert, C hidden.
"""

from __future__ import annotations

from torch import Tensor


class Journey:
    """The way of one forward pass, where nothing travels."""

    def rows_there(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank's experts get, and where those of each of these end."""
        return x_MC, ends_E

    def rows_back(self, y_MC: Tensor) -> Tensor:
        """Return what the rows that set out have become, in their order."""
        return y_MC

    def places_there(self, x_ESC: Tensor) -> Tensor:
        """Return the places that this rank's experts get."""
        return x_ESC

    def places_back(self, y_ESC: Tensor) -> Tensor:
        """Return what the places that set out have become."""
        return y_ESC
