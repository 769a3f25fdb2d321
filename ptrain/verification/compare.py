"""Comparison of two runs: gradient norms, gradients and final parameters; the differences of one
rank in a step and of all ranks in all steps, ordered by first occurrence; and the checks they
decide.

Violations of gradient integrity and state consistency (Theorems 3 and 4) show in the trajectory.
The last loss alone is not enough: it agrees between converged models, and two runs that learn
nothing agree perfectly. So the largest difference over all steps counts, and a run fails if its
gradients are zero, its parameters do not move, or its loss does not fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ptrain.report.finding import DifferenceKind, Mismatch, Moment, Subject
from ptrain.report.record import Check
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.parts import Magnitude, difference, norm, number_difference, relative_size
from ptrain.verification.reference import Trajectory

STILL = 1e-6  # a relative distance; parameters that moved less count as unchanged


# Relative tolerances in fp64 for sums over the same addends in another order. The orders over 1, 2,
# 4 and 8 parts differ by less than 1e-15 in the loss; a real fault is 1e-5 or more.
FP64_LOSS, FP64_NORM, FP64_PARAMETERS = 1e-12, 1e-11, 1e-9


def learning_checks(name: str, run: Trajectory) -> Iterator[Check]:
    """Yield the checks that a run learned anything; two runs that learn nothing agree perfectly."""
    if run.gradient_norms:  # the result of min() with NaN depends on the order
        norms = (norm for norm in run.gradient_norms if not math.isnan(norm))
        least = min(norms, default=math.nan)
        yield condition_check(f"{name}: gradients", least, least > 0.0, "every gradient is zero")
    yield condition_check(
        f"{name}: parameters move", run.moved_distance, run.moved_distance > STILL,
        "the parameters did not change",
    )  # fmt: skip
    if not run.losses:
        return
    wrong = sum(not math.isfinite(loss) for loss in run.losses)
    yield condition_check(
        f"{name}: losses are finite", None, wrong == 0, f"{wrong} losses are not finite"
    )
    if run.repeated_loss is not None:  # on the batch of step 0, so that batches do not add noise
        first, fall = run.losses[0], run.losses[0] - run.repeated_loss
        yield condition_check(
            f"{name}: learns",
            fall,
            fall > 0.0,
            f"the loss of the first batch was {first:.6g} and is {run.repeated_loss:.6g} "
            "after the updates",
        )


def norm_checks(
    reference: Trajectory, run: Trajectory, limits: Sequence[float] | None, parameters: float | None
) -> Iterator[Check]:
    """Yield the checks of the gradient norm of every step, and of the final parameters by norm.

    Args:
        reference: The reference run.
        run: The run to check.
        limits: The relative tolerance of each step's gradient norm; None to skip this check.
        parameters: The relative tolerance of each final parameter; None to skip this check. A
            parameter that is NOISE is compared relative to the model's root mean square.
    """
    norms = reference.gradient_norms, run.gradient_norms
    if limits is not None and all(norms):
        differences = [  # 0 where both overflowed and skipped the step
            0.0 if math.isinf(norm) and not math.isfinite(its) else number_difference(norm, its)
            for norm, its in zip(*norms, strict=True)
        ]
        step = worst_index(differences, limits)
        yield _relative_check("gradient norms", differences[step], limits[step], f"step {step}")
    if parameters is None:
        return
    if names := reference.parameters.keys() ^ run.parameters.keys():
        yield condition_check(
            "parameters", len(names), False, f"{sorted(names)[0]} exists on one side only"
        )
        return
    sizes = tensor_differences(reference.parameters, run.parameters)
    name = max(sizes, key=sizes.__getitem__)
    yield _relative_check("parameters by norm", sizes[name], parameters, name)


def condition_check(name: str, value: float | None, holds: bool, otherwise: str) -> Check:
    """Return the check of a condition.

    Args:
        name: The name of the check.
        value: The measurement, None if it is no number.
        holds: True if the condition holds.
        otherwise: The reason if it does not.
    """
    why = "" if holds else otherwise
    return Check(name=name, predicted=None, measured=value, tolerance=0.0, holds=holds, why=why)


def count_check(name: str, number: int, differing: int, why: str) -> Check:
    """Return the check that none of `number` things differs.

    Args:
        name: The name of the check.
        number: The number of compared things.
        differing: The number that differs.
        why: The reason if any differs.
    """
    return Check(
        name=name, predicted=number, measured=number - differing, tolerance=0.0,
        holds=not differing, why=why,
    )  # fmt: skip


def joint_difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> float:
    """Return the relative difference of two sets of tensors, each set taken as one vector.

    Args:
        expected: The right tensors by name.
        actual: The tensors to compare. A tensor that one side lacks counts as zero there.

    Returns:
        The 2-norm of the difference over the 2-norm of `expected`; infinite if shapes differ, if
        `expected` is zero, or if a value is not finite.
    """
    distance = length = 0.0
    for name in {**expected, **actual}:
        one, other = expected.get(name), actual.get(name)
        if one is not None and other is not None and one.shape != other.shape:
            return math.inf
        one = torch.zeros(()) if one is None else one.double()
        other = torch.zeros(()) if other is None else other.double()
        distance += float((other - one).square().sum())
        length += float(one.square().sum())
    return relative_size(math.sqrt(distance), math.sqrt(length)) if length > 0 else math.inf


def _norm_difference(expected: Tensor, actual: Tensor, scale: Magnitude) -> float:
    """Return the relative difference of a tensor; infinite if the shapes differ."""
    if expected.shape != actual.shape:
        return math.inf
    noise = scale.usual * math.sqrt(expected.numel()) if scale.is_noise(expected) else 0.0
    return difference(actual, expected, max(norm(expected), noise))


def tensor_differences(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the relative difference of each tensor.

    Args:
        expected: The right tensors by name.
        actual: The tensors to compare. A tensor that one side lacks counts as zero there.

    Returns:
        The 2-norm of the difference over the 2-norm of the expected tensor, by name. A tensor that
        is NOISE is compared relative to the usual norm of as many elements. All are infinite if the
        expected tensors are zero.
    """
    names = {**expected, **actual}
    scale = Magnitude.measure(expected)
    if scale.usual == 0.0:
        return dict.fromkeys(names, math.inf)
    differences = {}
    for name in names:
        one, other = expected.get(name), actual.get(name)
        one = torch.zeros_like(actual[name]) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        differences[name] = _norm_difference(one, other, scale)
    return differences


def tolerance_share(measured: float, allowed: float) -> float:
    """Return the measured difference as a fraction of the tolerance.

    Args:
        measured: The difference, 0 or more, in the unit of `allowed`.
        allowed: The tolerance.

    Returns:
        measured / allowed; 0 if `measured` is 0. Infinite if a number is not finite, or if only the
        tolerance is 0.
    """
    return relative_size(measured, allowed) if math.isfinite(allowed) else math.inf


def limit_check(name: str, difference: float, allowed: float, why: str) -> Check:
    """Return the check that a difference is within its tolerance.

    Args:
        name: The name of the check.
        difference: The measured difference. NaN fails.
        allowed: The tolerance.
        why: The reason if the difference exceeds it.
    """
    holds = difference <= allowed  # false for NaN
    return Check(
        name=name, predicted=0.0, measured=difference, tolerance=allowed, holds=holds,
        why="" if holds else why,
    )  # fmt: skip


def worst_index(differences: Sequence[float], allowed: Sequence[float]) -> int:
    """Return the index of the difference that uses the largest fraction of its tolerance.

    Args:
        differences: The measured differences, at least one.
        allowed: The tolerance of each difference.
    """
    shares = [tolerance_share(*pair) for pair in zip(differences, allowed, strict=False)]
    return max(range(len(shares)), key=shares.__getitem__)


def _relative_check(name: str, difference: float, tolerance: float, place: str) -> Check:
    why = f"differs by {difference:.3g} (relative) at {place}"
    return limit_check(name, difference, tolerance, why)


Kind: TypeAlias = tuple[Moment, Subject]

_NAMES = {
    (Moment.BATCH, Subject.BATCH): "samples",
    (Moment.FORWARD, Subject.PARAMETERS): "parameters in use",
    (Moment.BACKWARD, Subject.ACTIVATIONS): "gradients of activations",
    (Moment.UPDATE, Subject.PARAMETERS): "parameters after the update",
    (Moment.UPDATE, Subject.OPTIMIZER): "optimizer state",
    (Moment.UPDATE, Subject.AVERAGE): "moving averages",
}


def _check_name(moment: Moment, subject: Subject) -> str:
    """Return the name of the check for a moment and a subject."""
    if moment is Moment.START and subject in (Subject.PARAMETERS, Subject.OPTIMIZER):
        return f"initial {subject}"
    return _NAMES.get((moment, subject), str(subject))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMove:
    """The movement of a parameter on this rank.

    It has the elements at the start of the run, and before and after the step, of the reference and
    of the loop. `sure` marks elements whose gradients have exceeded rounding so far.
    """

    parameter: Tensor
    origin: Tensor
    before: Tensor
    after: Tensor
    run_before: Tensor
    run_after: Tensor
    sure: Tensor

    @property
    def is_unchanged(self) -> bool:
        return self.run_before.equal(self.run_after)

    @property
    def has_reference_moved(self) -> bool:
        """True if most of the `sure` elements moved in the reference, so that rounding does not
        explain a loop that did not learn."""
        moved = (self.after != self.before) & self.sure
        return 2 * int(moved.sum()) > int(self.sure.sum())


@dataclass(slots=True)
class LargestDifference:
    """The largest difference of one kind over steps, ranks and tensors."""

    name: str
    tolerance: float
    difference: float = 0.0
    place: str = ""
    count: int = 0

    @property
    def share(self) -> float:
        """The largest difference as a fraction of the tolerance."""
        return tolerance_share(self.difference, self.tolerance)

    def record(self, difference: float, place: str, tolerance: float = 0.0) -> None:
        """Record a difference, and keep it if it is the largest or NaN.

        Args:
            difference: The difference, relative as in `tolerance`.
            place: The name of the tensor in which it occurs.
            tolerance: The tolerance that applied to it; the largest one is kept.
        """
        self.count += 1
        self.tolerance = max(self.tolerance, tolerance)
        if not difference <= self.difference:  # true for NaN
            self.difference, self.place = difference, place

    def check(self, first: Mismatch | None = None) -> Check:
        """Return the check that no tensor of the kind differs; `first` is the first mismatch, if
        any."""
        check = _relative_check(self.name, self.difference, self.tolerance, self.place)
        if first is None:
            return check
        words = f" ({first.told})" if first.told else ""
        return replace(
            check,
            holds=False,
            why=f"differs at {first.place}, step {first.step}, rank {first.rank}{words}",
        )


@dataclass(slots=True, kw_only=True)
class Differences:
    """The differences of one rank in one step.

    Attributes:
        step: The step, from 0.
        rank: This rank.
        mismatches: The differences that exceed their tolerance.
        moves: The movement of each parameter in the step, by name.
        largest: The largest difference of each kind.
        modules: The position of each module in the order of execution, by path.
    """

    step: int
    rank: int
    mismatches: list[Mismatch] = field(default_factory=list)
    moves: dict[str, ParameterMove] = field(default_factory=dict)
    largest: dict[Kind, LargestDifference] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)

    def record(self, kind: Kind, difference: float, tolerance: float, name: str = "") -> None:
        """Record a difference, if it is the largest of its kind.

        Args:
            kind: The moment of the step and the subject that was compared.
            difference: The relative difference; infinite if no value can be compared.
            tolerance: The largest allowed difference.
            name: The name of the tensor, "" if there is none.
        """
        largest = self.largest.setdefault(kind, LargestDifference(_check_name(*kind), tolerance))
        largest.record(difference, name, tolerance)

    def compare(
        self,
        moment: Moment,
        subject: Subject,
        name: str,
        *,
        difference: float,
        tolerance: float,
        way: DifferenceKind = DifferenceKind.VALUE,
        index: int = 0,
        words: str = "",
    ) -> None:
        """Record a difference, and add a mismatch if it exceeds the tolerance.

        A difference of shape or dtype is always a mismatch.

        Args:
            moment: The moment of the step.
            subject: The kind of value that was compared.
            name: The name of the tensor.
            difference: The relative difference.
            tolerance: The largest allowed difference.
            way: How the tensors differ. Default: in their values.
            index: The number of the micro-batch, or the position in the sequence of collectives.
            words: A description of the mismatch. Default: the size of the difference.
        """
        self.record((moment, subject), difference, tolerance, name)
        if way is not DifferenceKind.VALUE or difference > tolerance:
            self.mismatches.append(
                Mismatch(
                    step=self.step, moment=moment, subject=subject, name=name, rank=self.rank,
                    way=way, difference=difference, tolerance=tolerance, index=index, told=words,
                )
            )  # fmt: skip

    def add_mismatch(
        self,
        moment: Moment,
        subject: Subject,
        name: str,
        words: str,
        way: DifferenceKind = DifferenceKind.VALUE,
    ) -> None:
        """Add a mismatch of an object that is not a tensor, or that only one side has.

        Its difference counts as infinite, with tolerance 0.

        Args:
            moment: The moment of the step.
            subject: The kind of object that was compared.
            name: The name of the object.
            words: The description of the mismatch.
            way: How the sides differ. Default: in their values.
        """
        self.record((moment, subject), math.inf, 0.0, name)
        self.mismatches.append(
            Mismatch(
                step=self.step, moment=moment, subject=subject, name=name, rank=self.rank, way=way,
                told=words,
            )
        )  # fmt: skip


_OF_RANK = tuple[dict[str, int], list[Mismatch], dict[Kind, LargestDifference]]


class AllDifferences:
    """The differences of all ranks over all steps.

    `mismatches` are ordered by occurrence and equal on all ranks. `parameters` gives the order of
    the model's parameters.

    Args:
        ranks: The ranks.
        parameters: The names of the parameters, in the model's order.
    """

    def __init__(self, ranks: Ranks, parameters: Iterable[str] = ()) -> None:
        self.ranks = ranks
        self.mismatches: list[Mismatch] = []
        self._largest: dict[Kind, LargestDifference] = {}
        self._parameters = {name: place for place, name in enumerate(parameters)}
        self._modules: dict[str, int] = {}

    def gather_step(self, own: Differences) -> bool:
        """Add every rank's differences of a step; return True if anything differs. All ranks must
        call it."""
        self._modules |= own.modules
        mismatches = list(self.mismatches)
        mine = self._modules, own.mismatches, own.largest
        for places, its, kinds in self.ranks.gather(mine, _OF_RANK):
            self._modules |= places
            mismatches += its
            for kind, of_rank in kinds.items():
                largest = self._largest.setdefault(kind, LargestDifference(of_rank.name, 0.0))
                place = f"{of_rank.place}, step {own.step}"
                largest.record(of_rank.difference, place, of_rank.tolerance)
        self.mismatches = []
        self.add_mismatches(mismatches)
        return bool(self.mismatches)

    def add_mismatches(self, mismatches: Iterable[Mismatch]) -> None:
        """Add mismatches that all ranks have."""
        self.mismatches = sorted([*self.mismatches, *mismatches], key=self._time_key)

    def raise_tolerances(self, mismatches: Sequence[Mismatch]) -> None:
        """Raise the tolerances to include these mismatches, and drop them. All ranks must pass the
        same ones."""
        for mismatch in mismatches:
            largest = self._largest[mismatch.moment, mismatch.subject]
            largest.tolerance = max(largest.tolerance, mismatch.difference)
        self.mismatches = [its for its in self.mismatches if its not in mismatches]

    @property
    def first_mismatches(self) -> list[Mismatch]:
        """The mismatches of the earliest step and moment."""
        return [its for its in self.mismatches if its.order_key == self.mismatches[0].order_key]

    def checks(self, since: Moment = Moment.START) -> Iterator[Check]:
        """Yield a check per kind of difference from moment `since` on.

        Counters and buffers of the start share a check with later ones. Differences between
        replicas are left out, because they do not compare the run with a single device.
        """
        mismatches = [its for its in self.mismatches if not its.between]
        first = {_check_name(its.moment, its.subject): its for its in reversed(mismatches)}
        rows: dict[str, LargestDifference] = {}
        for its in (its for (moment, _), its in self._largest.items() if moment >= since):
            rows[its.name] = max(rows.get(its.name, its), its, key=lambda row: row.difference)
        yield from (largest.check(first.get(name)) for name, largest in rows.items())

    def _time_key(self, mismatch: Mismatch) -> tuple[int, ...]:
        """Return the sort key of a mismatch: parameters in use come before their module's
        output."""
        is_used = mismatch.moment is Moment.FORWARD and mismatch.subject is Subject.PARAMETERS
        module = mismatch.name.rpartition(".")[0] if is_used else mismatch.name
        place = self._parameters.get(mismatch.name, len(self._modules))
        place = self._modules.get(module, place)
        is_loss = mismatch.subject is Subject.LOSS
        return (
            *mismatch.order_key, int(is_loss), mismatch.index,
            -place if mismatch.moment is Moment.BACKWARD else place, not is_used, mismatch.rank,
        )  # fmt: skip
