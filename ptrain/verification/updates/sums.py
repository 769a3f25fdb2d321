"""Gradients that are added up in a coarser dtype: the ranks' micro-batches, which were run again
one by one, are added with its roundings and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ptrain.report.finding import Certainty, Culprit, Subject
from ptrain.verification.jobs.evidence import JobEvidence, Sample
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.parts import named, rounded, square

_COARSE = (torch.bfloat16, torch.float16)
_LOOSE = 10.0  # tolerances of a gradient
_SHARE = 0.1  # of what departs, that roundings may leave
_QUIET = 1e-3  # of the root mean square of all gradients


@dataclass(frozen=True, slots=True)
class CoarseSum:
    """How micro-batches are added: the dtype of the sum; ranks are averaged before it, or their
    sums after; an addend is rounded first, or only the sum; what all are divided by."""

    dtype: torch.dtype
    ranks_first: bool
    addends_first: bool
    divisor: int

    def of(self, basis: Tensor) -> Tensor:
        """[ranks, micro-batches, S] to [S], as this sum rounds it."""
        addends = basis / self.divisor
        if self.ranks_first:
            return self._summed(addends.sum(0))
        return torch.stack([self._summed(own) for own in addends]).sum(0)

    def _summed(self, addends: Tensor) -> Tensor:
        total = torch.zeros_like(addends[0])
        for addend in addends:
            addend = rounded(addend, self.dtype) if self.addends_first else addend
            total = rounded(total + addend, self.dtype)
        return total


def coarse_sum(
    unclear: Culprit, evidence: JobEvidence, ranks: Ranks, tolerance: float
) -> Culprit | None:
    """Return the culprit where a sum of rounded micro-batches is what every optimizer takes, and
    without roundings it is one device's, over all elements of all gradients; None where it is not.
    What the samples tell is looked for first. All ranks call it."""
    samples = evidence.samples
    known = {n: [s] for n, s in samples.items() if s.basis.numel() and not s.basis.isnan().any()}
    if not known or len(known) < len(samples):
        return None
    departure = _worst(known, _departing)
    right, count = (
        min(_LOOSE * tolerance, _SHARE * departure),
        next(iter(samples.values())).basis.shape[1],
    )
    for way in _ways(samples):
        pairs = partial(_exactly, way), partial(_rounded, way)
        if not all(_worst(known, pairs_of) <= right for pairs_of in pairs):
            continue
        exact, left = (
            _worst({n: evidence.own.of_all_ranks(n, ranks) for n in known}, pairs_of)
            for pairs_of in pairs
        )
        if max(exact, left) <= right:
            name = named(way.dtype)
            what = f"accumulated in {name}" if count > 1 else f"rounded to {name}"
            return replace(
                unclear,
                state=Subject.GRADIENTS,
                axis="",
                factor=what,
                sentence=f"The gradients of {count} micro-batch{'es' * (count > 1)} are {what}: "
                "add them up, and reduce them, in a dtype as fine as one device's.",
                certainty=Certainty.PROVEN,
                tried=f"the micro-batches' own gradients, {what}, are what the optimizers take, to "
                f"{left:.2g}; without roundings they are one device's, to {exact:.2g}",
            )
    return None


def _ways(samples: Mapping[str, Sample]) -> Iterator[CoarseSum]:
    size, count = next(iter(samples.values())).basis.shape[:2]
    divisors = dict.fromkeys((size, 1, count, size * count))
    for dtype, ranks_first, addends_first, divisor in product(
        _COARSE, (True, False), (True, False), divisors
    ):
        yield CoarseSum(dtype, ranks_first, addends_first, divisor)


Pairs = dict[int, tuple[Tensor, Tensor]]  # by rank


def _exactly(way: CoarseSum, sample: Sample) -> Pairs:
    return {0: (sample.basis.sum((0, 1)) / way.divisor, sample.truth)}


def _departing(sample: Sample) -> Pairs:
    return {rank: sample.of(rank) for rank in sample.holders()}


def _rounded(way: CoarseSum, sample: Sample) -> Pairs:
    row = way.of(sample.basis)
    has = {rank: ~sample.gradients[rank].isnan() for rank in sample.holders()}
    return {rank: (row[mask], sample.gradients[rank][mask]) for rank, mask in has.items()}


def _worst(samples: Mapping[str, Iterable[Sample]], pairs_of: Callable[[Sample], Pairs]) -> float:
    """Return the largest distance of a parameter's pair, relative to its second; of a gradient
    that is nothing beside the others', to theirs. Of a parameter its elements may come in several
    samples."""
    squares: dict[tuple[str, int], Tensor] = {}
    truths = torch.zeros(2).double()
    for name, pieces in samples.items():
        for sample in pieces:
            truths += torch.tensor([square(sample.truth), sample.truth.numel()]).double()
            for rank, (row, actual) in pairs_of(sample).items():
                sizes = [square(row - actual), square(actual), actual.numel()]
                known = squares.get((name, rank), torch.zeros(3).double())
                squares[name, rank] = known + torch.tensor(sizes).double()
    usual = float(truths[0] / truths[1].clamp(min=1))
    lengths = (torch.stack([row[1], _QUIET**2 * usual * row[2]]).max() for row in squares.values())
    return max(
        math.sqrt(float(row[0]) / (float(length) or 1.0))
        for row, length in zip(squares.values(), lengths, strict=True)
    )
