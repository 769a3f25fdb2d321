"""Which samples a rank has, and which of their tokens where cp gives it a slice; found from the
spec alone, so that a program that takes others is told.

The sample ledger lists which samples of a global batch the mesh saw, by the tokens that the model
was given: none may be missing and none doubled (Theorem 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low, multimode
from typing import TypeVar

import torch

from ptrain.axes.context.attention import Span, context_of, spans_at
from ptrain.facts.parameters import OF_TOKENS
from ptrain.models.objective import SampleBatch, StepBatch
from ptrain.report.finding import Mismatch, Moment, Subject
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import SAMPLE_AXES, TOKEN_AXES
from ptrain.spec.spec import Spec, coordinates
from ptrain.train.exchange import Exchange
from ptrain.verification.reference import ReferenceTraining


def data_place(spec: Spec, rank: int) -> int:
    """Return which share of every global batch is this rank's."""
    where, place = coordinates(spec, rank), 0
    for axis in SAMPLE_AXES:
        if axis in where:
            place = place * spec.degree(axis) + where[axis]
    return place


def token_place(spec: Spec, rank: int) -> int:
    """Return which slice of the tokens of its samples is this rank's; 0 where it has all."""
    where = coordinates(spec, rank)
    return next((where[axis] for axis in TOKEN_AXES if axis in where), 0)


_OF_HEADS = 4  # dimensions of a tensor that has heads in front of the tokens


def own_spans(spec: Spec, rank: int) -> tuple[Span, ...]:
    """Return the tokens of a rank, in its order; none where it has all of a sample's."""
    step = context_of(spec)
    return spans_at(step, coordinates(spec, rank)[step.axis]) if step else ()


def tokens_in(spans: Sequence[Span]) -> torch.Tensor:
    """Return their numbers in the whole sequence, int64."""
    return torch.cat([torch.arange(*span) for span in spans])


class TokensOfRank:
    """Takes a rank's tokens of whole tensors, or those in other `spans`."""

    def __init__(self, spec: Spec, rank: int, spans: Sequence[Span] | None = None) -> None:
        self._spans = own_spans(spec, rank) if spans is None else spans
        self._sequence = spec.batch.sequence
        self._is_built_in = isinstance(spec.model, ModelShape)

    def of_output(self, whole: torch.Tensor) -> torch.Tensor:
        """Of what a module gives, [samples, tokens, ...], or heads in front of the tokens; of
        tokens, [samples, tokens]. All else is as it was."""
        dims = (2, 1) if whole.dim() == _OF_HEADS else (1,)
        sizes = dict(zip(range(whole.dim()), whole.shape, strict=True))
        dim = next((dim for dim in dims if sizes.get(dim) == self._sequence), None)
        return whole if dim is None else self._taken(whole, dim)

    def of_buffer(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Of a built-in model's table with a row for each token."""
        is_cut = self._is_built_in and name.endswith(OF_TOKENS)
        return self._taken(whole, 0) if is_cut else whole

    def _taken(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        if not self._spans:
            return whole
        parts = [whole.narrow(dim, first, behind - first) for first, behind in self._spans]
        return torch.cat(parts, dim)


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of the reference's inputs, from 0, that came less often than the batch has them on all
    ranks together, and that came more often than the others."""

    missing: tuple[int, ...]
    doubled: tuple[int, ...]
    count: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.doubled)


def ledger_of(reference: Sequence[T], everyones: Sequence[Sequence[T]]) -> Samples | None:
    """Ranks that share a batch all see it, so what counts is that no row comes more often than
    another, relative to how often the batch has it. None if the rows cannot be compared."""
    expected = Counter(reference)
    seen = Counter(row for rows in everyones for row in rows)
    known = {row: seen[row] / times for row, times in expected.items() if seen[row]}
    if not known or set(seen) - set(expected):
        return None
    usual = median_low(multimode(known.values()))
    return Samples(
        missing=tuple(i for i, row in enumerate(reference) if seen[row] < expected[row]),
        doubled=tuple(i for i, row in enumerate(reference) if known.get(row, 0) > usual),
        count=len(reference),
    )


UNKNOWN = -1


def sample_mismatches(
    given: StepBatch, reference: ReferenceTraining, step: int, rank: int, exchange: Exchange
) -> Iterator[Mismatch]:
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
    given_tokens = TokensOfRank(spec, rank, ())
    seen = [names.get(_key(row, given_tokens), UNKNOWN) for row in given.micro_batches(1)]
    everyone: list[list[int]] = exchange.gather(seen)
    own = [names[key] for _, key in expected[data_place(spec, rank)]]
    if seen == own:
        return
    once: dict[int, list[int]] = {}  # of ranks that share samples, one that knows all of its own
    for other, its in enumerate(everyone):
        place = data_place(spec, other)
        once[place] = its if UNKNOWN in once.get(place, [UNKNOWN]) else once[place]
    wanted = [names[key] for ids in expected.values() for _, key in ids]
    known = [[sample for sample in its if sample != UNKNOWN] for its in once.values()]
    ledger = ledger_of(wanted, known)
    if ledger is None:  # no sample of the batch was seen
        ledger = Samples(tuple(range(len(wanted))), (), len(wanted))
    is_order = not ledger and UNKNOWN not in seen
    descriptions = [
        _listed("missing", [*dict.fromkeys(wanted[row] for row in ledger.missing)]),
        _listed("seen twice", [*dict.fromkeys(wanted[row] for row in ledger.doubled)]),
        _listed("in another order or place", own if is_order else []),
        f"{what} of no sample of this step" if UNKNOWN in seen else "",
    ]
    yield Mismatch(
        step=step,
        moment=Moment.BATCH,
        subject=Subject.BATCH,
        name=what,
        rank=rank,
        told="; ".join(filter(None, descriptions)) or "samples of another rank",
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


def _key(sample: SampleBatch, own: TokensOfRank) -> bytes:
    """Return what the model is given of a sample, at a rank's own tokens; what the loss asks of it
    the loss tells."""
    tensor = own.of_output(sample.tensors[0])
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _listed(what: str, samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:4])) + (" …" if len(samples) > 4 else "")
    return f"sample{'s' * (len(samples) != 1)} {shown} {what}" if samples else ""
