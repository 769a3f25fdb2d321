"""Tokens as a source of samples: windows of a text, or rows that are samples of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptrain.data.order import sample
from ptrain.data.origin import TokenOrigin, require_tokenizer
from ptrain.data.row_edges import require_edges
from ptrain.data.sampler import LocalBatch, local_batch
from ptrain.data.source import Split
from ptrain.data.tokens import TARGET
from ptrain.errors import refused
from ptrain.models.loss import IGNORED
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec

HELD_OUT_OF_FILE = 20  # the last twentieth of a token file is held out
_LOOKED_AT, _ROWS_LOOKED_AT = 2**20, 256  # tokens and rows, before ranks start

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token ids by split; a token file stays on disk, mapped into memory. Samples are windows of
    them, or rows, if they have any. `vocab` is the size of the tokenizer, None where only the file
    knows. `masks` are of the two splits, with 0 for a token that is no target, and of rows with 1
    for those that are; None where nothing says so. `origin`: what made a file, where that is known.
    """

    name: str
    train: Tokens
    held_out: Tokens
    vocab: int | None
    masks: tuple[NDArray[Any], NDArray[Any]] | None = None
    origin: TokenOrigin | None = None

    def split(self, split: Split) -> Tokens:
        return self.train if split is Split.TRAIN else self.held_out

    def num_samples(self, sequence: int, split: Split = Split.TRAIN) -> int:
        """Return the windows of an epoch; raises SpecError where the split is too short for one,
        and for rows that are no such windows."""
        tokens = self.split(split)
        if tokens.ndim == 2:
            return self._num_rows(sequence, split)
        num_tokens = len(tokens)
        windows = (num_tokens - 1) // sequence
        if windows < 1:
            finding = (
                f"the {split.value} split of {self.name} has {num_tokens} tokens, one sample takes "
                f"{sequence + 1}"
            )
            raise refused("data", finding, "lower batch.sequence or give more text")
        return windows

    def _num_rows(self, sequence: int, split: Split) -> int:
        rows, width = self.split(split).shape
        if width != sequence + 1:
            finding = f"{self.name} has rows of {width - 1} tokens, and samples are of {sequence}"
            remedy = (
                f"write batch.sequence={width - 1}, or make the file with --sequence {sequence}"
            )
            raise refused("batch.sequence", finding, remedy)
        if rows < 1:
            finding = f"the {split.value} split of {self.name} has no row: the last of "
            finding += f"{HELD_OUT_OF_FILE} are held out"
            raise refused("data", finding, "write eval.every=0, or give more chats")
        return int(rows)

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the window at this index, as epoch · windows + window."""
        return sample(index, windows=self.num_samples(sequence, split), seed=seed)

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> LocalBatch:
        """Return the windows at these places."""
        return local_batch(*self.rows(places, spec, split), sample_ids, spec.batch)

    def rows(self, places: Sequence[int], spec: Spec, split: Split) -> tuple[Tensor, Tensor | None]:
        """Return tokens and labels [places, window + 1] of the windows at these places; no labels
        where all tokens are targets."""
        tokens, window = self.split(split), spec.batch.window
        rows = np.stack([_window(tokens, place, window) for place in places], dtype=np.int64)
        self._require_vocab(spec, int(rows.max()))
        ids, labels = torch.from_numpy(rows), None
        if spec.ignores_targets:
            counts = np.stack([self._counts(place, spec, split) for place in places])
            labels = ids.masked_fill(torch.from_numpy(~counts), IGNORED)
        return ids, labels

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return how many targets of the windows at these places count."""
        return sum(int(np.count_nonzero(self._counts(p, spec, split)[1:])) for p in places)

    def _counts(self, place: int, spec: Spec, split: Split) -> NDArray[np.bool_]:
        """Whether each token of a window is a target that counts [sequence + 1]."""
        sequence, ignored = spec.batch.window, spec.data.ignored or ()
        counts = np.ones(sequence + 1, dtype=np.bool_)
        if self.masks is not None:
            mask = self.masks[split is not Split.TRAIN]
            own = _window(mask, place, sequence)
            counts &= _are_targets(own, of_rows=mask.ndim == 2)
        if ignored:
            own = _window(self.split(split), place, sequence)
            counts &= np.isin(own, ignored, invert=True)
        return counts

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raises SpecError for tokens that are not in the model's vocabulary or mean other words
        there, and for a mask by which none is learned."""
        num_looked_at = _LOOKED_AT if self.train.ndim == 1 else _ROWS_LOOKED_AT
        first = self.train[:num_looked_at]
        largest = self.vocab - 1 if self.vocab else int(first.max())
        self._require_vocab(spec, largest)
        if logits is not None and largest >= logits:
            name = spec.model.target if isinstance(spec.model, ExternalModel) else "the model"
            finding = f"{self.name} holds token {largest}, but {name} gives each {logits} logits"
            remedy = f"let it have a vocabulary of {self.vocab or largest + 1} or more"
            raise refused("data", finding, remedy)
        require_tokenizer(self.name, self.origin, spec.model)
        if self.masks is not None:
            self._require_targets(self.masks[0], num_looked_at)
        if self.train.ndim == 2 and self.masks is not None:
            require_edges(self.name, first, self.masks[0][:num_looked_at], spec.model)

    def _require_targets(self, mask: NDArray[Any], num_looked_at: int) -> None:
        """The whole mask is looked at only where its beginning has no target."""
        if not any(
            _are_targets(part, of_rows=part.ndim == 2).any()
            for part in (mask[:num_looked_at], mask)
        ):
            finding = f"by its mask no token of the train split of {self.name} is learned"
            raise refused("data", finding, "write a mask that is true for tokens that are learned")

    def _require_vocab(self, spec: Spec, largest: int) -> None:
        size, key = spec.model.vocabulary
        if size is not None and largest >= size:
            raise refused(
                "data",
                f"{self.name} holds token {largest}, but {key} is {size}",
                f"write {key}={self.vocab or largest + 1} or more",
            )

    def digest(self) -> str | None:
        """Return a digest of what was trained on, for the run folder: python-docs differs between
        Python versions. A token file has its name, and may be too large to read."""
        if self.vocab is None:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for tokens in (self.train, self.held_out):
            digest.update(np.ascontiguousarray(tokens).data)
        return digest.hexdigest()


def _are_targets(mask: NDArray[Any], *, of_rows: bool) -> NDArray[np.bool_]:
    """Return which tokens a mask lets count, of a stretch or of rows."""
    return mask == TARGET if of_rows else mask != 0


def _window(values: NDArray[Any], place: int, sequence: int) -> NDArray[Any]:
    """The tokens of a sample: the last one is a target alone, and, where they are no rows, the next
    one's first input."""
    if values.ndim == 2:
        return values[place]
    return values[sequence * place : sequence * (place + 1) + 1]
