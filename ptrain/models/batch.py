"""Micro-batches as a model and its loss are given them, and one to look at a model with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map

from ptrain.errors import refused
from ptrain.models.dataset import dataset_of
from ptrain.models.launch import sent_to
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.spec.spec import Spec


class TokenPair(NamedTuple):
    """Tokens and those that follow them, each int64 [batch, sequence]."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A micro-batch: `data` is what a function of the user's is given. Of tokens it is a TokenPair;
    else what the dataset's samples are, collated, with the samples in dimension 0 of each
    tensor."""

    data: Any

    @property
    def inputs(self) -> Any:
        """What a model is called with. Raises SpecError where the data do not say which of them it
        is."""
        match self.data:
            case {"inputs": inputs}:
                return inputs
            case Mapping():
                keys = ", ".join(map(str, self.data))
                finding = f"a sample is a dictionary of {keys}: which of them the model is given "
                finding += "nobody says"
                remedy = (
                    "call one of them inputs, or write step: {target: …}, which calls the model"
                )
                raise refused("data.target", finding, remedy)
            case tuple() | list():
                return self.data[0]
        return self.data

    @property
    def targets(self) -> Tensor:
        """The next tokens, of tokens."""
        assert isinstance(self.data, TokenPair), "of other samples nobody asks for them"
        return self.data.targets

    @property
    def contiguous(self) -> Any:
        """The data that a function of the user's is called with. Inputs and targets of tokens are
        views of one window, and of several samples `Tensor.view` refuses these: they are copied."""
        data = self.data
        return TokenPair(*(x.contiguous() for x in data)) if isinstance(data, TokenPair) else data

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it."""
        return [leaf for leaf in tree_iter(self.data) if isinstance(leaf, Tensor)]

    @property
    def rows(self) -> int:
        """How many samples it has."""
        return len(self.tensors[0])

    def between(self, start: int, end: int) -> SampleBatch:
        """Return some of its samples, as views."""
        return SampleBatch(tree_map(lambda leaf: leaf[start:end], self.data))

    def of(self, rows: list[int]) -> SampleBatch:
        """Return the samples of these rows."""
        return SampleBatch(tree_map(lambda leaf: leaf[rows], self.data))

    def to(self, device: torch.device) -> SampleBatch:
        return SampleBatch(tree_map(lambda leaf: sent_to(device, leaf), self.data))


class StepBatch(Protocol):
    """One data rank's share of a step's global batch, on one device. `global_samples` and
    `global_tokens` count the samples of the whole global batch, and its targets that count: what
    the micro-batches' losses are divided by. `sample_ids` name its samples."""

    @property
    def sample_ids(self) -> tuple[int, ...]: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def global_tokens(self) -> int: ...

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of it, which a step keeps."""
        ...

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Yield it in parts of so many samples: views, nothing is copied."""
        ...

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that the first of its tensors has with so many samples."""
        ...

    def to(self, device: torch.device) -> Self: ...


def of_tokens(tokens: Tensor, labels: Tensor | None = None) -> SampleBatch:
    """Return the samples of tokens [batch, sequence + 1], and of labels like them: views, nothing
    is copied."""
    following = tokens if labels is None else labels
    return SampleBatch(TokenPair(tokens[:, :-1], following[:, 1:]))


def sample_batch(
    spec: Spec, *, rows: int | None = None, device: torch.device | None = None
) -> SampleBatch:
    """Return a micro-batch of the spec's shapes and dtypes, of so many samples (by default as many
    as its micro-batches have): zeros of tokens, else sample 0 over and over. Where fake tensors are
    made it is one. Raises SpecError for data that cannot be read."""
    rows = spec.batch.micro if rows is None else rows
    first = _first(spec)
    if first is None:
        shape = rows, spec.batch.sequence + 1
        return of_tokens(torch.zeros(shape, dtype=torch.int64, device=device))
    of_leaf = _repeated if detect_fake_mode() is None else _zeros
    return SampleBatch(tree_map(lambda leaf: of_leaf(leaf, rows, device), first.data))


def sample_bytes(spec: Spec) -> int | None:
    """Return the bytes of one sample of the user's own dataset; None of tokens."""
    first = _first(spec)
    return None if first is None else sum(leaf.nbytes for leaf in first.tensors)


def in_dtype_of(spec: Spec, data: Any) -> SampleBatch:
    """Return collated samples with their real numbers in the dtype that the spec's model computes
    in."""
    dtype = TORCH_DTYPES[spec.precision.effective.parameters]
    return SampleBatch(
        tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, data)
    )


def _first(spec: Spec) -> SampleBatch | None:
    """Sample 0 of the user's own dataset, as a batch of one; None of tokens."""
    function = spec.data.function
    if function is None:
        return None
    with unset_fake_temporarily():
        return in_dtype_of(spec, dataset_of(function).first)


def _zeros(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=device)


def _repeated(leaf: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return leaf.to(device).repeat_interleave(rows, dim=0)
