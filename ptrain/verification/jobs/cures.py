"""A symptom's cure, tried on the evidence: what is left of a departure once the factor is undone,
the missing sum taken, the missing micro-batches added, over every element of every gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ptrain.verification.factors import combination, multiple
from ptrain.verification.jobs.evidence import OwnGradients, Sample, together
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.symptoms import Contributions, Symptom, SymptomKind
from ptrain.verification.magnitude import Magnitude
from ptrain.verification.parts import norm

_ROUNDINGS = 10  # a cure divides and adds once more: so many tolerances
_LOOSEST = 0.1  # of 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """What undoes `symptom` in the gradients of `names`; all gradients are divided by `scale`
    first. `contributed` is what micro-batches give, where the symptom is told by it; `factors` are
    each rank's own; `words` say what is tried."""

    symptom: Symptom
    names: Collection[str]
    scale: float = 1.0
    contributed: Contributions | None = None
    factors: Mapping[int, float] | None = None
    words: str = ""

    def of(self, name: str, sample: Sample, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield of each rank the gradient that it would have, and what it should have: [elements
        that it holds]."""
        sample = sample.scaled(self.scale)
        for rank in sample.holders():
            has = ~sample.gradients[rank].isnan()
            own = sample.gradients[rank]
            undone = self._undone(sample, rank, ranks) if name in self.names else own
            yield undone[has], sample.truth[has]

    def _undone(self, sample: Sample, rank: int, ranks: Ranks) -> Tensor:
        own, factor = sample.gradients[rank], self.symptom.factor
        match self.symptom.kind:
            case SymptomKind.EVEN:
                return own / factor
            case SymptomKind.EACH:
                return own / (self.factors or {}).get(rank, 1.0)
            case SymptomKind.PARTIAL:
                group = next(its for its in ranks.summed[self.symptom.axis] if rank in its)
                return sample.gradients[list(group)].sum(0) * factor
            case SymptomKind.STALE:  # what it has besides a multiple of the step before is nothing
                return sample.truth + own - factor * sample.before
            case SymptomKind.ADDED:
                return own - factor * sample.before
            case SymptomKind.EMPTY:  # where it has none it is given one device's
                return own if bool(own.nan_to_num().any()) else sample.truth
            case SymptomKind.OWN:  # what it has besides what its micro-batches give is nothing
                _, actual = self._weights(rank)
                rest = 0.0 if actual is None else own - self._mixed(sample, actual)
                return sample.truth + rest
            case SymptomKind.SOME | SymptomKind.LOCAL | SymptomKind.WEIGHTS | SymptomKind.UNEVEN:
                right, actual = self._weights(rank)  # each counts as it does on one device
                return own if actual is None else own + self._mixed(sample, right - actual)
            case _:
                return own

    def _weights(self, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return the weight of each micro-batch in one device's gradient, and in this rank's."""
        contributed = self.contributed
        assert contributed is not None, "told by what micro-batches give"
        actual = contributed.of_loop.get(rank)
        right = torch.tensor(contributed.of_truth.coefficients).double()
        return right, None if actual is None else torch.tensor(actual.coefficients).double()

    def _mixed(self, sample: Sample, weights: Tensor) -> Tensor:
        """Return the sum of what the micro-batches give, with these weights."""
        assert self.contributed is not None, "told by what micro-batches give"
        places = zip(self.contributed.labels, weights.tolist(), strict=True)
        return torch.stack([weight * sample.basis[place] for place, weight in places]).sum(0)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a cure leaves: the largest difference of a gradient (relative), and whether that is
    within what roundings make."""

    left: float
    cures: bool


def tried(cure: Cure, own: OwnGradients, ranks: Ranks, limit: Tolerance) -> Trial:
    """Try a cure on all gradients. All ranks call it."""
    truths = own.truths
    scale = Magnitude.of(truths)
    bound = min(_ROUNDINGS * limit.gradients, max(limit.gradients, _LOOSEST))
    largest, cures = 0.0, True
    for name, whole in truths.items():
        for left, before in _apart(cure, own, name, scale.quiet(whole), ranks):
            largest = max(largest, left)
            helps = left <= before / 2 or before <= limit.gradients
            cures = cures and left <= bound and helps
    return Trial(largest, cures)


def _apart(
    cure: Cure, own: OwnGradients, name: str, quiet: float, ranks: Ranks
) -> Iterator[tuple[float, float]]:
    """Yield of each rank how far a parameter's gradient is from one device's (relative), with the
    cure and as it was; `quiet`: the size of an element that counts as nothing."""
    squares: dict[int, Tensor] = {}
    for sample in own.of_all_ranks(name, ranks):
        rows = zip(sample.holders(), _held(sample), cure.of(name, sample, ranks), strict=True)
        for rank, was, (gradient, truth) in rows:
            sizes = [norm(gradient - truth), norm(was - truth), norm(truth)]
            counted = torch.tensor([*(size**2 for size in sizes), truth.numel()]).double()
            squares[rank] = squares.get(rank, torch.zeros(4).double()) + counted
    for left, before, length, numel in (row.tolist() for row in squares.values()):
        size = max(math.sqrt(length), quiet * math.sqrt(numel))
        yield _relative(math.sqrt(left), size), _relative(math.sqrt(before), size)


def _relative(size: float, length: float) -> float:
    if not math.isfinite(size):
        return math.inf
    return size / length if length else math.inf if size else 0.0


def _held(sample: Sample) -> Iterator[Tensor]:
    for rank in sample.holders():
        yield sample.of(rank)[0]


def own_factors(samples: Collection[Sample]) -> dict[int, float]:
    """Return of each rank what its gradients are a multiple of, all parameters together."""
    factors = {}
    for rank in sorted({rank for sample in samples for rank in sample.holders()}):
        pairs = zip(*(sample.of(rank) for sample in samples), strict=True)
        factors[rank] = multiple(*(torch.cat(side) for side in pairs)).factor
    return factors


def stale_factor(samples: Collection[Sample]) -> tuple[float, float]:
    """Return what the gradients have of this step's and of the step before's."""
    gradient, truth, before = together(samples)
    this, earlier = combination(gradient, [truth, before]).coefficients
    return this, earlier
