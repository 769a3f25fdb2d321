"""Which rank trains on which text: a pure function of (seed, step, position), so that no sample is
missing or doubled on any mesh, and a resumed run continues where it stopped without stored state.

A sample is a window of sequence + 1 tokens; windows overlap by one token, so that every token but
the first is predicted once per epoch. The global batch of step t holds the sample positions
t·B … t·B + B - 1; each epoch runs through all windows in an order of its own. Micro-batch k of data
rank d takes positions k·m·D + d·m … of the batch (m samples per micro-batch, D data ranks), so
that micro-batch k of all ranks together is the same text on every mesh with the same m·D.

The order is a permutation by a Feistel network: it costs a few integer operations per sample and
no memory, whatever the corpus. (A seeded shuffle would hold one index per window.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptrain.data.corpus import Corpus, Split
from ptrain.errors import refused
from ptrain.spec.model import ExternalModel
from ptrain.spec.spec import Spec

_ROUNDS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """One data rank's share of a step's global batch.

    `tokens` is int64 [K · micro, sequence + 1]. `global_tokens` counts the targets of the whole
    global batch: what a sum of losses is divided by. `sample_ids` (epoch · windows + window) name
    the rows of `tokens`.
    """

    tokens: Tensor
    global_tokens: int
    sample_ids: tuple[int, ...]

    def micro_batches(self, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets), each [micro, sequence]; views, nothing is copied."""
        for tokens in self.tokens.split(micro):
            yield tokens[:, :-1], tokens[:, 1:]

    def to(self, device: torch.device) -> LocalBatch:
        return LocalBatch(
            tokens=self.tokens.to(device),
            global_tokens=self.global_tokens,
            sample_ids=self.sample_ids,
        )


def batch(
    source: Corpus,
    *,
    spec: Spec,
    step: int,
    data_index: int = 0,
    data_degree: int = 1,
    split: Split = Split.TRAIN,
) -> LocalBatch:
    """The samples that data rank `data_index` of `data_degree` takes in `step` (from 0)."""
    tokens = source.split(split)
    sequence = spec.batch.sequence
    windows = num_windows(source, sequence, split)
    first = step * spec.batch.global_samples
    samples = tuple(
        sample(first + position, windows=windows, seed=spec.train.seed)
        for position in positions(spec, data_index=data_index, data_degree=data_degree)
    )
    starts = (sequence * (sample_id % windows) for sample_id in samples)
    rows = np.stack([tokens[start : start + sequence + 1] for start in starts])
    _require_vocab(source, spec, int(rows.max()))
    return LocalBatch(
        tokens=torch.from_numpy(rows.astype(np.int64)),
        global_tokens=spec.batch.global_samples * sequence,
        sample_ids=samples,
    )


def positions(spec: Spec, *, data_index: int, data_degree: int) -> Iterator[int]:
    """The places in the global batch that one data rank takes, micro-batch by micro-batch."""
    micro, stride = spec.batch.micro, spec.batch.micro * data_degree
    assert spec.batch.global_samples % stride == 0, "the batch is a whole number of micro-batches"
    for start in range(data_index * micro, spec.batch.global_samples, stride):
        yield from range(start, start + micro)


def sample(index: int, *, windows: int, seed: int) -> int:
    """The sample at `index` of the endless stream, as epoch · windows + window."""
    epoch, place = divmod(index, windows)
    return epoch * windows + _permuted(place, windows, _mix(_mix(seed & _MASK) ^ epoch))


def num_windows(source: Corpus, sequence: int, split: Split = Split.TRAIN) -> int:
    """Samples per epoch; raises where the split is too short for one."""
    num_tokens = len(source.split(split))
    windows = (num_tokens - 1) // sequence
    if windows < 1:
        finding = (
            f"the {split.value} split of {source.name} has {num_tokens} tokens, one sample takes "
            f"{sequence + 1}"
        )
        raise refused("data", finding, "lower batch.sequence or give more text")
    return windows


def require(source: Corpus, spec: Spec, logits: int | None = None) -> None:
    """Refuse, before any rank starts, a corpus that the spec cannot train on (or evaluate with).
    `logits`: of a token, where a model's own code says how many."""
    num_windows(source, spec.batch.sequence)
    if spec.eval.every:
        num_windows(source, spec.batch.sequence, Split.HELD_OUT)
    largest = source.vocab - 1 if source.vocab else int(source.train[: 2**20].max())
    _require_vocab(source, spec, largest)
    if logits is not None and largest >= logits:
        name = spec.model.target if isinstance(spec.model, ExternalModel) else "the model"
        finding = f"{source.name} holds token {largest}, but {name} gives each {logits} logits"
        remedy = f"let it have a vocabulary of {source.vocab or largest + 1} or more"
        raise refused("data", finding, remedy)


def _require_vocab(source: Corpus, spec: Spec, largest: int) -> None:
    size, key = spec.model.vocabulary
    if size is not None and largest >= size:
        raise refused(
            "data",
            f"{source.name} holds token {largest}, but {key} is {size}",
            f"write {key}={source.vocab or largest + 1} or more",
        )


def _permuted(place: int, size: int, key: int) -> int:
    """Where a pseudo-random permutation of range(size) sends `place`. The network permutes the next
    power of four; whatever falls outside goes round again (cycle walking)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key + number ^ right << 32) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(number: int) -> int:
    """splitmix64: every bit of the result depends on every bit of `number`."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
