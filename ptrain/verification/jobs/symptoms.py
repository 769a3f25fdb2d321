"""Tell what is wrong with the gradient of one parameter from all ranks' samples of it: a multiple
of the right one, a part of a sum over an axis, some micro-batches only, the step before; and try
the fix on every element of every gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product, starmap

import torch
from torch import Tensor

from ptrain.verification.jobs.evidence import OwnGradients, Sample, together
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.parts import (
    LeastSquares,
    Magnitude,
    absent,
    are_alike,
    combination,
    is_even,
    missing_sum,
    multiple,
    norm,
    root_mean_square,
    rounded,
)


class SymptomKind(StrEnum):
    """In the order in which hypotheses are tried."""

    NOT_FINITE = "not finite"
    EMPTY = "no gradient"
    PARTIAL = "partial"
    STALE = "stale"
    ADDED = "added to the step before"
    LOCAL = "on each rank some ranks' micro-batches"
    SOME = "some micro-batches"
    WEIGHTS = "other weights of micro-batches"
    UNEVEN = "uneven weights of micro-batches"
    EVEN = "a multiple"
    EACH = "a multiple on each rank"
    COARSE = "added up in 16 bits"
    OWN = "the sum of what its micro-batches give by themselves"
    OTHER = "something else"
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Symptom:
    """`factor`: of the multiple; of a partial sum what the ranks' sum must be multiplied by.
    `ranks`: that have no gradient, or whose micro-batches count; `numbers`: which of these."""

    kind: SymptomKind
    axis: str = ""
    factor: float = 1.0
    ranks: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def is_like(self, other: Symptom, tolerance: float) -> bool:
        """Return whether two parameters suffer alike."""
        same = (self.kind, self.axis, self.ranks, self.numbers) == (
            other.kind, other.axis, other.ranks, other.numbers
        )  # fmt: skip
        return same and abs(self.factor - other.factor) <= tolerance * abs(other.factor)


def symptom(sample: Sample, ranks: Ranks, tolerance: float) -> Symptom:
    """Return the simplest symptom that explains the sample."""
    holders = sample.holders()
    pairs = {rank: sample.of(rank) for rank in holders}
    if not pairs:
        return Symptom(SymptomKind.RIGHT)  # no elements
    empty = tuple(rank for rank, (mine, truth) in pairs.items() if truth.any() and not mine.any())
    if empty:
        return Symptom(SymptomKind.EMPTY, ranks=empty)
    if not all(torch.isfinite(mine).all() for mine, _ in pairs.values()):
        return Symptom(SymptomKind.NOT_FINITE)
    even = multiple(*together([sample])[:2])
    if even.holds(tolerance):
        is_one = abs(even.factor - 1) <= tolerance
        return Symptom(SymptomKind.RIGHT if is_one else SymptomKind.EVEN, factor=even.factor)
    alone = {rank: multiple(*pair) for rank, pair in pairs.items()}
    if all(fit.holds(tolerance) or not pairs[r][1].any() for r, fit in alone.items()):
        return Symptom(SymptomKind.EACH)
    for explanation in (
        _partial(sample, ranks, tolerance),
        _earlier(sample, tolerance),
        _some(sample, ranks, tolerance),
    ):
        if explanation is not None:
            return explanation
    return Symptom(SymptomKind.OTHER)


def _partial(sample: Sample, ranks: Ranks, tolerance: float) -> Symptom | None:
    """Over some axis the sum of what its ranks have is right, up to one factor."""
    truths = sample.truth.expand_as(sample.gradients)
    for axis, groups in ranks.summed.items():
        factor = missing_sum(sample.gradients, truths, groups, tolerance)
        if factor is not None:
            return Symptom(SymptomKind.PARTIAL, axis=axis, factor=factor)
    return None


def _earlier(sample: Sample, tolerance: float) -> Symptom | None:
    """The gradient is that of the step before, alone or on top."""
    if not sample.before.any():
        return None
    gradients, truth, before = together([sample])
    alone = multiple(gradients, before)
    if alone.holds(tolerance):
        return Symptom(SymptomKind.STALE, factor=alone.factor)
    both = combination(gradients, [truth, before])
    return (
        Symptom(SymptomKind.ADDED, factor=both.coefficients[1]) if both.holds(tolerance) else None
    )


@dataclass(frozen=True, slots=True)
class Contributions:
    """Micro-batches with a gradient of their own, as (rank, number) [J]: ranks with the same data
    count once. `of_truth`, `of_loop`: what the right gradient and each rank's are as sums of
    them; `own`: which of them each rank computes."""

    labels: tuple[tuple[int, int], ...]
    of_truth: LeastSquares
    of_loop: dict[int, LeastSquares]
    own: dict[int, tuple[int, ...]]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank for rank, _ in self.labels))


def contributions(samples: Sequence[Sample]) -> Contributions | None:
    """Fit several parameters together; return None where micro-batches could not be run again, or
    where there are more of them than sampled elements."""
    basis = torch.cat([sample.basis for sample in samples], dim=2)
    gradients = torch.cat([sample.gradients for sample in samples], dim=1)
    truth = torch.cat([sample.truth for sample in samples])
    if basis.numel() == 0 or bool(basis.isnan().any()):
        return None
    labels: list[tuple[int, int]] = []
    columns: list[Tensor] = []
    own: dict[int, tuple[int, ...]] = {}
    for rank, rows in enumerate(basis):
        for number, row in enumerate(rows):
            if not row.any():
                continue
            place = next((p for p, it in enumerate(columns) if are_alike([row, it], 1e-6)), None)
            if place is None:
                place = len(columns)
                labels.append((rank, number))
                columns.append(row)
            own[rank] = (*own.get(rank, ()), place)
    if not columns or 2 * len(columns) > truth.numel():
        return None
    fits: dict[int, LeastSquares] = {}
    for rank, row in enumerate(gradients):
        has = ~row.isnan()
        if 2 * len(columns) <= int(has.sum()):
            fits[rank] = combination(row[has], [column[has] for column in columns])
    return Contributions(tuple(labels), combination(truth, columns), fits, own)


def _some(sample: Sample, ranks: Ranks, tolerance: float) -> Symptom | None:
    if (contributed := contributions([sample])) is None:
        return None
    return by_micro_batches(contributed, sample.holders(), ranks, tolerance)


def by_micro_batches(
    contributed: Contributions, holders: Sequence[int], ranks: Ranks, tolerance: float
) -> Symptom | None:
    """Every rank's gradient is a sum of micro-batches: some are not among them, the same or another
    rank's, or all are, with the same weight, and one device gives them other ones."""
    if not contributed.of_truth.holds(tolerance) or len(contributed.of_loop) < len(holders):
        return None
    fits = list(contributed.of_loop.values())
    if not all(fit.holds(tolerance) for fit in fits) or absent(contributed.of_truth.coefficients):
        return None
    evenly = is_even(contributed.of_truth.coefficients, 10 * tolerance)
    uneven = [fit for fit in fits if not is_even(fit.coefficients, 10 * tolerance)]
    if evenly and len(uneven) == len(fits) and not any(absent(f.coefficients) for f in fits):
        return Symptom(SymptomKind.UNEVEN)
    if all(is_even(fit.coefficients, 10 * tolerance) for fit in fits):
        differ = not is_even(contributed.of_truth.coefficients, 10 * tolerance)
        return Symptom(SymptomKind.WEIGHTS) if differ else None
    lacking = {rank: absent(fit.coefficients) for rank, fit in contributed.of_loop.items()}
    if axis := _kept_apart(contributed, lacking, ranks):
        return Symptom(SymptomKind.LOCAL, axis=axis)
    if len(set(lacking.values())) != 1 or not (missing := lacking[min(lacking)]):
        return None
    of_ranks = (rank for rank, its in contributed.own.items() if {*its} & {*missing})
    return Symptom(
        SymptomKind.SOME,
        ranks=tuple(sorted(of_ranks)),
        numbers=tuple(sorted({contributed.labels[index][1] for index in missing})),
    )


def _kept_apart(
    contributed: Contributions, lacking: Mapping[int, tuple[int, ...]], ranks: Ranks
) -> str:
    """Return the axis that nothing was summed over: each rank's gradient, where it is no whole sum,
    has the micro-batches of the ranks at its own place along it alone."""
    for axis, groups in ranks.summed.items():
        places = {rank: place for group in groups for place, rank in enumerate(group)}
        own: dict[int, set[int]] = {}
        for rank, numbers in contributed.own.items():
            own.setdefault(places[rank], set()).update(numbers)
        every = set(range(len(contributed.labels)))
        if all(its == every for its in own.values()):
            continue
        if all(every - set(its) in (every, own[places[rank]]) for rank, its in lacking.items()):
            return axis if any(lacking.values()) else ""
    return ""


def common_factor(samples: Sequence[Sample], tolerance: float) -> float:
    """Return what most parameters are multiplied by, where the others differ in another way: a clip
    by a norm to which the others contributed. It is 1 where there is no such thing."""
    fits = [multiple(*together([sample])[:2]) for sample in samples if sample.holders()]
    even = sorted(fit.factor for fit in fits if fit.holds(tolerance))
    if 2 * len(even) <= len(fits) or len(even) == len(fits):
        return 1.0
    middle = even[len(even) // 2]
    alike = all(abs(factor / middle - 1) <= tolerance for factor in even)
    return middle if alike and math.isfinite(middle) and middle > 0 else 1.0


_ROUNDINGS = 10  # a fix divides and adds once more: so many tolerances
_LOOSEST = 0.1  # of 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What undoes `symptom` in the gradients of `names`; all gradients are divided by `scale`
    first. `contributed` is what micro-batches give, where the symptom is told by it; `factors` are
    each rank's own; `words` say what is tried."""

    symptom: Symptom
    names: Collection[str]
    scale: float = 1.0
    contributed: Contributions | None = None
    factors: Mapping[int, float] | None = None
    words: str = ""

    def of(self, name: str, sample: Sample, rank: int, ranks: Ranks) -> Tensor:
        """Return the gradient that a rank would have; NaN where it holds nothing."""
        sample = sample.scaled(self.scale)
        return self._undone(sample, rank, ranks) if name in self.names else sample.gradients[rank]

    def loss_factor(self, rank: int, losses: Sequence[float]) -> float | None:
        """Return what a rank's loss would be multiplied by, if what is undone is in the loss; None
        where one cannot tell. `losses`: of its micro-batches."""
        own = list(self.contributed.own.get(rank, ())) if self.contributed else []
        match self.symptom.kind:
            case SymptomKind.EVEN:
                return 1 / self.symptom.factor
            case SymptomKind.WEIGHTS if len(own) == len(losses) and any(losses):
                right, actual = self._weights(rank)
                if actual is None:
                    return None
                rows = torch.tensor(losses).double()
                return float((right / actual)[own] @ rows / rows.sum())
            case _:
                return None

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
            case SymptomKind.COARSE:
                return (sample.basis.sum((0, 1)) / factor).masked_fill(own.isnan(), math.nan)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FixTrial:
    """What a fix leaves: the largest difference of a gradient (relative), whether that is within
    what roundings make, and the whole gradients that this gives, a row each."""

    left: float
    fixes: bool
    gradients: Mapping[str, Tensor]


def tried(fix: Fix, own: OwnGradients, ranks: Ranks, limit: Tolerance) -> FixTrial:
    """Try a fix on all gradients. All ranks call it."""
    truths = own.truths
    scale = Magnitude.of(truths)
    bound = min(_ROUNDINGS * limit.gradients, max(limit.gradients, _LOOSEST))
    largest, fixes, rows = 0.0, True, dict[str, Tensor]()
    for name, whole in truths.items():
        squares: dict[int, Tensor] = {}
        pieces = []
        for sample in own.of_all_ranks(name, ranks):
            piece = sample.truth.clone()
            for rank in sorted(sample.holders(), key=lambda its: its == ranks.rank):
                has = ~sample.gradients[rank].isnan()
                undone, was, truth = (
                    row[has] for row in (fix.of(name, sample, rank, ranks),
                                         sample.gradients[rank], sample.truth)
                )  # fmt: skip
                sizes = [norm(undone - truth), norm(was - truth), norm(truth)]
                counted = torch.tensor([*(size**2 for size in sizes), truth.numel()]).double()
                squares[rank] = squares.get(rank, torch.zeros(4).double()) + counted
                piece[has] = undone
            pieces.append(piece)
        rows[name] = torch.cat(pieces)
        for left, before, length, numel in (row.tolist() for row in squares.values()):
            size = max(math.sqrt(length), scale.quiet(whole) * math.sqrt(numel))
            after, was = (_relative(math.sqrt(its), size) for its in (left, before))
            largest = max(largest, after)
            helps = after <= was / 2 or was <= limit.gradients
            fixes = fixes and after <= bound and helps
    return FixTrial(left=largest, fixes=fixes, gradients=rows)


def _relative(size: float, length: float) -> float:
    if not math.isfinite(size):
        return math.inf
    return size / length if length else math.inf if size else 0.0


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


@dataclass(frozen=True, slots=True)
class CoarseSum:
    """How micro-batches are added: the dtype of the sum; ranks are averaged before it, or their
    sums after; an addend is rounded first, or only the sum; what all are divided by."""

    dtype: torch.dtype
    ranks_first: bool
    addends_first: bool
    divisor: int

    def exactly(self, sample: Sample) -> Tensor:
        """Return the gradient [S] without roundings."""
        return sample.basis.sum((0, 1)) / self.divisor

    def of(self, sample: Sample) -> Tensor:
        """Return the gradient [S] as this sum rounds it."""
        addends = sample.basis / self.divisor
        rows = addends.sum(0)[None] if self.ranks_first else addends
        total = torch.zeros_like(rows[:, 0])
        for addend in rows.unbind(1):
            addend = rounded(addend, self.dtype) if self.addends_first else addend
            total = rounded(total + addend, self.dtype)
        return total.sum(0)


_COARSE = (torch.bfloat16, torch.float16)
_SHARE = 0.1  # of what differs, that roundings may leave
_QUIET = 1e-3  # of the root mean square of all gradients


def coarse_sums(samples: Collection[Sample], tolerance: float) -> Iterator[tuple[CoarseSum, float]]:
    """Yield the sums of rounded micro-batches that every optimizer takes, and that are the
    reference's without roundings; and how near they are."""
    if any(not its.basis.numel() or bool(its.basis.isnan().any()) for its in samples):
        return
    usual = root_mean_square([its.truth for its in samples])

    def worst(row_of: Callable[[Sample], Tensor], *, of_truth: bool = False) -> float:
        sizes = []
        for sample in samples:
            row = row_of(sample)
            for rank in sample.holders():
                has, right = ~sample.gradients[rank].isnan(), sample.of(rank)[of_truth]
                length = max(norm(right), _QUIET * usual * math.sqrt(right.numel()))
                sizes.append(_relative(norm(row[has] - right), length))
        return max(sizes, default=math.inf)

    bound = min(_ROUNDINGS * tolerance, _SHARE * worst(lambda sample: sample.truth))
    size, count = next(iter(samples)).basis.shape[:2]
    divisors = dict.fromkeys((size, 1, count, size * count))
    for way in starmap(CoarseSum, product(_COARSE, (True, False), (True, False), divisors)):
        left = worst(way.of)
        if left <= bound and worst(way.exactly, of_truth=True) <= bound:
            yield way, left
