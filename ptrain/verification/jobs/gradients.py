"""Explain gradients that differ from the reference's by arithmetic or by the samples of the ranks.

A hypothesis is a multiple, a partial sum over an axis, missing or reweighted micro-batches, or the
gradient of the previous step. Each has a sentence and a fix: the gradients that the loop would have
without the fault. The fix is compared with the reference on all elements of all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from statistics import fmean

from torch import Tensor

from ptrain.report.finding import POSSIBLE, RULED_OUT, Certainty, Mismatch, RootCause, Subject
from ptrain.verification.jobs.evidence import (
    After,
    Contributions,
    Fix,
    JobEvidence,
    LossFactor,
    Sample,
    add_trial,
    fit_contributions,
    try_fix,
    unknown_factor,
)
from ptrain.verification.jobs.job import RANKS, Ranks, Tolerance
from ptrain.verification.jobs.root_causes import (
    axis_text,
    explain_samples,
    list_families,
    make_root_cause,
    make_untested_cause,
    unexplained_gradients_cause,
)
from ptrain.verification.parts import (
    DegreeProduct,
    absent_addends,
    factor_text,
    fit_combination,
    is_even,
    matching_products,
    missing_sum_factor,
)

SEPARATE = "mean of separate micro-batches"
_MICRO = "micro-batches"
_NAMES = {RANKS: "all ranks", _MICRO: "the micro-batches"}
_OF_LOSS, _REDUCED = " in the loss", " after the backward pass"
_LOOSE = 100.0  # tolerances of a gradient up to which a fit of samples holds
_LOOSEST = 0.1  # upper bound for 16 bits, whose tolerances are large
_FEWEST = 1e-6  # lower bound for fp64, whose tolerances are small
_GONE = 1e-2  # share of a gradient below which it is absent: rounding of 16 bits leaves less
_EVEN = 1e-3  # relative: weights of micro-batches that differ by less are equal


Hypothesis = tuple[RootCause, Fix | None]


def explain_gradients(
    mismatches: Sequence[Mismatch],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
    after: After,
) -> RootCause:
    """Return the first hypothesis that explains the mismatching gradients. All ranks call it.

    Args:
        mismatches: The mismatches of the gradients that the optimizers received.
        evidence: The gradients of all ranks.
        ranks: The ranks.
        limit: The tolerances.
        after: Describes the differences that remain after a fix.

    Returns:
        The root cause, proven or fitting. If no hypothesis fits, it is unexplained and lists the
        fixes that were tried, or names a rounding to a coarser dtype.
    """
    names = [name for name in evidence.samples if any(its.name == name for its in mismatches)]
    unexplained = unexplained_gradients_cause(mismatches, evidence, names, ranks)
    out: list[str] = []
    for said, fix in GradientCase(
        mismatches, evidence, ranks, _fit_tolerance(limit), names
    ).hypotheses():
        likeliest = add_trial(said, fix, evidence, ranks, limit, after)
        if likeliest.certainty is not Certainty.UNEXPLAINED:
            return likeliest
        out.append(likeliest.tried.removeprefix(RULED_OUT))
    is_known = unexplained.certainty is not Certainty.UNEXPLAINED or not out
    return unexplained if is_known else unexplained.as_unexplained("; ".join(out))


def _fit_tolerance(limit: Tolerance) -> float:
    """Return the relative residual up to which a fit holds. A fault, a factor, leaves more."""
    return min(max(_LOOSE * limit.gradients, _FEWEST), _LOOSEST)


class GradientCase:
    """The differing gradients of one step, and the hypotheses that may explain them."""

    def __init__(
        self, mismatches: Sequence[Mismatch], evidence: JobEvidence, ranks: Ranks,
        tolerance: float, names: Sequence[str],
    ) -> None:  # fmt: skip
        self.mismatches, self.evidence, self.ranks = mismatches, evidence, ranks
        self.tolerance, every = tolerance, evidence.samples
        self.scale = self._common_factor()
        chosen = names if self.scale == 1.0 else every
        scaled = {name: every[name].divide_gradients(self.scale) for name in chosen}
        self.samples = {name: its for name, its in scaled.items() if not self._is_correct(its)}

    def _is_correct(self, sample: Sample) -> bool:
        """Return True if the gradient matches the reference's, or if no rank holds the elements."""
        fit = sample.fit_multiple()
        is_one = fit.is_within(self.tolerance) and abs(fit.factor - 1) <= self.tolerance
        return is_one or not sample.holding_ranks()

    def _common_factor(self) -> float:
        """Return the factor of most parameters, if the others differ in another way; else 1.0.

        This happens if gradients are clipped by a norm to which wrong gradients contribute.
        """
        fits = [its.fit_multiple() for its in self.evidence.samples.values() if its.holding_ranks()]
        even = sorted(fit.factor for fit in fits if fit.is_within(self.tolerance))
        if 2 * len(even) <= len(fits) or len(even) == len(fits):
            return 1.0
        middle = even[len(even) // 2]
        alike = all(abs(factor / middle - 1) <= self.tolerance for factor in even)
        return middle if alike and math.isfinite(middle) and middle > 0 else 1.0

    @cached_property
    def joint_sample(self) -> Sample:
        """The parameters that differ, as one sample."""
        return Sample.concatenate(self.samples.values())

    @cached_property
    def contributions(self) -> Contributions | None:
        """The contributions of the micro-batches to the parameters that differ, or None."""
        return fit_contributions(self.joint_sample)

    def hypotheses(self) -> Iterator[Hypothesis]:
        """Return the hypotheses that fit the samples, simplest first."""
        ways = (
            self._missing_hypotheses, self._multiple_hypotheses, self._partial_sum_hypotheses,
            self._earlier_gradient_hypotheses, self._micro_batch_hypotheses,
        )  # fmt: skip
        return chain.from_iterable(way() for way in ways if self.samples)

    def _fix(
        self, words: str, undone: Callable[[Sample, int], Tensor],
        loss_factor: LossFactor = unknown_factor,
    ) -> Fix:  # fmt: skip
        """Return a fix of the parameters that differ, after a division by the common factor."""
        is_scaled = abs(self.scale - 1) > self.tolerance
        words = f"divided by {self.scale:.4g} and {words}" if is_scaled else words
        return Fix(
            names=set(self.samples), undo=undone, words=words, scale=self.scale,
            loss_factor=loss_factor,
        )  # fmt: skip

    def _make_root_cause(
        self, axis: str, factor: str, sentence: str, fix: str, *, ranks: Iterable[int] = (),
        state: Subject = Subject.GRADIENTS, names: Sequence[str] = (),
    ) -> RootCause:  # fmt: skip
        """Return the root cause of the mismatches of `names` (default: all that differ)."""
        names = names or [*self.samples]
        here = [mismatch for mismatch in self.mismatches if mismatch.name in names]
        return make_root_cause(
            here or self.mismatches, self.ranks, state=state, axis=axis, factor=factor,
            names=names, who=ranks or {mismatch.rank for mismatch in here},
            sentence=sentence, fix=fix,
        )  # fmt: skip

    def _count(self, names: Collection[str]) -> str:
        """Return a phrase such as "3 of 8 parameters"."""
        total = len(self.evidence.samples)
        return f"{'all' if len(names) == total else f'{len(names)} of'} {total} parameters"

    def _missing_hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the hypothesis that ranks have no gradient, or one that is not finite."""
        lacking = {name: its.ranks_without_gradient() for name, its in self.samples.items()}
        if names := [name for name, ranks in lacking.items() if ranks]:
            without = sorted({rank for its in lacking.values() for rank in its})
            holders = sorted(
                {rank for name in names for rank in self.samples[name].holding_ranks()}
            )
            is_everywhere, count = without == holders, self._count(names)
            yield self._make_root_cause(
                "" if is_everywhere else self.ranks.differing_axis(holders),
                "no gradient",
                f"{count[0].upper()}{count[1:]} get a gradient in the reference, but "
                f"{'no rank' if is_everywhere else 'not every rank'} that holds them has one when "
                "the optimizer steps: .grad is None or zero.",
                "Let backward reach these parameters, and hand their gradients to the optimizer.",
                ranks=without, names=names,
            ), self._fix(
                "none is there when the optimizer steps; with the reference gradient instead",
                lambda sample, rank: sample.truth
                if not bool(sample.gradients[rank].nan_to_num().any())
                else sample.gradients[rank],
            )  # fmt: skip
        if bool(self.joint_sample.gradients.isinf().any()):  # NaN marks elements that a rank lacks
            yield self._make_root_cause(
                "", "not finite", "The gradient has an infinity or a NaN.",
                "Look for a division by zero, a log of zero or an overflow of 16 bits.",
            ), None  # fmt: skip

    def _multiple_hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the hypothesis that the gradients are one multiple of the reference's."""
        fit = self.joint_sample.fit_multiple()
        if fit.is_within(self.tolerance):
            yield self._explain_factor(fit.factor), self._fix(
                f"divided by {fit.factor:.4g}",
                lambda sample, rank: sample.gradients[rank] / fit.factor,
                lambda rank, losses: 1 / fit.factor,
            )  # fmt: skip

    def _explain_factor(self, factor: float) -> RootCause:
        """Return the root cause of a common factor.

        It names the degrees whose product is the factor. If that is ambiguous, or not a product, it
        lists possible causes.
        """
        sizes, where = self._possible_degrees(factor)
        fits = matching_products(factor, sizes, self.tolerance)
        alike = [fit for fit in fits if _degree_exponents(fit) == _degree_exponents(fits[0])]
        verb = "not divided by" if factor > 1 else "divided twice by"
        causes = [
            f"{verb} "
            + " and ".join(f"{_NAMES.get(n, f'the ranks of {n}')} ({sizes[n]})" for n in fit.axes)
            for fit in alike
            if set(_degree_exponents(fit)) in ({1.0}, {-1.0})
        ]
        text = str(fits[0]) if len(alike) == 1 else f"× {factor:.4g}"
        what = f"The gradient of {self._count(self.samples)} is {factor:.4g} times the reference"
        if where and len(causes) == len(alike) == 1:
            return self._make_root_cause(
                "+".join(axis for axis in fits[0].axes if axis != _MICRO),
                f"{text} ({_MICRO})" if fits[0].axes == (_MICRO,) else text,
                f"{what}: it is {causes[0]}{where}.",
                "Divide by their number once.",
                state=Subject.LOSS if where == _OF_LOSS else Subject.GRADIENTS,
            )
        every = len(self.samples) == len(self.evidence.samples)
        is_norm = not fits and every and where != _OF_LOSS
        if is_norm or where != _REDUCED:  # clipping normalizes the scale of a loss
            causes.append("another scale of the loss")
        causes += [f"another scale{_REDUCED}"] * (where == _REDUCED)
        causes += ["another clipping norm"] * is_norm
        return self._make_root_cause(
            "", text, f"{what}. {POSSIBLE}{'; '.join(causes)}.",
            f"Undo the one that holds: this factor must be {1 / factor:.4g} times what it is.",
            state=Subject.NORM if is_norm else Subject.GRADIENTS,
        )  # fmt: skip

    def _possible_degrees(self, factor: float) -> tuple[dict[str, int], str]:
        """Return the degrees that may have caused a factor, and a phrase for its place.

        The weight of a micro-batch's contribution, in the loop and in the reference, shows whether
        the factor is in the loss or in the reduction. The phrase is "" if the weights are unknown.
        """
        degrees, micro = self.ranks.degrees, {_MICRO: self.evidence.micro_batches}
        contributed = self.contributions
        is_known = contributed is not None and contributed.of_truth.is_within(self.tolerance)
        if contributed is None or not (is_known and contributed.of_loop):
            return degrees | micro, ""
        actual = fmean(next(iter(contributed.of_loop.values())).coefficients)
        right = fmean(contributed.of_truth.coefficients)
        # some ranks may not use these parameters: take the data ranks of all parameters
        data = (self.evidence.contributions or contributed).data_ranks
        # A mean over n ranks weights each contribution by 1 / n, a sum by 1.
        is_mean, is_sum = (abs(actual * n - 1) <= self.tolerance for n in (len(data), 1))
        if not (is_mean or is_sum):
            return degrees, _REDUCED
        axes = {
            axis: len(groups[0])
            for axis, groups in self.ranks.axes.items()
            if any(len(set(group) & set(data)) > 1 for group in groups)
        }
        if axes and is_sum and abs(right * len(data) - 1) <= self.tolerance:
            return axes, ", neither in the loss nor in the reduction"
        if axes and is_mean and abs(right - 1) <= self.tolerance:
            return axes | micro, ", in the loss and in the reduction"
        return micro if matching_products(factor, micro, self.tolerance) else degrees, _OF_LOSS

    def _partial_sum_hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the hypotheses that an all-reduce over an axis is missing, up to one factor."""
        truths = self.joint_sample.truth.expand_as(self.joint_sample.gradients)
        for axis, groups in self.ranks.sum_groups.items():
            total = missing_sum_factor(self.joint_sample.gradients, truths, groups, self.tolerance)
            if total is None:
                continue
            size, kind, factor = len(groups[0]), "sum", total
            if abs(factor * size - 1) <= self.tolerance:
                kind, factor = "mean", 1.0
            is_one = abs(factor - 1) <= self.tolerance
            besides = "" if is_one else f", {factor_text(factor, {})}"
            group_of = {rank: list(group) for group in groups for rank in group}
            times = "" if abs(total - 1) <= self.tolerance else f", times {total:.4g}"
            yield self._make_root_cause(
                axis.partition("+")[0],
                f"missing all-reduce {axis_text(axis)}{besides}",
                f"Each rank has a partial gradient of {self._count(self.samples)}: the {kind} "
                f"{axis_text(axis)} ({size}) is the reference gradient"
                f"{besides and f' times {1 / factor:.4g}'}.",
                f"All-reduce it {axis_text(axis)} ({kind}) before the optimizer steps.",
            ), self._fix(
                f"summed {axis_text(axis)}{times}",
                partial(_sum_over_group, group_of, total),
            )  # fmt: skip

    def _earlier_gradient_hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the hypothesis that the previous step's gradient was taken, or added."""
        own, truth, before = self.joint_sample.held_rows()
        both = fit_combination(own, [truth, before])
        if not before.any() or not both.is_within(self.tolerance):
            return
        this, earlier = both.coefficients
        if is_stale := abs(this) <= min(self.tolerance, _GONE):
            said = self._make_root_cause(
                "", "stale by 1 step", "The optimizer takes the gradient of the previous step.",
                "Wait for this step's reduction, or copy it to the optimizer, before it steps.",
            )  # fmt: skip
        else:
            said = self._make_root_cause(
                "", "previous step added",
                "The gradient still includes that of the previous step.",
                "Set gradients to None after every update, before the first backward of the next "
                "step.",
            )  # fmt: skip
        yield said, self._fix(
            f"minus {earlier:.4g} times those of the previous step",
            # a stale gradient minus the earlier one is zero: replace it by the reference's
            lambda sample, rank: sample.gradients[rank] - earlier * sample.before
            + is_stale * sample.truth,
        )  # fmt: skip

    def _micro_batch_hypotheses(self) -> Iterator[Hypothesis]:
        """Yield the hypothesis that micro-batches are missing, or have other weights.

        It requires that each rank's gradient is a sum of micro-batch contributions. Missing ones
        must be the same on all ranks.
        """
        its = self.contributions
        if its is None or not its.of_truth.is_within(self.tolerance) or not its.of_loop:
            return
        fits, rounding = its.of_loop.values(), 10 * self.tolerance
        is_known = len(fits) == len(self.joint_sample.holding_ranks()) and not absent_addends(
            its.of_truth.coefficients
        )
        if not is_known or not all(fit.is_within(self.tolerance) for fit in fits):
            return
        right = is_even(its.of_truth.coefficients, rounding)
        evens = [is_even(fit.coefficients, rounding) for fit in fits]
        lacking = {rank: absent_addends(fit.coefficients) for rank, fit in its.of_loop.items()}
        lacks = any(lacking.values())
        if all(evens) and right:
            return
        if all(evens) or (right and not any(evens) and not lacks):
            said = self._explain_weights(its, is_loss=all(evens))
        elif lacks and len({*lacking.values()}) == 1:
            said = self._explain_missing_contributions(its, lacking[min(lacking)])
        else:
            return
        factor = its.loss_factor if all(evens) else unknown_factor
        words = "with the weight that each micro-batch has in the reference"
        yield said, self._fix(words, its.reweight, factor)

    def _explain_missing_contributions(
        self, its: Contributions, missing: Collection[int]
    ) -> RootCause:
        """Return the root cause of missing contributions, given their indices."""
        count = self.evidence.micro_batches
        ranks = sorted(rank for rank, own in its.own.items() if {*own} & {*missing})
        numbers = sorted({its.labels[index][1] for index in missing})
        listed, who = (", ".join(map(str, row)) for row in (numbers, ranks))
        is_all = len(numbers) == count
        return self._make_root_cause(
            self.ranks.separating_axis(ranks) if is_all else "",
            f"rank {who} missing" if is_all else f"micro-batch {listed} missing",
            f"The gradient lacks {'all' * is_all or f'micro-batch {listed}'} of rank {who}"
            f"{'' if is_all else f' (of {count})'}: it reaches no optimizer in this step.",
            "Reduce the gradients of all ranks. Add up those of all micro-batches, without setting "
            "them to None or zero in between, and synchronize them before the optimizer steps.",
            ranks=ranks,
        )  # fmt: skip

    def _explain_weights(self, its: Contributions, *, is_loss: bool) -> RootCause:
        """Return the root cause of micro-batches with other weights than in the reference.

        With `is_loss`, the weights are even in the loop only; else they are even in the reference
        only.
        """
        right = its.of_truth.coefficients
        actual = next(iter(its.of_loop.values())).coefficients
        ratios = [own / other for own, other in zip(actual, right, strict=True)]
        several = self.evidence.micro_batches > 1
        listed = ", ".join(
            f"{f'micro-batch {number} of ' * several}rank {rank}: × {ratio:.3g}"
            for (rank, number), ratio in list(zip(its.labels, ratios, strict=True))[:4]
        )
        same, fix = (
            ("in the loop, but not in the reference", "Divide the sum of the loss over all tokens "
             "by the number of tokens in the full global batch")
            if is_loss
            else ("in the reference, but not in the loop", "Clip and divide the full gradient")
        )  # fmt: skip
        return self._make_root_cause(
            "" if several else self.ranks.differing_axis(its.data_ranks),
            f"{'local normalisation' if is_loss else 'scaled before the sum'}, "
            f"× {min(ratios):.3g} to × {max(ratios):.3g}",
            f"The gradient of each {'micro-batch' if several else 'rank'} has the same weight in "
            f"the sum {same}; they differ by these factors: {listed}.",
            f"{fix}.",
            state=Subject.LOSS if is_loss else Subject.GRADIENTS,
        )


def _degree_exponents(fit: DegreeProduct) -> list[float]:
    """Return the sorted exponents of a product of degrees."""
    return sorted(power for _, power in fit.powers)


def _sum_over_group(
    group_of: Mapping[int, Sequence[int]], factor: float, sample: Sample, rank: int
) -> Tensor:
    """Return a rank's gradient summed over its group, times a factor."""
    return sample.gradients[group_of[rank]].sum(0) * factor


def explain_sample_faults(
    mismatches: Sequence[Mismatch], evidence: JobEvidence, ranks: Ranks
) -> RootCause | None:
    """Return the root cause of wrong samples on the ranks, or None if they show no fault.

    None also means that rows have other lengths than the reference's, and cannot be compared.

    Args:
        mismatches: The mismatches of the step.
        evidence: The evidence of all ranks.
        ranks: The ranks.
    """
    if evidence.ledger:
        return explain_samples(evidence.ledger, mismatches, ranks)
    reports = evidence.rows
    if any(report.sliced for report in reports) or not all(report.count for report in reports):
        return None  # parts of samples cannot be compared
    count = sum(report.count for report in reports)
    unknown = sum(report.unknown for report in reports)
    if not unknown:
        return None
    odd = [rank for rank, its in enumerate(reports) if its.unknown]
    other = make_untested_cause(
        Subject.BATCH, "other samples", "samples",
        f"{unknown} of {count} samples that the model is given are not in the global batch, on "
        f"ranks {', '.join(map(str, odd))}.",
        "Check how these ranks draw their samples (the seed, the epoch, the position in the "
        "data after a resume); ranks of tensor parallelism must read the same ones.",
        step=mismatches[0].step, ranks=odd, axis=ranks.separating_axis(odd),
    )  # fmt: skip
    is_clear = len(odd) < ranks.size and all(its.unknown in (0, its.count) for its in reports)
    words = "the inputs of the model were compared with the global batch, sample by sample"
    return other.as_fitting(words) if is_clear else other


def explain_separate_means(
    mismatches: Sequence[Mismatch],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
) -> RootCause | None:
    """Return a root cause if only the loop's gradients are means over separate micro-batches.

    Then the loss of a sample differs between the sides, or depends on other samples of the batch.
    Returns None if the fit does not hold on all elements. All ranks call it.

    Args:
        mismatches: The mismatches of the gradients.
        evidence: The evidence of all ranks.
        ranks: The ranks.
        limit: The tolerances.
    """
    contributed, reports = evidence.contributions, evidence.rows
    if contributed is None or contributed.of_truth.is_within(_fit_tolerance(limit)):
        return None
    fits = contributed.of_loop.values()
    if not fits or not all(is_even(fit.coefficients, _EVEN) for fit in fits):
        return None
    if any(report.sliced for report in reports) or not all(report.count for report in reports):
        return None
    names = [name for name in evidence.samples if any(d.name == name for d in mismatches)]
    where = make_untested_cause(
        Subject.LOSS, SEPARATE, list_families(names),
        "The optimizer takes the mean of the micro-batches computed separately, but the reference "
        f"gradient is not such a mean. {POSSIBLE}labels, masks or weights of the loss that belong "
        "to other samples; another number that the loss computes for each (a local count, a "
        "margin, the output of a frozen model); something that depends on samples of several "
        "ranks or micro-batches (batch statistics, a loss of pairs, a balancing term, a mean of "
        "ratios); a loss that is gathered over the ranks in another way; a term of the loss that "
        "is divided by another number.",
        "Compute this part of the loss over the full global batch, as the reference does.",
        step=mismatches[0].step, ranks=range(ranks.size),
    )  # fmt: skip
    fix = Fix(
        names=set(evidence.samples), undo=contributed.add_residual,
        words="computed by the plain module from the samples given to the ranks",
    )  # fmt: skip
    left, gradients = try_fix(fix, evidence.own, ranks, limit)
    if gradients is None:
        return None
    return where.as_located(f"{fix.words}, {evidence.match_words} the loop to {left:.1e}")
