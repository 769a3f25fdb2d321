"""How many samples a step takes, and how they are split over micro-batches and data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Resolved: `global_samples == micro * accumulate * data_degree`. `sequence` in tokens."""

    global_samples: int
    micro: int
    sequence: int
    accumulate: int

    @property
    def tokens(self) -> int:
        """Tokens of one step over the whole mesh."""
        return self.global_samples * self.sequence


class GradientSync(StrEnum):
    """When accumulated gradients are reduced: after every micro-batch, or after the last."""

    EVERY = "every"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPolicy:
    """The accumulation's policy, resolved.

    With U gathered units, K micro-batches and S* parameters: (every, True, True) moves 3K units,
    (last, True, True) 2K+1, (last, True, False) K+2, (last, False, True) K+1, (last, False,
    False) 2. Whatever the policy, the last micro-batch reduces and reshards.
    Gradients that are R on every data axis are always `last`: to reduce a sum that already holds
    a reduced part would count that part once per rank.
    """

    gradients: GradientSync = GradientSync.EVERY
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True


class ReduceScatterVia(StrEnum):
    """`native`: the backend's own (gloo executes it as an all-reduce); `all_to_all`: an exchange
    and a local sum, a true reduce-scatter on gloo."""

    NATIVE = "native"
    ALL_TO_ALL = "all_to_all"
