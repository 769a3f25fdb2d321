"""The sample ledger: which samples of a global batch the mesh saw, by the tokens that the model was
given, none missing and none doubled (Theorem 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ptrain.axes.context.attention import Span, all_spans, context_of
from ptrain.axes.context.draw import spans_text
from ptrain.models.objective import SampleBatch, StepBatch
from ptrain.report.finding import Departure, Moment, Subject
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.places import TokensOfRank, data_place, own_spans
from ptrain.verification.reference import ReferenceTraining

UNKNOWN = -1
OF_ITS_SAMPLES = "of its samples"  # what a rank of cp has, if tokens that are another's


def sample_departures(
    given: StepBatch, reference: ReferenceTraining, step: int, rank: int, exchange: Exchange
) -> Iterator[Departure]:
    """Compare the samples of this rank with those it should have; `given` is what its model ran on.
    All ranks call it."""
    spec = reference.spec
    what = "tokens" if spec.data.function is None else "samples"
    own_tokens = TokensOfRank(spec, rank)
    expected = _expected(reference, step, own_tokens)
    names: dict[bytes, int] = {}  # tokens are one sample, however often the batch has them
    for ids in expected.values():
        for sample, key in ids:
            names.setdefault(key, sample)
    seen = [names.get(_key(row), UNKNOWN) for row in given.micro_batches(1)]
    everyone: list[list[int]] = exchange.gather(seen)
    own = [names[key] for _, key in expected[data_place(spec, rank)]]
    if seen == own:
        return
    samples = _own_samples(reference, step, rank)
    elsewhere = other_tokens(given, samples, spec, rank) if UNKNOWN in seen else ""
    if not elsewhere and _are_at(spec, own_spans(spec, rank), _sides(given, samples, 0)):
        return  # targets alone are others, which the loss tells
    once: dict[int, list[int]] = {}  # of ranks that share samples, one that knows all of its own
    for other, its in enumerate(everyone):
        place = data_place(spec, other)
        once[place] = its if UNKNOWN in once.get(place, [UNKNOWN]) else once[place]
    counts = Counter(sample for its in once.values() for sample in its if sample != UNKNOWN)
    wanted = Counter(names[key] for ids in expected.values() for _, key in ids)
    is_order = counts == wanted and UNKNOWN not in seen
    descriptions = [
        _listed("missing", list(wanted - counts)),
        _listed("seen twice", list(counts - wanted)),
        _listed("in another order or place", own if is_order else []),
        f"{what} of no sample of this step" if UNKNOWN in seen else "",
    ]
    yield Departure(
        step=step,
        moment=Moment.BATCH,
        subject=Subject.BATCH,
        name=what,
        rank=rank,
        told=elsewhere or "; ".join(filter(None, descriptions)) or "samples of another rank",
    )


def _expected(
    reference: ReferenceTraining, step: int, own: TokensOfRank
) -> dict[int, list[tuple[int, bytes]]]:
    """Return by data rank its samples, and of their tokens this rank's own."""
    samples: dict[int, list[tuple[int, bytes]]] = {}
    for micro_batch in reference.micro_batches(step):
        samples.setdefault(micro_batch.data_index, []).extend(
            (sample, _key(micro_batch.row(row).samples, own))
            for row, sample in enumerate(micro_batch.sample_ids)
        )
    return samples


def other_tokens(given: StepBatch, wanted: Sequence[SampleBatch], spec: Spec, rank: int) -> str:
    """Return which tokens of its samples a rank of cp has in the place of its own, in words; ""
    where they are not another rank's, nor those that other slices would give one."""
    context = context_of(spec)
    if context is None:
        return ""
    otherwise = replace(context, is_balanced=not context.is_balanced)
    is_even = spec.batch.sequence % (2 * spec.degree(context.axis)) == 0
    own = own_spans(spec, rank)
    candidates = [own, *all_spans(context), *(all_spans(otherwise) if is_even else ())]
    matches = [
        next((spans for spans in candidates if _are_at(spec, spans, pairs)), None)
        for pairs in (_sides(given, wanted, side) for side in range(2))
    ]
    if None in matches:
        return ""
    inputs, targets = (spans_text(spans) for spans in matches if spans is not None)
    if inputs == targets:
        return f"tokens {inputs} {OF_ITS_SAMPLES} for {spans_text(own)}"
    return f"targets {targets} {OF_ITS_SAMPLES} for inputs {inputs}"


def _own_samples(reference: ReferenceTraining, step: int, rank: int) -> list[SampleBatch]:
    """Return the samples that a rank should have, whole, each by itself."""
    return [
        micro_batch.row(row).samples
        for micro_batch in reference.micro_batches_of(data_place(reference.spec, rank), step)
        for row in range(len(micro_batch.sample_ids))
    ]


def _sides(
    given: StepBatch, wanted: Sequence[SampleBatch], side: int
) -> list[tuple[Tensor, Tensor]]:
    """Return one tensor of each sample that a rank has (0: what its model is given), beside that of
    the sample which it should be; nothing where these are not as many."""
    rows = list(given.micro_batches(1))
    if len(rows) != len(wanted):
        return []
    return [
        (row.tensors[side], sample.tensors[side]) for row, sample in zip(rows, wanted, strict=True)
    ]


def _are_at(spec: Spec, spans: Sequence[Span], pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether there are tensors, and each has the tokens of a whole sample in `spans`."""
    tokens = TokensOfRank(spec, 0, spans)
    return bool(pairs) and all(
        torch.equal(own.cpu(), tokens.of_output(whole)) for own, whole in pairs
    )


def _key(sample: SampleBatch, own: TokensOfRank | None = None) -> bytes:
    """What a sample consists of, and nothing of what it is called."""
    tensors = map(own.of_output, sample.tensors) if own else sample.tensors
    return b"".join(map(_bytes, tensors))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _listed(what: str, samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:4])) + (" …" if len(samples) > 4 else "")
    return f"sample{'s' * (len(samples) != 1)} {shown} {what}" if samples else ""
