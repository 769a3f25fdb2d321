"""The global loss that the ranks' make up, beside one device's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ptrain.verification.jobs.conditions import number
from ptrain.verification.jobs.job import Known, Losses
from ptrain.verification.jobs.ranks import Ranks


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """How the ranks' losses make up the global one."""

    how: Losses
    ranks: Ranks

    def of(self, right: float | None, mine: float | None) -> float | None:
        """Return it, of the ranks that have one (of a pipeline the last stage alone); None where a
        side has none. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return None if right is None or not losses else self._made_up(self.how, right, losses)

    def ways(self, right: float, mine: float | None) -> dict[Known, float]:
        """Return what the global loss would be by each known way. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return {how: self._made_up(how, right, losses) for how in get_args(Known)}

    @staticmethod
    def _made_up(how: Losses, right: float, losses: Sequence[float]) -> float:
        match how:
            case "mean":
                return sum(losses) / len(losses)
            case "sum":
                return sum(losses)
            case "same":
                return max(losses, key=lambda loss: abs(loss - right))
            case reduce:
                total = number(reduce(losses), "Terms.loss")
                return math.nan if total is None else total
