"""What every sample contributes to a parameter's gradient. Theorem 3 says that the gradient is the
sum of all, each once; one that is another combination of them tells by its coefficients what went
wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptrain.axes.context.attention import all_spans, context_of
from ptrain.axes.context.tokens import Span
from ptrain.models.batch import SampleBatch, TokenPair
from ptrain.models.loss import IGNORED
from ptrain.spec.spec import Spec
from ptrain.verification.own_tokens import tokens_in
from ptrain.verification.reference import MicroBatch, ReferenceTraining


@dataclass(frozen=True, slots=True)
class Source:
    """Whose gradient: the tokens of a rank of cp (0 where there is one) of a sample of a data
    rank's k-th micro-batch."""

    data_place: int
    k: int
    sample: int
    token_place: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Which ranks have it, along the axes over which gradients are summed."""
        return self.data_place, self.token_place


@dataclass(frozen=True, slots=True)
class Contribution:
    source: Source
    gradients: dict[str, Tensor]


def contributions(
    reference: ReferenceTraining, step: int, names: Sequence[str], scale: float
) -> Iterator[Contribution]:
    """Yield each sample's share of the gradients of these parameters, with the reference's weights
    as they are; where ranks of cp have some of its tokens, that of the losses at these. It costs a
    forward and a backward pass each."""
    parameters = dict(reference.module.named_parameters())
    chosen = [parameters[name] for name in names]
    for micro_batch in reference.micro_batches(step):
        for row, sample in enumerate(micro_batch.sample_ids):
            for place, part in enumerate(_of_each_slice(reference.spec, micro_batch.row(row))):
                loss = part.loss(reference.objective, reference.module) * scale
                grads = torch.autograd.grad(loss, chosen, allow_unused=True)
                gradients = {
                    name: torch.zeros_like(parameters[name])
                    if gradient is None
                    else gradient / scale
                    for name, gradient in zip(names, grads, strict=True)
                }
                source = Source(micro_batch.data_index, micro_batch.k, sample, place)
                yield Contribution(source, gradients)


def slices_of_tokens(spec: Spec) -> tuple[tuple[Span, ...], ...]:
    """Return the tokens of every rank of cp; nothing where there is one."""
    step = context_of(spec)
    return tuple(all_spans(step)) if step else ()


def _of_each_slice(spec: Spec, sample: MicroBatch) -> Iterator[MicroBatch]:
    """Yield it with the losses at one rank's tokens alone, for each rank of cp."""
    slices = slices_of_tokens(spec)
    if not slices:
        yield sample
    for spans in slices:
        inputs, whole = sample.samples.data
        targets, own = torch.full_like(whole, IGNORED), tokens_in(spans)
        targets[:, own] = whole[:, own]
        yield replace(sample, samples=SampleBatch(TokenPair(inputs, targets)))
