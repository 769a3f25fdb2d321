"""Try what would undo a difference of gradients on every element of all parameters, and sums of
rounded micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ptrain.report.finding import Certainty, RootCause, Subject
from ptrain.verification.jobs.evidence import JobEvidence, OwnGradients, Sample
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.parts import Magnitude, named, norm, root_mean_square, rounded

_ROUNDINGS = 10  # a fix divides and adds once more: so many tolerances
_LOOSEST = 0.1  # of 16 bits

LossFactor = Callable[[int, Sequence[float]], float | None]


def unknown_factor(rank: int, losses: Sequence[float]) -> None:
    """Return that one cannot tell what is undone in a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What undoes a hypothesis: of the parameters `names` a rank would have the gradient that
    `undone` makes of a sample; all gradients are divided by `scale` first. `words` say what is
    tried. `loss_factor` returns what a rank's loss would be multiplied by, if what is undone is in
    the loss, given the losses of its micro-batches; None where one cannot tell."""

    names: Collection[str]
    undone: Callable[[Sample, int], Tensor]
    words: str
    scale: float = 1.0
    loss_factor: LossFactor = unknown_factor

    def of(self, name: str, sample: Sample, rank: int) -> Tensor:
        """Return the gradient that a rank would have; NaN where it holds nothing."""
        sample = sample.scaled(self.scale)
        return self.undone(sample, rank) if name in self.names else sample.gradients[rank]


# Returns in words what still differs with these gradients, "" where nothing does.
After = Callable[[Mapping[str, Tensor], Fix], str]


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
                undone, (was, truth) = fix.of(name, sample, rank)[has], sample.of(rank)
                sizes = [norm(undone - truth), norm(was - truth), norm(truth)]
                counted = torch.tensor([*(size**2 for size in sizes), truth.numel()]).double()
                squares[rank] = squares.get(rank, torch.zeros(4).double()) + counted
                piece[has] = undone
            pieces.append(piece)
        rows[name] = torch.cat(pieces)
        for left, before, length, numel in (row.tolist() for row in squares.values()):
            size = max(math.sqrt(length), scale.quiet(whole) * math.sqrt(numel))
            after, was_off = (_relative(math.sqrt(its), size) for its in (left, before))
            largest = max(largest, after)
            helps = after <= was_off / 2 or was_off <= limit.gradients
            fixes = fixes and after <= bound and helps
    return FixTrial(left=largest, fixes=fixes, gradients=rows)


def _relative(size: float, length: float) -> float:
    if not math.isfinite(size):
        return math.inf
    return size / length if length else math.inf if size else 0.0


def with_trial(
    said: RootCause, fix: Fix | None, evidence: JobEvidence, ranks: Ranks, limit: Tolerance,
    after: After,
) -> RootCause:  # fmt: skip
    """Return the root cause with what came of its fix."""
    if fix is None:
        return said
    trial = tried(fix, evidence.own, ranks, limit)
    if not trial.fixes:
        return said.unexplained(fix.words)
    words = f"{fix.words}, {match_words(evidence)} the reference to {trial.left:.1e}"
    others = after(trial.gradients, fix)
    return said.fits(f"{words}{others}") if others else said.proven(words)


def match_words(evidence: JobEvidence) -> str:
    """Return in words that all gradients match."""
    count = len(evidence.samples)
    return f"all {count} gradients match" if count > 1 else "the gradient matches"


@dataclass(frozen=True, slots=True)
class CoarseSum:
    """How micro-batches are added: the dtype of the sum; ranks are averaged before it, or their
    sums after; an addend is rounded first, or only the sum; the number that all are divided by."""

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


def _coarse_sums(
    samples: Collection[Sample], tolerance: float
) -> Iterator[tuple[CoarseSum, float]]:
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
    for ways in product(_COARSE, (True, False), (True, False), divisors):
        way = CoarseSum(*ways)
        left = worst(way.of)
        if left <= bound and worst(way.exactly, of_truth=True) <= bound:
            yield way, left


def coarse_sum(
    said: RootCause, evidence: JobEvidence, ranks: Ranks, limit: Tolerance, after: After
) -> RootCause | None:
    """Return the root cause of gradients that are a sum of rounded micro-batches, which is the
    reference's without roundings; None where they are none. All ranks call it."""
    samples = evidence.samples
    for way, left in _coarse_sums(samples.values(), limit.gradients):
        count = samples[next(iter(samples))].basis.shape[1]
        what = f"{'accumulated in' if count > 1 else 'rounded to'} {named(way.dtype)}"
        fix = Fix(
            names=set(samples), undone=partial(_exactly, way),
            words=f"the micro-batches' gradients, {what}, equal the gradients that the optimizers "
            f"take, to {left:.2g}; without rounding",
        )  # fmt: skip
        blamed = replace(
            said, state=Subject.GRADIENTS, axis="", factor=what,
            sentence=f"The gradients of {count} micro-batch{'es' * (count > 1)} are {what}.",
            fix="Accumulate and reduce them in a dtype as fine as the reference's.",
        )  # fmt: skip
        tried = with_trial(blamed, fix, evidence, ranks, limit, after)
        if tried.certainty is not Certainty.UNEXPLAINED:
            return tried
    return None


def _exactly(way: CoarseSum, sample: Sample, rank: int) -> Tensor:
    return way.exactly(sample).masked_fill(sample.gradients[rank].isnan(), math.nan)
