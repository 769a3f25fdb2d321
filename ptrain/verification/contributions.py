"""What every sample contributes to a parameter's gradient. Theorem 3 says that the gradient is the
sum of all, each once; one that is another combination of them tells by its coefficients what went
wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptrain.axes.context.attention import Span, all_spans, context_of
from ptrain.models.loss import IGNORED
from ptrain.models.objective import SampleBatch, StepBatch, TokenPair
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
    for micro_batch in reference.micro_batches(step):
        for row, sample in enumerate(micro_batch.sample_ids):
            for place, part in enumerate(_of_each_slice(reference.spec, micro_batch.row(row))):
                source = Source(micro_batch.data_index, micro_batch.k, sample, place)
                yield Contribution(source, _gradients(reference, part, names, scale))


def of_micro_batches(
    reference: ReferenceTraining, step: int, scale: float, place: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield what each micro-batch of a data rank gives to the gradients of all parameters; where
    ranks of cp have some of the tokens, the losses at those of one. `place` is a source's."""
    for micro_batch in reference.micro_batches_of(place[0], step):
        part = list(_of_each_slice(reference.spec, micro_batch))[place[1]]
        yield _of_all_parameters(reference, part, scale)


def of_given(
    reference: ReferenceTraining, given: StepBatch, scale: float, place: int
) -> Iterator[dict[str, Tensor]]:
    """Yield what each micro-batch that a rank was given makes of the gradients of all parameters,
    on one device."""
    for k, samples in enumerate(given.micro_batches(reference.spec.batch.micro)):
        part = MicroBatch(data_index=place, k=k, samples=samples, batch=given, sample_ids=())
        yield _of_all_parameters(reference, part, scale)


def _of_all_parameters(
    reference: ReferenceTraining, part: MicroBatch, scale: float
) -> dict[str, Tensor]:
    names = [n for n, tensor in reference.module.named_parameters() if tensor.requires_grad]
    return _gradients(reference, part, names, scale)


def _gradients(
    reference: ReferenceTraining, part: MicroBatch, names: Sequence[str], scale: float
) -> dict[str, Tensor]:
    parameters = dict(reference.module.named_parameters())
    loss = part.loss(reference.objective, reference.module) * scale
    rows = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return {
        name: torch.zeros_like(parameters[name]) if row is None else row / scale
        for name, row in zip(names, rows, strict=True)
    }


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
