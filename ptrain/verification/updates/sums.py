"""Gradients that are added up in a coarser dtype: the ranks' micro-batches, which were run again
one by one, are added with its roundings and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ptrain.report.finding import Certainty, Culprit, Subject
from ptrain.verification.jobs.evidence import Sample

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
            total = self._rounded(total + (self._rounded(addend) if self.addends_first else addend))
        return total

    def _rounded(self, row: Tensor) -> Tensor:
        return row.to(self.dtype).to(row.dtype)


def coarse_sum(unclear: Culprit, samples: Mapping[str, Sample], tolerance: float) -> Culprit | None:
    """Return the culprit where a sum of rounded micro-batches is what every optimizer takes, and
    without roundings it is one device's; None where it is not. `samples` are all ranks' alike."""
    known = {n: s for n, s in samples.items() if s.basis.numel() and not s.basis.isnan().any()}
    if not known or len(known) < len(samples):
        return None
    departure = _worst(known, _departing)
    right, count = (
        min(_LOOSE * tolerance, _SHARE * departure),
        next(iter(known.values())).basis.shape[1],
    )
    for way in _ways(known):
        exact = _worst(known, partial(_exactly, way))
        if exact > right:
            continue
        rounded = _worst(known, partial(_rounded, way))
        if rounded <= right:
            name = str(way.dtype).removeprefix("torch.")
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
                f"{rounded:.2g}; without roundings they are one device's, to {exact:.2g}",
            )
    return None


def _ways(samples: Mapping[str, Sample]) -> Iterator[CoarseSum]:
    size, count = next(iter(samples.values())).basis.shape[:2]
    divisors = dict.fromkeys((size, 1, count, size * count))
    for dtype, ranks_first, addends_first, divisor in product(
        _COARSE, (True, False), (True, False), divisors
    ):
        yield CoarseSum(dtype, ranks_first, addends_first, divisor)


def _exactly(way: CoarseSum, sample: Sample) -> list[tuple[Tensor, Tensor]]:
    return [(sample.basis.sum((0, 1)) / way.divisor, sample.truth)]


def _departing(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    return [sample.of(rank) for rank in sample.holders()]


def _rounded(way: CoarseSum, sample: Sample) -> list[tuple[Tensor, Tensor]]:
    row = way.of(sample.basis)
    has = [(~gradient.isnan(), gradient) for gradient in sample.gradients]
    return [(row[mask], gradient[mask]) for mask, gradient in has if bool(mask.any())]


def _worst(
    samples: Mapping[str, Sample], pairs_of: Callable[[Sample], list[tuple[Tensor, Tensor]]]
) -> float:
    """Return the largest distance of a parameter's pair, relative to its second; of a gradient
    that is nothing beside the others', to theirs."""
    usual = math.sqrt(
        sum(float(sample.truth.square().sum()) for sample in samples.values())
        / sum(sample.truth.numel() for sample in samples.values())
    )
    worst = 0.0
    for sample in samples.values():
        for row, actual in pairs_of(sample):
            least = _QUIET * usual * math.sqrt(actual.numel())
            length = max(float(torch.linalg.vector_norm(actual)), least)
            worst = max(worst, float(torch.linalg.vector_norm(row - actual)) / (length or 1.0))
    return worst
