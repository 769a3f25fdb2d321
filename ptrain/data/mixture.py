"""Several token files as one source of samples, by weight: a pure function of (seed, index), so
that a run goes on with no state of its own, and draws the same samples on any mesh.

The stream is cut into cycles, in which each file has as many samples as its weight says, spread
evenly: whose turn it is, and how many it had, is a table of one cycle. So the j-th sample of a file
stands at one place of the stream, behind the one before, and a file runs through its own epochs: no
sample is missed, and none comes twice before all others have come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ptrain.data.order import mixed, sample
from ptrain.data.origin import require_one_tokenizer
from ptrain.data.sampler import LocalBatch, local_batch
from ptrain.data.source import Split
from ptrain.data.token_corpus import Corpus
from ptrain.errors import Fault, SpecError
from ptrain.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Token files, of which each has so many samples of a cycle (`quotas`). Its samples are
    numbered file after file."""

    files: tuple[Corpus, ...]
    quotas: tuple[int, ...]

    @property
    def name(self) -> str:
        return " + ".join(file.name for file in self.files)

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the samples of all files; raises SpecError, with all faults, for those that have
        none."""
        return self._edges(sequence, split)[-1]

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the sample at this index of the stream, with the epoch of its own file."""
        cycle, place = divmod(index, sum(self.quotas))
        whose, turns = _turns(self.quotas, seed)
        number = int(whose[place])
        own_index = cycle * self.quotas[number] + int(turns[place])
        edges = self._edges(sequence, split)
        windows = edges[number + 1] - edges[number]
        drawn = sample(own_index, windows=windows, seed=mixed(seed + number))
        epoch, window = divmod(drawn, windows)
        return epoch * edges[-1] + edges[number] + window

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> LocalBatch:
        """Return the windows at these places."""
        rows = [file.rows([place], spec, split) for file, place in self._own(places, spec, split)]
        labels = [own for _, own in rows if own is not None]
        return local_batch(
            torch.cat([tokens for tokens, _ in rows]),
            torch.cat(labels) if labels else None,
            sample_ids,
            spec.batch,
        )

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return how many targets of the windows at these places count."""
        own = self._own(places, spec, split)
        return sum(file.num_targets([place], spec, split) for file, place in own)

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raises SpecError, with all faults, for files whose tokens are not in the model's
        vocabulary, and for those of other tokenizers than the first."""
        require_one_tokenizer([(file.name, file.origin) for file in self.files])
        of_all([partial(file.require_known, spec, logits) for file in self.files])

    def digest(self) -> None:
        """Its files have their names, and may be too large to read."""

    def _own(self, places: Sequence[int], spec: Spec, split: Split) -> list[tuple[Corpus, int]]:
        """Return for each place its file, and the place in it."""
        edges = self._edges(spec.batch.window, split)
        numbers = [bisect_right(edges, place) - 1 for place in places]
        both = zip(numbers, places, strict=True)
        return [(self.files[number], place - edges[number]) for number, place in both]

    def _edges(self, sequence: int, split: Split) -> list[int]:
        """Return where each file's samples begin, and where the last one's end."""
        counts = of_all([partial(file.num_samples, sequence, split) for file in self.files])
        return [0, *accumulate(counts)]


@cache
def _turns(quotas: tuple[int, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each place of a cycle whose it is, and how many before it are of the same. The
    i-th of q stands at (i + u) / q of the cycle, u drawn by the seed."""
    whose = np.repeat(np.arange(len(quotas)), quotas)
    turns = np.concatenate([np.arange(quota) for quota in quotas])
    drawn = np.array([mixed(mixed(seed) + number) / 2**64 for number in range(len(quotas))])
    order = np.argsort((turns + drawn[whose]) / np.asarray(quotas)[whose], kind="stable")
    return whose[order], turns[order]


Answer = TypeVar("Answer")


def of_all(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Return what all give; raises SpecError with the faults of all."""
    answers: list[Answer] = []
    faults: list[Fault] = []
    for call in calls:
        try:
            answers.append(call())
        except SpecError as error:
            faults.extend(error.faults)
    if faults:
        raise SpecError(*faults)
    return answers
