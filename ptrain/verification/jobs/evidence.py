"""Collect on every rank the evidence of all ranks about a step whose gradients differ. Per
parameter it is a sample of its elements: one device's, each optimizer's, and each micro-batch's
contribution.

This rank's samples are compared with one device's row by row: whether the batch contains them,
whether the model returned the same for them, and whether the loss has the same targets. A batch
that the loop rearranges (padding, pieces of sequences) has other rows and gives no result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptrain.verification.capture import Samples, ledger_of
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.modules import ProbeResult
from ptrain.verification.jobs.record import ForwardCall, StepRecorder, digest
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import difference, is_number_of, multiple, norm, rounded, square


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: a checksum of its input, of whatever else was given with it, and what the model
    returned of it and the loss's gradient by that, where these have rows at all."""

    key: str
    others: tuple[str, ...]
    length: int
    output: Tensor | None
    gradient: Tensor | None


@dataclass(slots=True, kw_only=True)
class RowReport:
    """Of this rank's rows, how many: `count` in all; `sliced`: shorter or longer than one device's;
    `unknown`: not in the batch; `otherwise`: the same input, and something else given with it;
    `returned`: of which the model returned something else; `compared`: of which both losses are
    known to ask something; `asks_alike`: what this rank's asks of all of these is one multiple of
    what one device's does."""

    count: int = 0
    sliced: int = 0
    unknown: int = 0
    otherwise: int = 0
    returned: int = 0
    compared: int = 0
    asks_alike: bool = True


def rows_of_calls(calls: Sequence[ForwardCall]) -> Iterator[Row]:
    """Yield the rows of the first tensor that the model was given, pass by pass."""
    for call in calls:
        tensors = [
            leaf
            for leaf in tree_leaves((call.args, call.kwargs))
            if isinstance(leaf, Tensor) and leaf.dim() and not isinstance(leaf, DTensor)
        ]
        if not tensors:
            continue
        first, count = tensors[0], tensors[0].size(0)
        others = [tensor for tensor in tensors[1:] if tensor.size(0) == count]
        output, gradient = (
            _of_rows(tensor, count) for tensor in (call.output, call.upstream.get(0))
        )
        for place, row in enumerate(first):
            yield Row(
                key=digest(row.flatten()),
                others=tuple(digest(tensor[place].flatten()) for tensor in others),
                length=row.numel(),
                output=None if output is None else output[place],
                gradient=None if gradient is None else gradient[place],
            )


def _of_rows(tensor: Tensor | None, count: int) -> Tensor | None:
    has = tensor is not None and tensor.dim() and tensor.size(0) == count
    return tensor if has else None


def compare_rows(
    reference: Sequence[ForwardCall], run: Sequence[ForwardCall], tolerance: float
) -> RowReport:
    """Compare this rank's rows with one device's of the same input."""
    expected: dict[str, list[Row]] = {}
    for row in rows_of_calls(reference):
        expected.setdefault(row.key, []).append(row)
    lengths = {row.length for rows in expected.values() for row in rows}
    rows = list(rows_of_calls(run))
    known = [(row, expected[row.key]) for row in rows if row.key in expected]
    both = [(row, its) for row, rights in known for its in rights if its.others == row.others]
    both = list({id(row): (row, its) for row, its in reversed(both)}.values())  # the first of each
    matched = {id(row) for row, _ in both}
    requested = [
        (row.gradient, its.gradient)
        for row, its in both
        if row.gradient is not None
        and its.gradient is not None
        and row.gradient.shape == its.gradient.shape
    ]
    sides = [torch.cat([row.flatten() for row in side]) for side in zip(*requested, strict=True)]
    return RowReport(
        count=len(rows),
        sliced=sum(row.length not in lengths for row in rows),
        unknown=len(rows) - len(known),
        otherwise=sum(
            id(row) not in matched and len(row.others) == len(rights[0].others)
            for row, rights in known
        ),
        returned=sum(_differ(row.output, its.output, tolerance) for row, its in both),
        compared=len(requested),
        asks_alike=not sides or multiple(sides[0], sides[1]).holds(tolerance),
    )


def _differ(own: Tensor | None, right: Tensor | None, tolerance: float) -> bool:
    if own is None or right is None or own.shape != right.shape:
        return False
    return difference(own, right, norm(right)) > tolerance


def rows_of(calls: Sequence[ForwardCall]) -> list[str]:
    """Return a checksum of every row of the first tensor that the model was given, pass by pass."""
    return [row.key for row in rows_of_calls(calls)]


_SAMPLE = 256  # elements of a parameter: half of them its largest, half evenly spread
ROW_TOLERANCE = 1e-3  # relative: of outputs, and of what a loss asks; a fault is larger
_SHARE = 0.1  # of what differs, that a rounding may leave
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

    def scaled(self, factor: float) -> Sample:
        """The sample with its gradients divided by a factor."""
        return Sample(
            truth=self.truth,
            before=self.before,
            gradients=self.gradients / factor,
            basis=self.basis,
        )

    def holders(self) -> list[int]:
        """Ranks that have any of these elements."""
        return [rank for rank, row in enumerate(self.gradients) if bool((~row.isnan()).any())]

    def of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what this rank has of the sample, and what it should have."""
        has = ~self.gradients[rank].isnan()
        return self.gradients[rank][has], self.truth[has]


def together(samples: Iterable[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return in a row each what all ranks have of some samples, what they should have, and what one
    device had in the step before."""
    rows = [
        (sample.gradients[rank][has], sample.truth[has], sample.before[has])
        for sample in samples
        for rank in sample.holders()
        for has in (~sample.gradients[rank].isnan(),)
    ]
    own, truth, before = (torch.cat(its) for its in zip(*rows, strict=True))
    return own, truth, before


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

    def emptiness(self, name: str) -> str:
        """Return in words why this rank has no gradient of a parameter; nothing where it has."""
        gradient = self.taken.get(name)
        if gradient is not None:
            return "" if bool(gradient.any()) else "it is all zeros: set to zero, or never written"
        if not self.holds[name].parameter.requires_grad:
            return "it does not require a gradient (requires_grad is False)"
        return ".grad is None: backward does not reach it, or it is not copied back from a copy"

    def is_rounded_to(self, dtype: torch.dtype, names: Collection[str]) -> bool:
        """Return whether every element that this rank's optimizer took is a number of a coarser
        dtype, as near to one device's as such numbers lie, which are none of that dtype."""
        right = self._expected(names)
        own = {name: self.taken[name] for name in right}
        if not sum(row.numel() for row in own.values()):
            return True  # it has nothing to say
        return (
            all(is_number_of(row, dtype) for row in own.values())
            and not all(is_number_of(row, dtype) for row in right.values())
            and all(_is_near(own[name], row, dtype) for name, row in right.items())
        )

    def is_rounding_of(self, dtype: torch.dtype, names: Collection[str]) -> bool:
        """Return whether what this rank's optimizer took is one device's rounded to a dtype, but
        for elements that roundings before it bring to the next number."""
        for name, right in self._expected(names).items():
            own, length = self.taken[name], norm(right)
            left = difference(own, rounded(right, dtype), length)
            if left > _SHARE * difference(own, right, length):
                return False
        return True

    def _expected(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return one device's elements of what this rank's optimizer took."""
        return {
            name: self.holds[name].of(self.truths[name].view(self.holds[name].shape))
            for name in self.taken
            if name in names
        }

    def of_all_ranks(self, name: str, ranks: Ranks) -> Iterator[Sample]:
        """Yield every element of a parameter, some at a time. All ranks call it."""
        rows = self.rows(name)
        for piece in rows.split(max(_CHUNK // (ranks.size * rows.size(0)), 1), dim=1):
            yield Sample.of_rows(ranks.stack(piece))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvidence:
    """`norms`: of each rank's gradients, all parameters together; `norm`: the reference's.
    `micro_batches` is the most that any rank ran; `ledger` the samples that they saw, `rows` these
    beside one device's, by rank; `own` what this rank has of all elements."""

    samples: dict[str, Sample]
    own: OwnGradients
    norms: tuple[float, ...]
    norm: float
    micro_batches: int
    ledger: Samples | None = None
    rows: tuple[RowReport, ...] = ()


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
        before=before, micro_batches=_most(ranks, probe.gradients),
    )  # fmt: skip
    return replace(
        sampled(ranks, own),
        micro_batches=max(ranks.gather(len(probe.gradients))),
        rows=tuple(
            ranks.gather(compare_rows(reference.calls, run.calls, ROW_TOLERANCE), RowReport)
        ),
        ledger=ledger_of(rows_of(reference.calls), ranks.gather(rows_of(run.calls))),
    )


def untold(count: int) -> str:
    """Return in words which of so many micro-batches of a rank are not told apart; nothing where
    all are."""
    if count <= MOST:
        return ""
    return f"; only the first {MOST} of {count} micro-batches of a rank were distinguished"


def _most(ranks: Ranks, given: Sequence[object]) -> int:
    return min(max(ranks.gather(len(given))), MOST)


def sampled(ranks: Ranks, own: OwnGradients) -> JobEvidence:
    """Gather samples of the gradients of both sides on all ranks. All ranks call it."""
    names = list(own.truths)
    places = places_of(ranks, {name: own.truths[name].flatten() for name in names})
    everyones = ranks.stack(torch.cat([own.rows(n)[:, places[n]] for n in names], dim=1))
    samples, start = {}, 0
    for name in names:
        size = places[name].numel()
        samples[name] = Sample.of_rows(everyones[:, :, start : start + size])
        start += size
    squares, total = (sum(map(square, side.values())) for side in (own.taken, own.truths))
    return JobEvidence(
        samples=samples,
        norms=tuple(ranks.gather(math.sqrt(squares))),
        norm=math.sqrt(total),
        micro_batches=own.micro_batches,
        own=own,
    )


def _is_near(own: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Return whether each element is as near as roundings of it, and of what is added up to it,
    leave it: addends are about as large as the other elements."""
    usual = float(right.square().mean().sqrt()) if right.numel() else 0.0
    bound = torch.finfo(dtype).eps * (right.abs() + 2 * usual)
    return bool(((own - right).abs() <= bound).all())


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
    if shard is None:
        return row
    value = torch.zeros(()) if gradient is None else gradient
    value = value.masked_fill(value.isnan(), math.inf)  # NaN is what a rank does not hold
    if shard.at is None:
        row[:] = value.to(row)
    else:
        row[shard.at.to(row.device)] = value.to(row)
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
