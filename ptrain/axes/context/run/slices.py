"""A rank's tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptrain.axes.context.attention import Span
from ptrain.models.objective import SampleBatch, StepBatch, TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedTokens:
    """Of every sample of a data rank's share of a step the tokens that one rank has: `inputs` and
    `targets` are int64 [K · micro, sequence / ranks]. Losses are divided by the targets of the
    whole global batch that count, of all ranks."""

    inputs: Tensor
    targets: Tensor
    global_samples: int
    global_tokens: int
    sample_ids: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.inputs, self.targets]

    def micro_batches(self, micro: int) -> Iterator[SampleBatch]:
        """Views of `micro` samples each."""
        pairs = zip(self.inputs.split(micro), self.targets.split(micro), strict=True)
        yield from (SampleBatch(TokenPair(*pair)) for pair in pairs)

    def shape_for(self, rows: int, sequence: int) -> list[int]:
        """Return the shape that its inputs should have, of a rank's tokens of a sample."""
        return [rows, sequence]

    def to(self, device: torch.device) -> SlicedTokens:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


def sliced(batch: StepBatch, spans: Sequence[Span]) -> SlicedTokens:
    """Return the tokens in these spans of a share of tokens, copied."""
    (whole,) = batch.micro_batches(len(batch.tensors[0]))
    pair = token_slices(whole, spans).data
    return SlicedTokens(
        inputs=pair.inputs,
        targets=pair.targets,
        global_samples=batch.global_samples,
        global_tokens=batch.global_tokens,
        sample_ids=batch.sample_ids,
    )


def token_slices(whole: SampleBatch, spans: Sequence[Span]) -> SampleBatch:
    """Return inputs and targets in these spans of whole samples of tokens, copied."""
    return SampleBatch(TokenPair(taken(whole.inputs, spans), taken(whole.targets, spans)))


def taken(whole: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return what is in these spans of a tensor [samples, tokens, ...], copied."""
    return torch.cat([whole[:, first:behind] for first, behind in spans], dim=1)
