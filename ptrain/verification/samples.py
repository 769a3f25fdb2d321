"""The sample ledger: which samples of a global batch the mesh saw, by the tokens that the model was
given, none missing and none doubled (Theorem 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from ptrain.models.batch import SampleBatch, StepBatch
from ptrain.report.finding import Departure, Moment, Subject
from ptrain.train.exchange import Exchange
from ptrain.verification.own_tokens import TokensOfRank
from ptrain.verification.places import data_place
from ptrain.verification.reference import ReferenceTraining

UNKNOWN = -1


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
    once = {data_place(spec, other): its for other, its in enumerate(everyone)}
    counts = Counter(sample for its in once.values() for sample in its if sample != UNKNOWN)
    wanted = Counter(names[key] for ids in expected.values() for _, key in ids)
    descriptions = [
        _listed("missing", list(wanted - counts)),
        _listed("seen twice", list(counts - wanted)),
        _listed("in another order or place", own if counts == wanted else []),
        f"{what} of no sample of this step" if UNKNOWN in seen else "",
    ]
    yield Departure(
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


def _key(sample: SampleBatch, own: TokensOfRank | None = None) -> bytes:
    """What a sample consists of, and nothing of what it is called."""
    tensors = map(own.of_output, sample.tensors) if own else sample.tensors
    return b"".join(map(_bytes, tensors))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _listed(what: str, samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:4])) + (" …" if len(samples) > 4 else "")
    return f"sample{'s' * (len(samples) != 1)} {shown} {what}" if samples else ""
