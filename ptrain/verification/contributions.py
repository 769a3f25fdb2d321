"""What every sample contributes to a parameter's gradient. Theorem 3 says that the gradient is the
sum of all, each once; one that is another combination of them tells by its coefficients what went
wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ptrain.verification.reference import MicroBatch, ReferenceTraining


@dataclass(frozen=True, slots=True)
class Source:
    """Whose gradient: a sample of a data rank's k-th micro-batch."""

    data_place: int
    k: int
    sample: int


@dataclass(frozen=True, slots=True)
class Contribution:
    source: Source
    gradients: dict[str, Tensor]


def contributions(
    reference: ReferenceTraining, step: int, names: Sequence[str], scale: float
) -> Iterator[Contribution]:
    """Yield each sample's share of the gradients of these parameters, with the reference's weights
    as they are. It costs a forward and a backward pass per sample."""
    parameters = dict(reference.module.named_parameters())
    chosen = [parameters[name] for name in names]
    for micro_batch in reference.micro_batches(step):
        for row, sample in enumerate(micro_batch.sample_ids):
            loss = _loss(reference, micro_batch, row) * scale
            grads = torch.autograd.grad(loss, chosen, allow_unused=True)
            gradients = {
                name: torch.zeros_like(parameters[name]) if gradient is None else gradient / scale
                for name, gradient in zip(names, grads, strict=True)
            }
            yield Contribution(Source(micro_batch.data_index, micro_batch.k, sample), gradients)


def _loss(reference: ReferenceTraining, micro_batch: MicroBatch, row: int) -> Tensor:
    return micro_batch.row(row).loss(reference.objective, reference.module)
