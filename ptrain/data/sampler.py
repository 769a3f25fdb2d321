"""The samples of each rank, as a pure function of (seed, step, position).

On any mesh no sample is missing or duplicated, and a resumed run continues without stored state.

A sample of tokens is a window of sequence + 1 tokens. Windows overlap by one token, so that every
token except the first is predicted once per epoch. A sample of a dataset is one of its items. The
global batch of step t holds the sample positions t·B … t·B + B - 1; each epoch runs through all
windows in a different order. Micro-batch k of data rank d takes positions k·m·D + d·m … of the
batch (m samples per micro-batch, D data ranks). So micro-batch k of all ranks together holds the
same text on every mesh with the same m·D.

Samples come from a source: a corpus of tokens, or your dataset. The source maps positions of the
endless stream to samples, by one permutation per epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ptrain.errors import SpecError, input_error
from ptrain.models.boundary import describe_value
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
    """A part of the data."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class SampleSource(Protocol):
    """A source of numbered samples in two splits. All methods raise SpecError for unusable data."""

    @property
    def name(self) -> str: ...

    def num_samples(self, sequence: int, split: Split) -> int:
        """Return the number of samples of an epoch.

        Args:
            sequence: The length of a sample, in tokens.
            split: The split.

        Raises:
            SpecError: The split has no sample.
        """
        ...

    def sample_at(self, index: int, *, seed: int, sequence: int, split: Split) -> int:
        """Return the sample at an index of the endless stream, as epoch · samples + its place.

        Args:
            index: The index, from 0.
            seed: The seed of the order.
            sequence: The length of a sample, in tokens.
            split: The split.
        """
        ...

    def read(
        self, places: Sequence[int], sample_ids: tuple[int, ...], spec: Spec, split: Split
    ) -> StepBatch:
        """Return samples on the CPU.

        Args:
            places: The places of the samples in the split.
            sample_ids: The ids that the batch reports for them.
            spec: The spec.
            split: The split.
        """
        ...

    def num_targets(self, places: Sequence[int], spec: Spec, split: Split) -> int:
        """Return the number of targets in these samples that count in the loss.

        Args:
            places: The places of the samples in the split.
            spec: The spec, which states whether targets are ignored.
            split: The split.
        """
        ...

    def require_known(self, spec: Spec, logits: int | None) -> None:
        """Raise SpecError if the model of the spec cannot process the samples.

        Args:
            spec: The spec.
            logits: The number of logits per token. None: unknown.
        """
        ...

    def digest(self) -> str | None:
        """Return a digest of the data for the run folder. None: only its name is recorded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """One data rank's share of the global batch of a step, in tokens.

    Attributes:
        tokens: int64 [K · micro, sequence + 1], for K micro-batches.
        labels: Like `tokens`, with IGNORED for tokens that are no targets. None: all are targets.
        global_tokens: The number of targets of the global batch that count, by which the sum of
            losses is divided.
        ignored: The number of its other targets.
        sample_ids: The ids (epoch · windows + window) of the rows of `tokens`.
    """

    tokens: Tensor
    global_tokens: int
    sample_ids: tuple[int, ...]
    labels: Tensor | None = None
    ignored: int = 0

    @property
    def global_samples(self) -> int:
        """The number of samples of the global batch."""
        return (self.global_tokens + self.ignored) // (self.tokens.shape[1] - 1)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        return [self.tokens] if self.labels is None else [self.tokens, self.labels]

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield the inputs and targets of each micro-batch, both [micro, sequence], as views.

        Args:
            micro: The number of samples of a micro-batch; it divides the number of rows.
        """
        labels = self.tokens if self.labels is None else self.labels
        for first in range(0, len(self.tokens), micro):
            yield of_tokens(self.tokens[first : first + micro], labels[first : first + micro])

    def with_num_targets(self, num_targets: int) -> LocalBatch:
        """Return the batch with this number of targets that count in the global batch.

        If none counts, the sum of the losses is 0 and is divided by 1; torch's mean would be NaN.
        """
        both = self.global_tokens + self.ignored
        count = max(1, num_targets)
        return replace(self, global_tokens=count, ignored=both - count)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the expected shape of `tokens`.

        Args:
            rows: The number of samples.
            sequence: The length of a sample, in tokens.

        Returns:
            [rows, sequence + 1]: the last token is only a target.
        """
        return [rows, sequence + 1]

    def to(self, device: torch.device) -> LocalBatch:
        """Return the batch on a device."""
        if self.tokens.device == device:
            return self
        labels = None if self.labels is None else sent_to(device, self.labels)
        return replace(self, tokens=sent_to(device, self.tokens), labels=labels)


def local_batch(
    tokens: Tensor, labels: Tensor | None, sample_ids: tuple[int, ...], batch: Batch
) -> LocalBatch:
    """Return a rank's share of a batch, padded at the end of each row.

    Padding is token 0, which is in every vocabulary, with the label IGNORED. No earlier token
    attends to it.

    Args:
        tokens: int64 [rows, window + 1].
        labels: Like `tokens`; required if the batch is padded. None: all tokens are targets.
        sample_ids: The ids of the rows.
        batch: The batch section of the spec.
    """
    if batch.padding:
        assert labels is not None, "padding needs labels"
        # At the end, so that a causal model's other outputs do not depend on the padding.
        tokens = F.pad(tokens, (0, batch.padding))
        labels = F.pad(labels, (0, batch.padding), value=IGNORED)
    every = batch.global_samples * batch.sequence
    return LocalBatch(tokens=tokens, global_tokens=every, sample_ids=sample_ids, labels=labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetBatch:
    """One data rank's share of the global batch of a step, in samples of a dataset.

    Attributes:
        samples: The collated samples, K · micro of them in dimension 0 of each tensor.
        global_samples: The number of samples of the global batch.
        sample_ids: The ids of the samples.
    """

    samples: SampleBatch
    global_samples: int
    sample_ids: tuple[int, ...]

    @property
    def global_tokens(self) -> int:
        """The number of samples of the global batch: a sample counts as one target."""
        return self.global_samples

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the batch."""
        return self.samples.tensors

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield views of `micro` samples each.

        Args:
            micro: The number of samples of a micro-batch; it divides the number of samples.
        """
        for start in range(0, self.samples.rows, micro):
            yield self.samples.slice_rows(start, start + micro)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the expected shape of the first tensor.

        Args:
            rows: The number of samples.
            sequence: Not used: a dataset decides the shape of its samples.
        """
        return [rows, *self.tensors[0].shape[1:]]

    def to(self, device: torch.device) -> DatasetBatch:
        """Return the batch on a device."""
        return replace(self, samples=self.samples.to(device))


def read_batch(
    source: SampleSource,
    *,
    spec: Spec,
    step: int,
    data_index: int = 0,
    data_degree: int = 1,
    split: Split = Split.TRAIN,
    offset: int = 0,
) -> StepBatch:
    """Return the samples of a data rank in a step.

    Args:
        source: The source of the samples.
        spec: The spec.
        step: The step, from 0.
        data_index: The data rank.
        data_degree: The number of data ranks.
        split: The split.
        offset: The number of samples by which a resumed training is ahead of `step` steps of this
            batch size, because it used other batch sizes before.

    Returns:
        The share of this rank, on the CPU. Its count of targets is the one of the global batch.

    Raises:
        SpecError: The data cannot be read.
    """
    sequence = spec.batch.unpadded_tokens
    windows = source.num_samples(sequence, split)
    # Held-out batches are the same in each evaluation, so `offset` does not shift them.
    first = step * spec.batch.global_samples + (offset if split is Split.TRAIN else 0)

    def at(position: int) -> int:
        seed = spec.train.seed
        return source.sample_at(first + position, seed=seed, sequence=sequence, split=split)

    samples = tuple(map(at, batch_positions(spec, data_index=data_index, data_degree=data_degree)))
    local = source.read([sample_id % windows for sample_id in samples], samples, spec, split)
    if not isinstance(local, LocalBatch) or not spec.ignores_targets:
        return local
    # Losses are divided by the targets of the global batch, which each rank counts for itself
    # instead of communicating.
    everyone = [at(position) % windows for position in range(spec.batch.global_samples)]
    return local.with_num_targets(source.num_targets(everyone, spec, split))


def shard_batch(samples: Any, spec: Spec, data_index: int) -> StepBatch:
    """Return a data rank's share of a global batch that the caller provides.

    Args:
        samples: Tokens [batch.global, sequence + 1], or a pair (tokens, labels) of this shape. If
            the spec's data is a user function: its samples, collated.
        spec: The spec.
        data_index: The data rank.

    Raises:
        SpecError: The batch does not have the type and shape that the spec requires.
    """
    ids = tuple(batch_positions(spec, data_index=data_index, data_degree=spec.data_degree))
    size, sequence = spec.batch.global_samples, spec.batch.unpadded_tokens
    if spec.data.function is not None:
        _require_samples(samples, size)
        share = in_dtype_of(spec, SampleBatch(samples).select_rows(list(ids)).data)
        return DatasetBatch(samples=share, global_samples=size, sample_ids=ids)
    tokens, *others = samples if isinstance(samples, tuple) else (samples,)
    for tensor in (tokens, *others):
        if tuple(tensor.shape) != (size, sequence + 1):
            wanted = f"[batch.global, sequence + 1] = {[size, sequence + 1]}"
            raise _batch_error(f"tokens {list(tensor.shape)}", wanted)
    if others and not spec.data.ignores_targets:
        raise input_error(
            "batch",
            "got tokens and labels, but the spec ignores no targets",
            "Use `data.ignored=[]`, or a list of the ignored token ids.",
        )
    if not others and spec.data.is_masked:
        raise input_error(
            "batch",
            "got tokens only, but data.loss_mask applies only to the file of the spec",
            "Pass `(tokens, labels)`, with label -100 for ignored targets.",
        )
    share = tokens[list(ids)].long()
    if not spec.ignores_targets:
        return local_batch(share, None, ids, spec.batch)
    labels = _masked_labels(others[0] if others else tokens, spec)
    counted = int((labels[:, 1:] != IGNORED).sum())
    return local_batch(share, labels[list(ids)], ids, spec.batch).with_num_targets(counted)


def _masked_labels(tokens: Tensor, spec: Spec) -> Tensor:
    """Return the tokens, with IGNORED for the ids that the spec ignores."""
    ignored = torch.tensor(spec.data.ignored or (), dtype=torch.int64, device=tokens.device)
    return tokens.long().masked_fill(torch.isin(tokens.long(), ignored), IGNORED)


def _require_samples(samples: Any, size: int) -> None:
    """Raise SpecError unless each leaf is a tensor with `size` samples in dimension 0."""
    wanted = f"collated samples, tensors with batch.global = {size} rows"
    if not (leaves := tree_leaves_with_path(samples)):
        raise _batch_error(f"{type(samples).__name__} without tensors", wanted)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (size,):
            place = f"{keystr(path)}: " if path else ""
            raise _batch_error(f"{place}{describe_value(leaf)}", wanted)


def _batch_error(finding: str, wanted: str) -> SpecError:
    """Return the error of a global batch with another type or shape."""
    return input_error(
        "batch", f"got {finding}", f"Pass the full global batch on every rank: {wanted}."
    )


def blank_batch(spec: Spec) -> StepBatch:
    """Return a data rank's share of a step with placeholder samples of the spec's shapes.

    Args:
        spec: The spec.

    Returns:
        The micro-batches of a step in one batch: zeros, or copies of sample 0 of a user dataset.
    """
    rows, size = spec.batch.accumulate * spec.batch.micro, spec.batch.global_samples
    if spec.data.function is not None:
        samples = sample_batch(spec, rows=rows)
        return DatasetBatch(samples=samples, global_samples=size, sample_ids=())
    tokens = torch.zeros(rows, spec.batch.unpadded_tokens + 1, dtype=torch.int64)
    labels = tokens.clone() if spec.ignores_targets else None  # as the batches of a run have
    return local_batch(tokens, labels, (), spec.batch)


def batch_positions(spec: Spec, *, data_index: int, data_degree: int) -> Iterator[int]:
    """Yield the positions of a data rank in the global batch, micro-batch by micro-batch.

    Example: with 2 data ranks, 1 sample per micro-batch and a global batch of 4, rank 1 has the
    positions 1 and 3.

    Args:
        spec: The spec.
        data_index: The data rank.
        data_degree: The number of data ranks.
    """
    micro, stride = spec.batch.micro, spec.batch.micro * data_degree
    assert spec.batch.global_samples % stride == 0, (
        "the batch is not a multiple of the micro-batches"
    )
    for start in range(data_index * micro, spec.batch.global_samples, stride):
        yield from range(start, start + micro)


def require_trainable_data(source: SampleSource, spec: Spec, logits: int | None = None) -> None:
    """Raise SpecError, before any rank starts, if the spec cannot train or evaluate on the samples.

    Args:
        source: The source of the samples.
        spec: The spec.
        logits: The number of logits per token. None: unknown.
    """
    source.num_samples(spec.batch.unpadded_tokens, Split.TRAIN)
    if spec.eval.every:
        source.num_samples(spec.batch.unpadded_tokens, Split.HELD_OUT)
    source.require_known(spec, logits)


# The other ranks wait while rank 0 hashes the data, so at most 256 blocks (of 1 MiB) are read.
_BLOCK, _NUM_BLOCKS = 1 << 20, 256
_LEAST_BLOCKS = 16  # blocks of each file, if there are many


def fingerprint_data(spec: Spec, source: SampleSource) -> dict[str, tuple[int, str, int]]:
    """Return the fingerprint of the training data: size, digest and modification time by key.

    - A file: its bytes, a SHA-256, and the time in ns. Up to 256 MiB are hashed in full. For a
      larger file, 256 blocks of 1 MiB are hashed, evenly spaced from the first byte to the last, so
      a change between the blocks is not noticed. Several files share the 256 blocks; each has at
      least 16.
    - A built-in text: size 0 and a digest.
    - A user's dataset: the number of samples. Its content is unknown.
    """
    data = spec.data
    if data.is_of_files:
        paths = {"data.path": data.path, "data.loss_mask": data.loss_mask}
        for index, part in enumerate(data.sources or ()):
            paths[f"data.sources.{index}.path"] = part.path
            paths[f"data.sources.{index}.loss_mask"] = part.loss_mask
        files = {key: Path(path) for key, path in paths.items() if path}
        blocks = max(_NUM_BLOCKS // len(files), _LEAST_BLOCKS)
        return {key: fingerprint_file(path, blocks) for key, path in files.items()}
    is_user_code = data.function is not None
    size = source.num_samples(spec.batch.unpadded_tokens, Split.TRAIN) if is_user_code else 0
    return {"data": (size, source.digest() or "", 0)}


def fingerprint_file(path: Path, blocks: int) -> tuple[int, str, int]:
    """Return the fingerprint of a file.

    Args:
        path: The file.
        blocks: The number of blocks of 1 MiB to read at most.

    Returns:
        Its bytes, a text with the SHA-256, and the modification time in ns.
    """
    status, digest = path.stat(), hashlib.sha256()
    size, what, last = status.st_size, "sha256", blocks - 1
    places = list(range(0, size, _BLOCK))
    if len(places) > blocks:
        what = f"sha256 of {blocks} blocks"
        places = [
            (size - _BLOCK) * number // last for number in range(blocks)
        ]  # first to last byte
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return size, f"{what}: {digest.hexdigest()}", status.st_mtime_ns
