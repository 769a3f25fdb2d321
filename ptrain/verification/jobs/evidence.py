"""Collect on every rank the evidence of all ranks about a step whose gradients differ. Per
parameter it is a sample of its elements: one device's, each optimizer's, and each micro-batch's
contribution. What would undo a difference is tried on every element of all parameters.

This rank's samples are compared with one device's row by row. A batch that the loop rearranges
(padding, pieces of sequences) has other rows and gives no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptrain.report.finding import RootCause
from ptrain.verification.capture import Samples, ledger_of
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.modules import ProbeResult
from ptrain.verification.jobs.record import ForwardCall, StepRecorder, digest
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import (
    LeastSquares,
    Magnitude,
    are_alike,
    combination,
    is_number_of,
    mean_size,
    multiple,
    norm,
    ratio,
)


@dataclass(slots=True, kw_only=True)
class RowReport:
    """Of this rank's rows, how many: `count` in all; `sliced`: shorter or longer than one device's;
    `unknown`: not in the batch."""

    count: int = 0
    sliced: int = 0
    unknown: int = 0


def _rows_of_calls(calls: Sequence[ForwardCall]) -> Iterator[tuple[str, int]]:
    """Yield a checksum of every row of the first tensor that the model was given, pass by pass, and
    the row's length."""
    for call in calls:
        leaves = tree_leaves((call.args, call.kwargs))
        tensors = (its for its in leaves if isinstance(its, Tensor) and its.dim())
        first = next((its for its in tensors if not isinstance(its, DTensor)), None)
        if first is not None:
            yield from ((digest(row.flatten()), row.numel()) for row in first)


def compare_rows(reference: Sequence[ForwardCall], run: Sequence[ForwardCall]) -> RowReport:
    """Compare this rank's rows with one device's."""
    known, rows = dict(_rows_of_calls(reference)), list(_rows_of_calls(run))
    return RowReport(
        count=len(rows),
        sliced=sum(length not in known.values() for _, length in rows),
        unknown=sum(key not in known for key, _ in rows),
    )


def rows_of(calls: Sequence[ForwardCall]) -> list[str]:
    """Return a checksum of every row of the first tensor that the model was given, pass by pass."""
    return [key for key, _ in _rows_of_calls(calls)]


_SAMPLE = 256  # elements of a parameter: half of them its largest, half evenly spread
_CHUNK = 1 << 25  # numbers (in fp64) that are gathered of all ranks' rows at once
MOST = 16  # micro-batches whose contributions are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one parameter with S sampled elements: `truth` [S], `before` [S] (the reference's gradient
    of the step before; zeros where there is none), `gradients` [ranks, S] and `basis`
    [ranks, micro-batches, S], NaN for what a rank has not."""

    truth: Tensor
    before: Tensor
    gradients: Tensor
    basis: Tensor

    @classmethod
    def of_rows(cls, rows: Tensor) -> Sample:
        """Return the sample of all ranks' rows, as `OwnGradients.rows` has them."""
        return cls(truth=rows[0, 0], before=rows[0, 1], gradients=rows[:, 2], basis=rows[:, 3:])

    @classmethod
    def joined(cls, samples: Iterable[Sample]) -> Sample:
        """Return one sample of all these parameters."""
        rows = [(its.truth, its.before, its.gradients, its.basis) for its in samples]
        truth, before, gradients, basis = (torch.cat(its, -1) for its in zip(*rows, strict=True))
        return cls(truth=truth, before=before, gradients=gradients, basis=basis)

    def scaled(self, factor: float) -> Sample:
        """Return the sample with its gradients divided by a factor."""
        return replace(self, gradients=self.gradients / factor)

    def holders(self) -> list[int]:
        """Ranks that have any of these elements."""
        return [rank for rank, row in enumerate(self.gradients) if bool((~row.isnan()).any())]

    def of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what this rank has of the sample, and what it should have."""
        has = ~self.gradients[rank].isnan()
        return self.gradients[rank][has], self.truth[has]

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return in a row each the gradients of all ranks, the right ones, and those of the
        reference in the step before."""
        has = ~self.gradients.isnan()
        truth, before = (row.expand_as(has)[has] for row in (self.truth, self.before))
        return self.gradients[has], truth, before

    def multiple(self) -> LeastSquares:
        """Fit all ranks' gradients as one multiple of the right ones."""
        own, truth, _ = self.rows()
        return multiple(own, truth)

    def without_gradient(self) -> list[int]:
        """Return the ranks that have no gradient, or zeros, where the right one is not zero."""
        pairs = [(rank, *self.of(rank)) for rank in self.holders()]
        return [rank for rank, own, truth in pairs if truth.any() and not own.any()]


@dataclass(frozen=True, slots=True)
class Contributions:
    """Micro-batches with a gradient of their own, as (rank, number) [J]: ranks with the same data
    count once. `of_truth`, `of_loop`: the right gradient and each rank's as sums of them; `own`:
    which of them each rank computes. A rank with few elements of its own is not in `of_loop`."""

    labels: tuple[tuple[int, int], ...]
    of_truth: LeastSquares
    of_loop: dict[int, LeastSquares]
    own: dict[int, tuple[int, ...]]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank for rank, _ in self.labels))

    def reweighted(self, sample: Sample, rank: int) -> Tensor:
        """Return a rank's gradient with the reference's weight of each micro-batch."""
        own = sample.gradients[rank]
        if rank not in self.of_loop:
            return own
        return own + self._sum(sample, self.of_truth) - self._sum(sample, self.of_loop[rank])

    def rest(self, sample: Sample, rank: int) -> Tensor:
        """Return the reference's gradient with whatever a rank's has besides the micro-batches'."""
        own = sample.gradients[rank]
        if rank not in self.of_loop:
            return own
        return sample.truth + own - self._sum(sample, self.of_loop[rank])

    def loss_factor(self, rank: int, losses: Sequence[float]) -> float | None:
        """Return what a rank's loss is multiplied by where its micro-batches, with these losses,
        have the reference's weights; None where one cannot tell."""
        own, total = self.own.get(rank, ()), sum(losses)
        if len(own) != len(losses) or not total or rank not in self.of_loop:
            return None
        right, actual = self.of_truth.coefficients, self.of_loop[rank].coefficients
        if not all(actual[n] for n in own):
            return None
        pairs = zip(own, losses, strict=True)
        return sum(right[n] / actual[n] * loss for n, loss in pairs) / total

    def _sum(self, sample: Sample, fit: LeastSquares) -> Tensor:
        rows = torch.stack([sample.basis[place] for place in self.labels])
        return torch.tensor(fit.coefficients).double() @ rows


def contributions(sample: Sample) -> Contributions | None:
    """Return None where micro-batches could not be run again, or where there are more of them than
    sampled elements."""
    if sample.basis.numel() == 0 or bool(sample.basis.isnan().any()):
        return None
    labels: list[tuple[int, int]] = []
    columns: list[Tensor] = []
    own: dict[int, tuple[int, ...]] = {}
    for rank, rows in enumerate(sample.basis):
        for number, row in enumerate(rows):
            if not row.any():
                continue
            place = next((p for p, it in enumerate(columns) if are_alike([row, it], 1e-6)), None)
            if place is None:
                place = len(columns)
                labels.append((rank, number))
                columns.append(row)
            own[rank] = (*own.get(rank, ()), place)
    if not columns or 2 * len(columns) > sample.truth.numel():
        return None
    fits: dict[int, LeastSquares] = {}
    for rank, row in enumerate(sample.gradients):
        has = ~row.isnan()
        if 2 * len(columns) <= int(has.sum()):
            fits[rank] = combination(row[has], [column[has] for column in columns])
    return Contributions(tuple(labels), combination(sample.truth, columns), fits, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGradients:
    """What this rank has of a step's gradients: one device's (`truths`), its elements of those that
    the optimizers took, what its micro-batches give by themselves (one without could not be run
    again), and one device's of the step `before`."""

    holds: Mapping[str, ParameterShard]
    truths: Mapping[str, Tensor]
    taken: Mapping[str, Tensor]
    given: Sequence[Mapping[str, Tensor]]
    before: Mapping[str, Tensor]
    micro_batches: int

    def rows(self, name: str) -> Tensor:
        """Return [3 + micro-batches, elements] of a parameter: one device's gradient, that of the
        step before, this rank's as its optimizer took it, and what its micro-batches give."""
        truth = self.truths[name].flatten()
        old = self.before.get(name, torch.zeros_like(truth)).flatten()
        mine = _at_elements(truth, self.taken.get(name), self.holds.get(name))
        both = torch.stack([truth.double(), old.double(), mine])
        return torch.cat([both, _basis(truth, self.given, name, self.micro_batches)])

    def is_rounded_to(self, dtype: torch.dtype, names: Collection[str]) -> bool:
        """Return whether every element that this rank's optimizer took is a number of a coarser
        dtype, as near to one device's as such numbers lie, which are none of that dtype. Addends of
        a sum are about as large as the other elements."""
        right = {  # one device's elements
            name: self.holds[name].of(self.truths[name].view(self.holds[name].shape))
            for name in self.taken
            if name in names
        }
        if not any(self.taken[name].numel() for name in right):
            return True  # it has nothing to say
        eps = torch.finfo(dtype).eps
        is_near = all(
            bool(((self.taken[name] - its).abs() <= eps * (its.abs() + 2 * mean_size(its))).all())
            for name, its in right.items()
        )
        own = all(is_number_of(self.taken[name], dtype) for name in right)
        return is_near and own and not all(is_number_of(its, dtype) for its in right.values())

    def of_all_ranks(self, name: str, ranks: Ranks) -> Iterator[Sample]:
        """Yield every element of a parameter, some at a time. All ranks call it."""
        rows = self.rows(name)
        for piece in rows.split(max(_CHUNK // (ranks.size * rows.size(0)), 1), dim=1):
            yield Sample.of_rows(ranks.stack(piece))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvidence:
    """`micro_batches`: the most that any rank ran; `ledger`: the samples that they saw, `rows`:
    these compared with the reference's, by rank; `own`: this rank's gradients, all elements."""

    samples: dict[str, Sample]
    own: OwnGradients
    micro_batches: int
    ledger: Samples | None = None
    rows: tuple[RowReport, ...] = ()

    @property
    def match_words(self) -> str:
        """Return in words that all gradients match."""
        count = len(self.samples)
        return f"all {count} gradients match" if count > 1 else "the gradient matches"

    @property
    def contributed(self) -> Contributions | None:
        """Return what the micro-batches give of all parameters."""
        return contributions(Sample.joined(self.samples.values()))


def evidence(
    ranks: Ranks,
    holds: Mapping[str, ParameterShard],
    *,
    reference: StepRecorder,
    run: StepRecorder,
    probe: ProbeResult,
    before: Mapping[str, Tensor],
) -> JobEvidence:
    """Return what all ranks know of a loop's step. All ranks call it."""
    own = OwnGradients(
        holds=holds, truths=reference.gradients, taken=run.gradients, given=probe.gradients,
        before=before, micro_batches=min(max(ranks.gather(len(probe.gradients))), MOST),
    )  # fmt: skip
    return replace(
        sampled(ranks, own),
        micro_batches=max(ranks.gather(len(probe.gradients))),
        rows=tuple(ranks.gather(compare_rows(reference.calls, run.calls), RowReport)),
        ledger=ledger_of(rows_of(reference.calls), ranks.gather(rows_of(run.calls))),
    )


def sampled(ranks: Ranks, own: OwnGradients) -> JobEvidence:
    """Gather samples of the gradients of both sides on all ranks. All ranks call it."""
    names = list(own.truths)
    places = places_of(ranks, {name: own.truths[name].flatten() for name in names})
    everyones = ranks.stack(torch.cat([own.rows(n)[:, places[n]] for n in names], dim=1))
    parts = everyones.split([places[name].numel() for name in names], dim=2)
    samples = {name: Sample.of_rows(part) for name, part in zip(names, parts, strict=True)}
    return JobEvidence(samples=samples, micro_batches=own.micro_batches, own=own)


def places_of(ranks: Ranks, truths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which elements are sampled: rank 0 chooses."""
    chosen = {}
    for name, truth in truths.items():
        count = min(truth.numel(), _SAMPLE)
        if count == truth.numel():
            chosen[name] = torch.arange(count)
            continue
        largest = truth.abs().topk(count // 2).indices.cpu()
        spread = torch.linspace(0, truth.numel() - 1, count - count // 2).long()
        chosen[name] = torch.cat([largest, spread])
    together = ranks.first(torch.cat([indices.long() for indices in chosen.values()]))
    sizes = [indices.numel() for indices in chosen.values()]
    return dict(zip(chosen, together.split(sizes), strict=True))


def _at_elements(truth: Tensor, gradient: Tensor | None, shard: ParameterShard | None) -> Tensor:
    """Return this rank's gradient at the elements of the whole: NaN where it holds none of them,
    zero where the optimizer was given none."""
    row = torch.full(truth.shape, math.nan, dtype=torch.float64, device=truth.device)
    if shard is not None:
        value = torch.zeros(()) if gradient is None else gradient
        value = value.masked_fill(value.isnan(), math.inf)  # NaN is what a rank does not hold
        row[slice(None) if shard.at is None else shard.at.to(row.device)] = value.to(row)
    return row


def _basis(truth: Tensor, given: Sequence[Mapping[str, Tensor]], name: str, count: int) -> Tensor:
    """[micro-batches, elements]: zeros of a micro-batch that this rank has not, NaN of one that
    could not be run again."""
    rows = torch.zeros(count, truth.numel(), dtype=torch.float64, device=truth.device)
    for number, gradients in enumerate(given[:count]):
        if not gradients:
            rows[number] = math.nan
        elif name in gradients:
            rows[number] = gradients[name].double().flatten()
    return rows


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


def tried(
    fix: Fix, own: OwnGradients, ranks: Ranks, limit: Tolerance
) -> tuple[float, Mapping[str, Tensor] | None]:
    """Try a fix on all gradients; return the largest difference (relative) that it leaves, and the
    whole gradients that it gives, a row each: None where it leaves more than roundings make. All
    ranks call it."""
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
            after, was_off = (ratio(math.sqrt(its), size) for its in (left, before))
            largest = max(largest, after)
            helps = after <= was_off / 2 or was_off <= limit.gradients
            fixes = fixes and after <= bound and helps
    return largest, rows if fixes else None


def with_trial(
    said: RootCause, fix: Fix | None, evidence: JobEvidence, ranks: Ranks, limit: Tolerance,
    after: After,
) -> RootCause:  # fmt: skip
    """Return the root cause with what came of its fix."""
    if fix is None:
        return said
    left, gradients = tried(fix, evidence.own, ranks, limit)
    if gradients is None:
        return said.unexplained(fix.words)
    words = f"{fix.words}, {evidence.match_words} the reference to {left:.1e}"
    others = after(gradients, fix)
    return said.fits(f"{words}{others}") if others else said.proven(words)
