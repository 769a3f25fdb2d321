"""What rows go through on their way to their experts and back, in one forward pass, and what is
computed meanwhile: where a rank has all experts they go nowhere, and it is computed behind them.

Legend of shape suffixes: M rows, sorted by expert, E experts, S places of an expert, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Journey:
    """The way of one forward pass, where nothing travels."""

    def __init__(self) -> None:
        self._beside: Callable[[], Tensor] | None = None

    def compute_beside(self, compute: Callable[[], Tensor]) -> None:
        """Say what may be computed while rows travel, before they set out."""
        self._beside = compute

    def computed_beside(self) -> Tensor:
        """Return what that gave, when rows are back."""
        assert self._beside is not None, "there is something"
        return self._beside()

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
