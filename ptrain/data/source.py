"""What samples come from: a corpus of tokens, or a dataset of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from ptrain.models.objective import StepBatch
from ptrain.spec.spec import Spec


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


class SampleSource(Protocol):
    """Numbered samples, in two splits. Whatever refuses something raises SpecError."""

    @property
    def name(self) -> str: ...

    def num_samples(self, sequence: int, split: Split) -> int:
        """Return the samples of an epoch; refuses a split that has none."""
        ...

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the sample at this index of the endless stream, as epoch · samples + its place in
        the split; a seed orders it."""
        ...

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> StepBatch:
        """Return the samples at these places of a split, which are called so, on the processor."""
        ...

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return how many targets of the samples at these places count."""
        ...

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Refuse samples that the spec's model cannot be given; `logits` of a token, where its own
        code says how many."""
        ...

    def digest(self) -> str | None:
        """Return a digest of what is trained on, for the run folder; None where only a name is
        kept."""
        ...
