"""Samples beside those that a model is looked at with first, which are all alike: to see whether
what its code does follows from their values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.dataset import MapDataset, dataset_of
from ptrain.models.objective import SampleBatch, in_dtype_of, of_tokens
from ptrain.spec.spec import Spec


def least_embeddings(module: nn.Module) -> int | None:
    """Return the rows of a model's smallest embedding: tokens below it are in all of them. None
    where it has none."""
    tables = (child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding))
    return min(tables, default=None)


def other_samples(module: nn.Module, spec: Spec, vocabulary: int | None) -> list[SampleBatch]:
    """Return micro-batches of the spec's shapes and dtypes: of the user's own dataset its last
    sample over and over, and some from all over it; else tokens that are drawn below `vocabulary`,
    or, where None says how many logits a token has, below the rows of the smallest embedding. Empty
    where nobody knows which tokens the model takes, and where tensors are fake. Raises SpecError
    for a sample that cannot be read."""
    if detect_fake_mode() is not None:
        return []
    rows, function = spec.batch.micro, spec.data.function
    if function is not None:
        dataset = dataset_of(function)
        return [in_dtype_of(spec, data) for data in _of_dataset(dataset, rows)]
    count = least_embeddings(module) if vocabulary is None else vocabulary
    if count is None or count < 2:
        return []
    generator = torch.Generator().manual_seed(0)
    return [of_tokens(torch.randint(count, (rows, spec.batch.sequence + 1), generator=generator))]


def _of_dataset(dataset: MapDataset, rows: int) -> Iterator[object]:
    last = dataset.read([dataset.size - 1])
    yield tree_map(lambda leaf: leaf.repeat_interleave(rows, dim=0), last)
    yield dataset.read([dataset.size * row // rows for row in range(rows)])
