"""The global loss that the ranks' make up, beside one device's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ptrain.verification.jobs.conditions import number
from ptrain.verification.jobs.job import Losses
from ptrain.verification.jobs.ranks import Ranks


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """How the ranks' losses make up the global one."""

    how: Losses
    ranks: Ranks

    def of(self, right: float | None, mine: float | None) -> float | None:
        """Return it; None where a side has none. All ranks call it."""
        everyones = self.ranks.gather(mine)
        losses = [loss for loss in everyones if loss is not None]
        if right is None or len(losses) < len(everyones):
            return None
        match self.how:
            case "mean":
                return sum(losses) / len(losses)
            case "sum":
                return sum(losses)
            case "same":
                return max(losses, key=lambda loss: abs(loss - right))
            case reduce:
                return number(reduce(losses), "Terms.loss")


def apart(right: float, measured: float) -> float:
    """Return how far a loss is from one device's (relative); infinite for what is no number."""
    distance = abs(measured - right)
    size = distance / abs(right) if distance and right else (math.inf if distance else 0.0)
    return size if math.isfinite(size) else math.inf
