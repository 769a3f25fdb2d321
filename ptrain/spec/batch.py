"""How many samples a step takes, and how they are split over micro-batches and data ranks."""

from __future__ import annotations

from dataclasses import dataclass


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
