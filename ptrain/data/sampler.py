"""Choose each rank's samples by a pure function of (seed, step, position), so that no sample is
missing or doubled on any mesh, and a resumed run continues without stored state.

A sample of tokens is a window of sequence + 1; windows overlap by one token, so that every token
but the first is predicted once per epoch. A sample of a dataset is one of its items. The global
batch of step t holds the sample positions t·B … t·B + B - 1; each epoch runs through all windows in
an order of its own. Micro-batch k of data rank d takes positions k·m·D + d·m … of the batch (m
samples per micro-batch, D data ranks), so that micro-batch k of all ranks together is the same text
on every mesh with the same m·D.

Samples come from a source: a corpus of tokens, or a dataset of the user's own. The source decides
by a permutation of an epoch which sample has which position in the endless stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ptrain.errors import SpecError, refused
from ptrain.models.boundary import kind_of
from ptrain.models.cross_entropy import IGNORED
from ptrain.models.objective import (
    SampleBatch,
    StepBatch,
    in_dtype_of,
    of_tokens,
    sample_batch,
    sent_to,
)
from ptrain.spec.batch import Batch
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """One data rank's share of a step's global batch of tokens.

    `tokens` is int64 [K · micro, sequence + 1]. `labels` are the same with IGNORED for tokens that
    are no targets; None where all are. `global_tokens` counts the targets of the whole global batch
    that count: what a sum of losses is divided by; `ignored` the others. `sample_ids`
    (epoch · windows + window) name the rows of `tokens`.
    """

    tokens: Tensor
    global_tokens: int
    sample_ids: tuple[int, ...]
    labels: Tensor | None = None
    ignored: int = 0

    @property
    def global_samples(self) -> int:
        """Samples of the whole global batch."""
        return (self.global_tokens + self.ignored) // (self.tokens.shape[1] - 1)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens] if self.labels is None else [self.tokens, self.labels]

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Inputs and targets, each [micro, sequence]; views, nothing is copied."""
        labels = self.tokens if self.labels is None else self.labels
        for first in range(0, len(self.tokens), micro):
            yield of_tokens(self.tokens[first : first + micro], labels[first : first + micro])

    def counting(self, num_targets: int) -> LocalBatch:
        """Return the same of a global batch of which so many targets count. Where none does the sum
        of the losses is 0, which is divided by 1: torch's mean would be NaN."""
        both = self.global_tokens + self.ignored
        count = max(1, num_targets)
        return replace(self, global_tokens=count, ignored=both - count)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that its tokens should have."""
        return [rows, sequence + 1]

    def to(self, device: torch.device) -> LocalBatch:
        if self.tokens.device == device:
            return self
        labels = None if self.labels is None else sent_to(device, self.labels)
        return replace(self, tokens=sent_to(device, self.tokens), labels=labels)


def local_batch(
    tokens: Tensor, labels: Tensor | None, sample_ids: tuple[int, ...], batch: Batch
) -> LocalBatch:
    """Return a share of tokens and labels [rows, window + 1], padded behind them. What is added is
    token 0, which stands in every vocabulary, and to which no token before it attends."""
    if batch.padding:
        assert labels is not None, "padding needs labels"
        tokens = F.pad(tokens, (0, batch.padding))
        labels = F.pad(labels, (0, batch.padding), value=IGNORED)
    every = batch.global_samples * batch.sequence
    return LocalBatch(tokens=tokens, global_tokens=every, sample_ids=sample_ids, labels=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetBatch:
    """One data rank's share of a step's global batch of other samples: `samples` are they,
    collated, K · micro of them in dimension 0 of each tensor."""

    samples: SampleBatch
    global_samples: int
    sample_ids: tuple[int, ...]

    @property
    def global_tokens(self) -> int:
        """A sample counts as one."""
        return self.global_samples

    @property
    def tensors(self) -> list[Tensor]:
        return self.samples.tensors

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Views of `micro` samples each."""
        for start in range(0, self.samples.rows, micro):
            yield self.samples.between(start, start + micro)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that the first of its tensors should have."""
        return [rows, *self.tensors[0].shape[1:]]

    def to(self, device: torch.device) -> DatasetBatch:
        return replace(self, samples=self.samples.to(device))


def batch(
    source: SampleSource,
    *,
    spec: Spec,
    step: int,
    data_index: int = 0,
    data_degree: int = 1,
    split: Split = Split.TRAIN,
    offset: int = 0,
) -> StepBatch:
    """The samples that data rank `data_index` of `data_degree` takes in `step` (from 0). `offset`
    is how far a training is ahead of steps of this batch: it had other batches before."""
    sequence = spec.batch.window
    windows = source.num_samples(sequence, split)
    first = step * spec.batch.global_samples + (offset if split is Split.TRAIN else 0)

    def at(position: int) -> int:
        seed = spec.train.seed
        return source.sample_at(first + position, seed=seed, sequence=sequence, split=split)

    samples = tuple(map(at, positions(spec, data_index=data_index, data_degree=data_degree)))
    local = source.read([sample_id % windows for sample_id in samples], samples, spec, split)
    if not isinstance(local, LocalBatch) or not spec.ignores_targets:
        return local
    everyone = [at(position) % windows for position in range(spec.batch.global_samples)]
    return local.counting(source.num_targets(everyone, spec, split))


def part_of(samples: Any, spec: Spec, data_index: int) -> StepBatch:
    """Return what data rank `data_index` takes of a global batch: of tokens, or, where the spec's
    data are a function of the user's, of its samples, collated, in the dtypes of a dataset's.
    Raises SpecError where these are not as the spec says."""
    ids = tuple(positions(spec, data_index=data_index, data_degree=spec.data_degree))
    size, sequence = spec.batch.global_samples, spec.batch.window
    if spec.data.function is not None:
        _require_samples(samples, size)
        own = in_dtype_of(spec, SampleBatch(samples).of(list(ids)).data)
        return DatasetBatch(samples=own, global_samples=size, sample_ids=ids)
    tokens, *others = samples if isinstance(samples, tuple) else (samples,)
    for tensor in (tokens, *others):
        if tuple(tensor.shape) != (size, sequence + 1):
            wanted = f"[batch.global, sequence + 1] = {[size, sequence + 1]}"
            raise _not_as_said(f"tokens {list(tensor.shape)}", wanted)
    if others and not spec.data.ignores_targets:
        raise refused(
            "batch",
            "got tokens and labels, but the spec ignores no targets",
            "Use `data.ignored=[]`, or a list of the ignored token ids.",
        )
    if not others and spec.data.is_masked:
        raise refused(
            "batch",
            "got tokens only, but data.loss_mask applies only to the file of the spec",
            "Pass `(tokens, labels)`, with label -100 for ignored targets.",
        )
    own = tokens[list(ids)].long()
    if not spec.ignores_targets:
        return local_batch(own, None, ids, spec.batch)
    labels = _labels(others[0] if others else tokens, spec)
    counted = int((labels[:, 1:] != IGNORED).sum())
    return local_batch(own, labels[list(ids)], ids, spec.batch).counting(counted)


def _labels(tokens: Tensor, spec: Spec) -> Tensor:
    """Return them with IGNORED for those that the spec ignores."""
    ignored = torch.tensor(spec.data.ignored or (), dtype=torch.int64, device=tokens.device)
    return tokens.long().masked_fill(torch.isin(tokens.long(), ignored), IGNORED)


def _require_samples(samples: Any, size: int) -> None:
    """Raises SpecError unless each leaf is a tensor with `size` samples in dimension 0."""
    wanted = f"collated samples, tensors with batch.global = {size} rows"
    if not (leaves := tree_leaves_with_path(samples)):
        raise _not_as_said(f"{type(samples).__name__} without tensors", wanted)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (size,):
            place = f"{keystr(path)}: " if path else ""
            raise _not_as_said(f"{place}{kind_of(leaf)}", wanted)


def _not_as_said(finding: str, wanted: str) -> SpecError:
    return refused(
        "batch", f"got {finding}", f"Pass the full global batch on every rank: {wanted}."
    )


def blank_batch(spec: Spec) -> StepBatch:
    """Return a data rank's share of a step of the spec's shapes, which holds no sample in
    particular."""
    rows, size = spec.batch.accumulate * spec.batch.micro, spec.batch.global_samples
    if spec.data.function is not None:
        samples = sample_batch(spec, rows=rows)
        return DatasetBatch(samples=samples, global_samples=size, sample_ids=())
    tokens = torch.zeros(rows, spec.batch.window + 1, dtype=torch.int64)
    labels = tokens.clone() if spec.ignores_targets else None
    return local_batch(tokens, labels, (), spec.batch)


def positions(spec: Spec, *, data_index: int, data_degree: int) -> Iterator[int]:
    """The places in the global batch that one data rank takes, micro-batch by micro-batch."""
    micro, stride = spec.batch.micro, spec.batch.micro * data_degree
    assert spec.batch.global_samples % stride == 0, (
        "the batch is not a multiple of the micro-batches"
    )
    for start in range(data_index * micro, spec.batch.global_samples, stride):
        yield from range(start, start + micro)


def require(source: SampleSource, spec: Spec, logits: int | None = None) -> None:
    """Refuse, before any rank starts, samples that the spec cannot train on (or evaluate with).
    `logits`: of a token, where a model's own code says how many."""
    source.num_samples(spec.batch.window, Split.TRAIN)
    if spec.eval.every:
        source.num_samples(spec.batch.window, Split.HELD_OUT)
    source.require_known(spec, logits)
