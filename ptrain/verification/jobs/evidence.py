"""Collect the evidence of all ranks about a step whose gradients differ, and try fixes on it.

For each parameter, the evidence has sampled elements of the reference's gradient, of each rank's
gradient, and of each micro-batch's contribution. A fix is tried on all elements of all parameters.

The input rows of the ranks are compared with the reference's. A loop that rearranges the batch
(padding, parts of sequences) has other rows, and the comparison gives no result.
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
from ptrain.verification.capture import SampleFaults, find_sample_faults
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.modules import ProbeResult
from ptrain.verification.jobs.record import ForwardCall, StepRecorder, checksum
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import (
    LeastSquares,
    Magnitude,
    are_equal_on_ranks,
    fit_combination,
    fit_multiple,
    is_representable,
    mean_size,
    norm,
    relative_size,
)


@dataclass(slots=True, kw_only=True)
class RowReport:
    """The number of this rank's input rows that match the reference's.

    Attributes:
        count: Number of rows.
        sliced: Number of rows whose length no reference row has.
        unknown: Number of rows that are not in the reference's batch.
    """

    count: int = 0
    sliced: int = 0
    unknown: int = 0


def _rows_of_calls(calls: Sequence[ForwardCall]) -> Iterator[tuple[str, int]]:
    """Yield checksum and length (elements) of each row of the first input tensor, pass by pass."""
    for call in calls:
        leaves = tree_leaves((call.args, call.kwargs))
        tensors = (its for its in leaves if isinstance(its, Tensor) and its.dim())
        first = next((its for its in tensors if not isinstance(its, DTensor)), None)
        if first is not None:
            yield from ((checksum(row.flatten()), row.numel()) for row in first)


def compare_rows(reference: Sequence[ForwardCall], run: Sequence[ForwardCall]) -> RowReport:
    """Compare the input rows of this rank's passes with the reference's."""
    known, rows = dict(_rows_of_calls(reference)), list(_rows_of_calls(run))
    return RowReport(
        count=len(rows),
        sliced=sum(length not in known.values() for _, length in rows),
        unknown=sum(key not in known for key, _ in rows),
    )


def row_keys(calls: Sequence[ForwardCall]) -> list[str]:
    """Return a checksum of each row of the model's first input tensor, pass by pass."""
    return [key for key, _ in _rows_of_calls(calls)]


_SAMPLE = 256  # elements per parameter: half are its largest, half are evenly spread
_CHUNK = 1 << 25  # fp64 elements per all-gather, over all ranks: 256 MiB
MOST = 16  # micro-batches per rank whose contributions are distinguished


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The gradients of S sampled elements of one or more parameters.

    Attributes:
        truth: The reference's gradient, [S].
        before: The reference's gradient of the previous step, [S]; zeros in the first step.
        gradients: The ranks' gradients, [ranks, S]; NaN for elements that a rank does not hold.
        basis: Contributions of micro-batches, [ranks, micro-batches, S]; zeros for a micro-batch
            that a rank does not have, NaN for one that could not run again.
    """

    truth: Tensor
    before: Tensor
    gradients: Tensor
    basis: Tensor

    @classmethod
    def from_rows(cls, rows: Tensor) -> Sample:
        """Return a sample of all ranks' rows, stacked in the layout of `RankGradients.rows`."""
        return cls(truth=rows[0, 0], before=rows[0, 1], gradients=rows[:, 2], basis=rows[:, 3:])

    @classmethod
    def concatenate(cls, samples: Iterable[Sample]) -> Sample:
        """Concatenate the samples of several parameters."""
        rows = [(its.truth, its.before, its.gradients, its.basis) for its in samples]
        truth, before, gradients, basis = (torch.cat(its, -1) for its in zip(*rows, strict=True))
        return cls(truth=truth, before=before, gradients=gradients, basis=basis)

    def divide_gradients(self, factor: float) -> Sample:
        """Return the sample with the ranks' gradients divided by a factor."""
        return replace(self, gradients=self.gradients / factor)

    def holding_ranks(self) -> list[int]:
        """Return the ranks that hold any of these elements."""
        return [rank for rank, row in enumerate(self.gradients) if bool((~row.isnan()).any())]

    def rank_rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's gradient, and the reference's, at the elements that the rank holds."""
        has = ~self.gradients[rank].isnan()
        return self.gradients[rank][has], self.truth[has]

    def held_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all held elements of the ranks, with the reference's, as flat tensors.

        The result is the ranks' gradients, the reference's, and the reference's of the previous
        step.
        """
        has = ~self.gradients.isnan()
        truth, before = (row.expand_as(has)[has] for row in (self.truth, self.before))
        return self.gradients[has], truth, before

    def fit_multiple(self) -> LeastSquares:
        """Fit the gradients of all ranks as one multiple of the reference's."""
        own, truth, _ = self.held_rows()
        return fit_multiple(own, truth)

    def ranks_without_gradient(self) -> list[int]:
        """Return the ranks whose gradient is zero although the reference's is not."""
        pairs = [(rank, *self.rank_rows(rank)) for rank in self.holding_ranks()]
        return [rank for rank, own, truth in pairs if truth.any() and not own.any()]


@dataclass(frozen=True, slots=True)
class Contributions:
    """The gradients as sums of the J distinct contributions of micro-batches.

    Attributes:
        labels: Rank and micro-batch of each contribution, [J]. Ranks with equal data count once.
        of_truth: Fit of the reference's gradient.
        of_loop: Fit of each rank's gradient, by rank. Ranks that hold few elements are left out.
        own: Indices of the contributions that each rank computes.
    """

    labels: tuple[tuple[int, int], ...]
    of_truth: LeastSquares
    of_loop: dict[int, LeastSquares]
    own: dict[int, tuple[int, ...]]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks with distinct data."""
        return tuple(dict.fromkeys(rank for rank, _ in self.labels))

    def reweight(self, sample: Sample, rank: int) -> Tensor:
        """Return a rank's gradient with the reference's weights of the micro-batches.

        Args:
            sample: The gradients and contributions of S sampled elements.
            rank: The rank. Its gradient is returned unchanged if it is not in `of_loop`.

        Returns:
            The gradient, [S].
        """
        own = sample.gradients[rank]
        if rank not in self.of_loop:
            return own
        return (
            own + self._combine(sample, self.of_truth) - self._combine(sample, self.of_loop[rank])
        )

    def add_residual(self, sample: Sample, rank: int) -> Tensor:
        """Return the reference's gradient plus a rank's residual over the micro-batches."""
        own = sample.gradients[rank]
        if rank not in self.of_loop:
            return own
        return sample.truth + own - self._combine(sample, self.of_loop[rank])

    def loss_factor(self, rank: int, losses: Sequence[float]) -> float | None:
        """Return the factor on a rank's loss if its micro-batches get the reference's weights.

        Args:
            rank: The rank whose loss is corrected.
            losses: The losses of the rank's micro-batches, in order.

        Returns:
            The corrected loss divided by the sum of `losses`. None if the factor is unknown.
        """
        own, total = self.own.get(rank, ()), sum(losses)
        if len(own) != len(losses) or not total or rank not in self.of_loop:
            return None
        right, actual = self.of_truth.coefficients, self.of_loop[rank].coefficients
        if not all(actual[n] for n in own):
            return None
        pairs = zip(own, losses, strict=True)
        return sum(right[n] / actual[n] * loss for n, loss in pairs) / total

    def _combine(self, sample: Sample, fit: LeastSquares) -> Tensor:
        """Return the sum of the contributions with the coefficients of a fit."""
        rows = torch.stack([sample.basis[place] for place in self.labels])
        return torch.tensor(fit.coefficients).double() @ rows


def fit_contributions(sample: Sample) -> Contributions | None:
    """Return the distinct contributions of the micro-batches to a sample, and the fits.

    Returns None if a micro-batch could not run again, or if there are more than half as many
    contributions as elements.
    """
    if sample.basis.numel() == 0 or bool(sample.basis.isnan().any()):
        return None
    labels: list[tuple[int, int]] = []
    columns: list[Tensor] = []
    own: dict[int, tuple[int, ...]] = {}
    for rank, rows in enumerate(sample.basis):
        for number, row in enumerate(rows):
            if not row.any():
                continue
            place = next(
                (p for p, it in enumerate(columns) if are_equal_on_ranks([row, it], 1e-6)), None
            )
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
            fits[rank] = fit_combination(row[has], [column[has] for column in columns])
    return Contributions(tuple(labels), fit_combination(sample.truth, columns), fits, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGradients:
    """This rank's gradients of one step, and the reference's.

    Attributes:
        holds: This rank's shards, by name.
        truths: The reference's full gradients.
        taken: This rank's gradients as the optimizers received them.
        given: Contributions of this rank's micro-batches by parameter. An empty mapping is a
            micro-batch that could not run again.
        before: The reference's gradients of the previous step.
        micro_batches: Number of micro-batches that are distinguished, at most `MOST`.
    """

    holds: Mapping[str, ParameterShard]
    truths: Mapping[str, Tensor]
    taken: Mapping[str, Tensor]
    given: Sequence[Mapping[str, Tensor]]
    before: Mapping[str, Tensor]
    micro_batches: int

    def rows(self, name: str) -> Tensor:
        """Return the gradients of a parameter as rows.

        Args:
            name: The parameter's name in the reference.

        Returns:
            A tensor [3 + micro-batches, elements] in fp64: the reference's gradient, the
            reference's gradient of the previous step (zeros if unknown), this rank's gradient, and
            the contributions of this rank's micro-batches.
        """
        truth = self.truths[name].flatten()
        old = self.before.get(name, torch.zeros_like(truth)).flatten()
        mine = _fill_full_layout(truth, self.taken.get(name), self.holds.get(name))
        both = torch.stack([truth.double(), old.double(), mine])
        return torch.cat([both, _basis(truth, self.given, name, self.micro_batches)])

    def is_rounded_to(self, dtype: torch.dtype, names: Collection[str]) -> bool:
        """Return True if this rank's gradients are the reference's rounded to a coarser dtype.

        All elements must be numbers of that dtype, and lie within its rounding of the reference's
        elements, which must not all be numbers of it. The rounding allows for addends of a sum,
        which are about as large as the other elements. A rank without elements returns True.
        """
        right = {  # the reference's values of this rank's elements
            name: self.holds[name].select(self.truths[name].view(self.holds[name].shape))
            for name in self.taken
            if name in names
        }
        if not any(self.taken[name].numel() for name in right):
            return True  # no elements: no objection
        eps = torch.finfo(dtype).eps
        is_near = all(
            bool(((self.taken[name] - its).abs() <= eps * (its.abs() + 2 * mean_size(its))).all())
            for name, its in right.items()
        )
        own = all(is_representable(self.taken[name], dtype) for name in right)
        return is_near and own and not all(is_representable(its, dtype) for its in right.values())

    def gather_samples(self, name: str, ranks: Ranks) -> Iterator[Sample]:
        """Yield all elements of a parameter as samples of limited size. All ranks call it."""
        rows = self.rows(name)
        for piece in rows.split(max(_CHUNK // (ranks.size * rows.size(0)), 1), dim=1):
            yield Sample.from_rows(ranks.stack(piece))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvidence:
    """The evidence of all ranks about one step.

    Attributes:
        samples: Sampled gradients by parameter.
        own: This rank's gradients with all elements.
        micro_batches: The largest number of micro-batches on any rank.
        ledger: The samples that the ranks processed, if they can be compared with the batch.
        rows: The comparison of input rows, by rank.
    """

    samples: dict[str, Sample]
    own: RankGradients
    micro_batches: int
    ledger: SampleFaults | None = None
    rows: tuple[RowReport, ...] = ()

    @property
    def match_words(self) -> str:
        """The phrase for gradients that all match."""
        count = len(self.samples)
        return f"all {count} gradients match" if count > 1 else "the gradient matches"

    @property
    def contributions(self) -> Contributions | None:
        """The contributions of the micro-batches to all parameters, or None."""
        return fit_contributions(Sample.concatenate(self.samples.values()))


def collect_evidence(
    ranks: Ranks,
    holds: Mapping[str, ParameterShard],
    *,
    reference: StepRecorder,
    run: StepRecorder,
    probe: ProbeResult,
    before: Mapping[str, Tensor],
) -> JobEvidence:
    """Collect the evidence of all ranks about a step. All ranks call it.

    Args:
        ranks: The ranks.
        holds: This rank's shards, by name.
        reference: The record of the reference's step.
        run: The record of the loop's step.
        probe: The gradients of the loop's micro-batches, run on the reference's model.
        before: The reference's gradients of the previous step.
    """
    own = RankGradients(
        holds=holds, truths=reference.gradients, taken=run.gradients, given=probe.gradients,
        before=before, micro_batches=min(max(ranks.gather(len(probe.gradients))), MOST),
    )  # fmt: skip
    return replace(
        sample_gradients(ranks, own),
        micro_batches=max(ranks.gather(len(probe.gradients))),
        rows=tuple(ranks.gather(compare_rows(reference.calls, run.calls), RowReport)),
        ledger=find_sample_faults(row_keys(reference.calls), ranks.gather(row_keys(run.calls))),
    )


def sample_gradients(ranks: Ranks, own: RankGradients) -> JobEvidence:
    """All-gather sampled gradients of both sides. All ranks call it."""
    names = list(own.truths)
    places = choose_elements(ranks, {name: own.truths[name].flatten() for name in names})
    everyones = ranks.stack(torch.cat([own.rows(n)[:, places[n]] for n in names], dim=1))
    parts = everyones.split([places[name].numel() for name in names], dim=2)
    samples = {name: Sample.from_rows(part) for name, part in zip(names, parts, strict=True)}
    return JobEvidence(samples=samples, micro_batches=own.micro_batches, own=own)


def choose_elements(ranks: Ranks, truths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the indices of the sampled elements by parameter, as rank 0 chooses them.

    Half of them are the largest elements, the others are evenly spread. All ranks call it.

    Args:
        ranks: The ranks of the loop.
        truths: The reference's gradients by parameter name, flattened.

    Returns:
        Flat indices by parameter name, [S] in int64; all elements of a small parameter.
    """
    chosen = {}
    for name, truth in truths.items():
        count = min(truth.numel(), _SAMPLE)
        if count == truth.numel():
            chosen[name] = torch.arange(count)
            continue
        largest = truth.abs().topk(count // 2).indices.cpu()
        spread = torch.linspace(0, truth.numel() - 1, count - count // 2).long()
        chosen[name] = torch.cat([largest, spread])
    # Rank 0's choice, because `topk` may select other elements among equal ones on another device.
    together = ranks.broadcast(torch.cat([indices.long() for indices in chosen.values()]))
    sizes = [indices.numel() for indices in chosen.values()]
    return dict(zip(chosen, together.split(sizes), strict=True))


def _fill_full_layout(
    truth: Tensor, gradient: Tensor | None, shard: ParameterShard | None
) -> Tensor:
    """Return this rank's gradient in the layout of the full tensor, in fp64.

    Elements that it does not hold are NaN. Elements without a gradient are zero.
    """
    row = torch.full(truth.shape, math.nan, dtype=torch.float64, device=truth.device)
    if shard is not None:
        value = torch.zeros(()) if gradient is None else gradient
        value = value.masked_fill(value.isnan(), math.inf)  # NaN marks elements that are not held
        row[slice(None) if shard.indices is None else shard.indices.to(row.device)] = value.to(row)
    return row


def _basis(truth: Tensor, given: Sequence[Mapping[str, Tensor]], name: str, count: int) -> Tensor:
    """Return the contributions of the micro-batches as [micro-batches, elements] in fp64.

    A micro-batch that this rank does not have is zero. One that could not run again is NaN.
    """
    rows = torch.zeros(count, truth.numel(), dtype=torch.float64, device=truth.device)
    for number, gradients in enumerate(given[:count]):
        if not gradients:
            rows[number] = math.nan
        elif name in gradients:
            rows[number] = gradients[name].double().flatten()
    return rows


_ROUNDINGS = 10  # tolerances that remain allowed: a fix divides and adds once more
_LOOSEST = 0.1  # upper bound of the limit, which the tolerances of 16 bits would exceed

LossFactor = Callable[[int, Sequence[float]], float | None]


def unknown_factor(rank: int, losses: Sequence[float]) -> None:
    """Return None: the effect of the fix on the loss is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change of the gradients that undoes a hypothesis.

    Attributes:
        names: The parameters to change.
        undo: Returns a rank's corrected gradient of a sample.
        words: The phrase for the change.
        scale: All gradients are divided by it first.
        loss_factor: Returns the factor on a rank's loss, given the losses of its micro-batches, if
            the fault is in the loss. None if it is unknown.
    """

    names: Collection[str]
    undo: Callable[[Sample, int], Tensor]
    words: str
    scale: float = 1.0
    loss_factor: LossFactor = unknown_factor

    def apply(self, name: str, sample: Sample, rank: int) -> Tensor:
        """Return a rank's gradient of a sample after the fix.

        Args:
            name: The parameter's name. Parameters that are not in `names` are only divided by
                `scale`.
            sample: The gradients of S sampled elements of the parameter.
            rank: The rank whose gradient is fixed.

        Returns:
            The gradient, [S]; NaN for elements that the rank does not hold.
        """
        sample = sample.divide_gradients(self.scale)
        return self.undo(sample, rank) if name in self.names else sample.gradients[rank]


# Describes the differences that remain with these gradients; "" if there are none.
After = Callable[[Mapping[str, Tensor], Fix], str]


def try_fix(
    fix: Fix, own: RankGradients, ranks: Ranks, limit: Tolerance
) -> tuple[float, Mapping[str, Tensor] | None]:
    """Try a fix on all elements of all gradients. All ranks call it.

    Args:
        fix: The fix.
        own: This rank's gradients.
        ranks: The ranks.
        limit: The tolerances.

    Returns:
        The largest relative difference that remains, and the full corrected gradients, flattened,
        by name. The gradients are None if the difference exceeds rounding, or if it is not halved
        for a shard that differed.
    """
    truths = own.truths
    scale = Magnitude.measure(truths)
    bound = min(_ROUNDINGS * limit.gradients, max(limit.gradients, _LOOSEST))
    # a correct fix leaves only rounding, on every rank's shard of every parameter
    largest, fixes, rows = 0.0, True, dict[str, Tensor]()
    for name, whole in truths.items():
        squares: dict[int, Tensor] = {}
        pieces = []
        for sample in own.gather_samples(name, ranks):
            piece = sample.truth.clone()
            # this rank last: its values win where replicas overlap in `piece`
            for rank in sorted(sample.holding_ranks(), key=lambda its: its == ranks.rank):
                has = ~sample.gradients[rank].isnan()
                undone, (was, truth) = fix.apply(name, sample, rank)[has], sample.rank_rows(rank)
                sizes = [norm(undone - truth), norm(was - truth), norm(truth)]
                counted = torch.tensor([*(size**2 for size in sizes), truth.numel()]).double()
                squares[rank] = squares.get(rank, torch.zeros(4).double()) + counted
                piece[has] = undone
            pieces.append(piece)
        rows[name] = torch.cat(pieces)
        for left, before, length, numel in (row.tolist() for row in squares.values()):
            size = max(math.sqrt(length), scale.negligible_size(whole) * math.sqrt(numel))
            after, was_off = (relative_size(math.sqrt(its), size) for its in (left, before))
            largest = max(largest, after)
            helps = after <= was_off / 2 or was_off <= limit.gradients
            fixes = fixes and after <= bound and helps
    return largest, rows if fixes else None


def add_trial(
    said: RootCause, fix: Fix | None, evidence: JobEvidence, ranks: Ranks, limit: Tolerance,
    after: After,
) -> RootCause:  # fmt: skip
    """Return the root cause with the result of its fix. All ranks call it.

    It is unexplained if gradients still differ, fits if only the loss or the update differs, and is
    proven otherwise. Without a fix it is returned unchanged.

    Args:
        said: The root cause.
        fix: The fix to try, None without one.
        evidence: The evidence of all ranks.
        ranks: The ranks.
        limit: The tolerances.
        after: Describes the differences that remain after the fix.
    """
    if fix is None:
        return said
    left, gradients = try_fix(fix, evidence.own, ranks, limit)
    if gradients is None:
        return said.as_unexplained(fix.words)
    words = f"{fix.words}, {evidence.match_words} the reference to {left:.1e}"
    others = after(gradients, fix)
    return said.as_fitting(f"{words}{others}") if others else said.as_proven(words)
