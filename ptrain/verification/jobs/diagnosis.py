"""Derive root causes from differences: the state, the axis, the factor, and a sentence to act on.

A diagnosis explains one symptom of some parameters in words, and names the change that would undo
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ptrain.report.finding import Certainty, Culprit, Departure, Subject
from ptrain.verification.jobs.culprits import culprit, families, over_axis, unclear
from ptrain.verification.jobs.evidence import JobEvidence, Samples
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.symptoms import (
    Contributions,
    Cure,
    Symptom,
    SymptomKind,
    by_micro_batches,
    common_factor,
    contributions,
    own_factors,
    stale_factor,
    symptom,
    tried,
)
from ptrain.verification.parts import factor_text, is_even, products
from ptrain.verification.updates.swaps import coarse_sum

_NEAR_NORM = 0.01  # of the reference's, in coarse dtypes


class Diagnosis:
    """One symptom of some parameters, put into words."""

    def __init__(
        self,
        departures: Sequence[Departure],
        evidence: JobEvidence,
        ranks: Ranks,
        tolerance: float,
        names: Sequence[str],
        first: Symptom,
    ) -> None:
        self.departures, self.evidence, self.ranks = departures, evidence, ranks
        self.tolerance, self.names, self.first = tolerance, list(names), first
        self.samples = [evidence.samples[name] for name in self.names]
        every = len(self.names) == len(evidence.samples)
        self.count = (
            f"{'all' if every else f'{len(self.names)} of'} {len(evidence.samples)} parameters"
        )

    @cached_property
    def contributed(self) -> Contributions | None:
        """What the micro-batches give of these parameters."""
        return contributions(self.samples)

    def cure(self, scale: float) -> Cure | None:
        """What undoes the symptom; None where nothing does."""
        symptom, contributed, factors = self.first, None, None
        factor, axis = symptom.factor, symptom.axis
        match symptom.kind:
            case SymptomKind.EVEN:
                words = f"divided by {factor:.4g}"
            case SymptomKind.PARTIAL:
                times = "" if abs(factor - 1) <= self.tolerance else f", times {factor:.4g}"
                words = f"summed {over_axis(axis)}{times}"
            case SymptomKind.STALE:
                words = f"compared with {factor:.4g} times those of the step before"
            case SymptomKind.ADDED:
                symptom = replace(symptom, factor=stale_factor(self.samples)[1])
                words = f"less {symptom.factor:.4g} times those of the step before"
            case (
                SymptomKind.SOME | SymptomKind.LOCAL | SymptomKind.WEIGHTS | SymptomKind.UNEVEN
            ) if self.contributed:
                contributed = self.contributed
                words = "with the weight that each micro-batch has on one device"
            case SymptomKind.EACH:
                factors = own_factors([sample.scaled(scale) for sample in self.samples])
                words = "divided by a factor of each rank's own"
            case SymptomKind.EMPTY:
                words = "none is there when the optimizer steps; with one device's instead"
            case _:
                return None
        is_scaled = abs(scale - 1) > self.tolerance
        both = f"divided by {scale:.4g} and " if is_scaled else ""
        return Cure(
            symptom=symptom, names=set(self.names), scale=scale, contributed=contributed,
            factors=factors, words=both + words,
        )  # fmt: skip

    def culprit(self) -> Culprit:
        match self.first.kind:
            case SymptomKind.NOT_FINITE:
                return self._say("", "not finite", "The gradient has an infinity or a NaN.")
            case SymptomKind.EMPTY:
                return self._empty()
            case SymptomKind.PARTIAL:
                return self._partial()
            case SymptomKind.STALE:
                return self._say(
                    "", "stale by 1 step", "The optimizer is given the gradient of the step before."
                )
            case SymptomKind.ADDED:
                return self._say(
                    "",
                    "the step before added",
                    "The gradient of the step before is still in it: set gradients to None after "
                    "every update, before the first backward of the next step.",
                )
            case SymptomKind.LOCAL:
                return self._local()
            case SymptomKind.SOME:
                return self._some()
            case SymptomKind.WEIGHTS if self.contributed:
                return self._weights(self.contributed)
            case SymptomKind.UNEVEN if self.contributed:
                return self._uneven(self.contributed)
            case SymptomKind.EVEN:
                return self._even()
            case _:
                return self._by_rank()

    def _say(
        self,
        axis: str,
        factor: str,
        sentence: str,
        *,
        ranks: Sequence[int] = (),
        state: Subject = Subject.GRADIENTS,
    ) -> Culprit:
        here = [departure for departure in self.departures if departure.name in self.names]
        return culprit(
            here or self.departures, self.ranks, state=state, axis=axis, factor=factor,
            names=self.names, who=ranks or {departure.rank for departure in here},
            sentence=sentence,
        )  # fmt: skip

    def _empty(self) -> Culprit:
        holders = {rank for sample in self.samples for rank in sample.holders()}
        own = self.evidence.own
        seen = [own.emptiness(name) for name in self.names if name in own.holds]
        kinds = {kind for kinds in self.ranks.gather(seen) for kind in kinds if kind}
        whose = "no rank" if set(self.first.ranks) == holders else "not every rank"
        return self._say(
            self.ranks.axis_of(sorted(holders)) if whose == "not every rank" else "",
            "no gradient",
            f"{self.count[0].upper()}{self.count[1:]} get a gradient on one device, and here "
            f"{whose} that holds them has one when the optimizer steps: "
            f"{' or '.join(sorted(kinds)) or 'it is nothing but zeros'}.",
            ranks=self.first.ranks,
        )

    def _partial(self) -> Culprit:
        axis = self.first.axis
        size = len(self.ranks.summed[axis][0])
        kind, factor = "sum", self.first.factor
        if abs(factor * size - 1) <= self.tolerance:
            kind, factor = "mean", 1.0
        besides = "" if abs(factor - 1) <= self.tolerance else f", {factor_text(factor, {})}"
        return self._say(
            axis.partition("+")[0],
            f"missing all-reduce {over_axis(axis)}{besides}",
            f"Of the gradient of {self.count} every rank keeps a part of its own: the {kind} "
            f"{over_axis(axis)} ({size}) is what one device has"
            f"{besides and f' times {1 / factor:.4g}'}. All-reduce it {over_axis(axis)} ({kind}) "
            "before the optimizer steps.",
        )

    def _local(self) -> Culprit:
        over = over_axis(self.first.axis)
        return self._say(
            self.first.axis.partition("+")[0],
            f"missing all-reduce {over}",
            f"The gradient of {self.count} has on each rank what the ranks at its own place give, "
            f"and of no other: reduce it {over} before the optimizer steps.",
        )

    def _some(self) -> Culprit:
        ranks, numbers, count = self.first.ranks, self.first.numbers, self.evidence.micro_batches
        listed = ", ".join(map(str, numbers))
        if set(numbers) == set(range(count - 1)) and count > 1:
            return self._say(
                "",
                f"last of {count} micro-batches only",
                f"Of {count} micro-batches only the last one's gradient reaches the optimizer: "
                "something sets gradients to None or zero, or overwrites them, between them.",
            )
        if len(numbers) == count:
            who = ", ".join(map(str, ranks))
            return self._say(
                self.ranks.axis_of([ranks[0], (ranks[0] + 1) % self.ranks.size]),
                f"rank {who} missing",
                f"What rank {who} computes reaches no optimizer: its part is missing from the sum.",
                ranks=ranks,
            )
        return self._say(
            "",
            f"micro-batch {listed} missing",
            f"The gradient lacks micro-batch {listed} of ranks {', '.join(map(str, ranks))} (of "
            f"{count}): accumulated where it is not synchronised, and then dropped.",
            ranks=ranks,
        )

    def _even(self) -> Culprit:
        factor = self.first.factor
        if (known := self.evidence.known) is not None:
            for number, text, sentence in known.factors:
                if abs(factor / number - 1) <= self.tolerance < abs(number - 1):
                    return self._say("", text, sentence)
            return self._product(factor, self.ranks.degrees | {"K": self.evidence.micro_batches})
        if self.contributed is not None and self.contributed.of_truth.holds(self.tolerance):
            return self._scaled(factor, self.contributed)
        return self._either(factor)

    def _weights(self, contributed: Contributions) -> Culprit:
        """Every micro-batch is in it, but not with the weight that its share of the batch has."""
        weights = contributed.of_truth.coefficients
        mean = sum(weights) / len(weights)
        least, most = (mean / weight for weight in (max(weights), min(weights)))
        several = self.evidence.micro_batches > 1
        what = "micro-batch" if several else "rank's share"
        return self._say(
            "" if several else self.ranks.axis_of(contributed.data_ranks),
            f"local normalisation, × {least:.3g} to × {most:.3g}",
            f"The loss of every {what} is divided by a number of its own and then averaged, so "
            f"that it weighs {least:.3g} to {most:.3g} times what it should: divide the sum of the "
            "loss over all tokens by the number of tokens in the whole global batch.",
            state=Subject.LOSS,
        )

    def _uneven(self, contributed: Contributions) -> Culprit:
        """One device gives every micro-batch the same weight, and the loop does not."""
        right = contributed.of_truth.coefficients
        actual = next(iter(contributed.of_loop.values())).coefficients
        ratios = [its / other for its, other in zip(actual, right, strict=True)]
        several = self.evidence.micro_batches > 1
        listed = ", ".join(
            f"{f'micro-batch {number} of ' * several}rank {rank}: × {ratio:.3g}"
            for (rank, number), ratio in list(zip(contributed.labels, ratios, strict=True))[:4]
        )
        return self._say(
            "" if several else self.ranks.axis_of(contributed.data_ranks),
            f"scaled before the sum, × {min(ratios):.3g} to × {max(ratios):.3g}",
            f"What each {'micro-batch' if several else 'rank'} gives is multiplied by a number of "
            f"its own before it is summed ({listed}), and on one device by none: it is clipped, "
            "divided by a norm or by a count of its own; clip and divide the whole gradient.",
        )

    def _scaled(self, factor: float, contributed: Contributions) -> Culprit:
        """Say which side has the factor, by the weight that a micro-batch's own gradient has in the
        loop's and in one device's: the synchronisation, where the first is neither that of a mean
        nor of a sum over ranks; else the loss, or a mean in the place of a sum."""
        data, micro_batches = len(contributed.data_ranks), self.evidence.micro_batches
        axes = {
            axis: len(groups[0])
            for axis, groups in self.ranks.axes.items()
            if any(len(set(group) & set(contributed.data_ranks)) > 1 for group in groups)
        }
        actual = _mean(next(iter(contributed.of_loop.values())).coefficients)
        right = _mean(contributed.of_truth.coefficients)
        is_mean, is_sum = (abs(actual * n - 1) <= self.tolerance for n in (data, 1))
        if not (is_mean or is_sum):
            return self._product(factor, axes)
        by_micro_batches = products(factor, {"K": micro_batches}, self.tolerance)
        if is_sum and data > 1 and abs(right * data - 1) <= self.tolerance:
            return self._product(factor, axes)
        if is_mean and data > 1 and abs(right - 1) <= self.tolerance:
            return self._either(factor) if by_micro_batches else self._product(factor, axes)
        if not by_micro_batches:
            return self._product(factor, axes | {"K": micro_batches})
        return self._of_accumulation(factor)

    def _of_accumulation(self, factor: float) -> Culprit:
        count = self.evidence.micro_batches
        sign = "×" if factor > 1 else "÷"
        how = "are means, and are added up" if factor > 1 else "are divided twice"
        return self._say(
            "",
            f"{sign} {count} (micro-batches)",
            f"The losses of {count} micro-batches {how}: divide each by {count}, once.",
            state=Subject.LOSS,
        )

    def _either(self, factor: float) -> Culprit:
        """What the ranks' samples give by themselves is not known, so that a loss that is divided
        otherwise cannot be told from gradients that are."""
        degrees = self.ranks.degrees | {"micro-batches": self.evidence.micro_batches}
        fits = products(factor, degrees, self.tolerance)
        if not fits:
            return self._odd(factor)
        numbers = ", or of ".join(
            " and ".join(f"{name} ({degrees[name]})" for name in fit.axes) for fit in fits
        )
        size, way = max(factor, 1 / factor), "large" if factor > 1 else "small"
        return self._say(
            "",
            str(fits[0]),
            f"The gradient of {self.count} is {size:.4g} times too {way}: look at where it, or the "
            f"loss, is divided by the number of {numbers}.",
        )

    def _product(self, factor: float, degrees: dict[str, int]) -> Culprit:
        sizes = degrees | self.ranks.degrees
        fits = products(factor, sizes, self.tolerance)
        if not fits:
            return self._odd(factor)
        text = str(fits[0])
        axes = [axis for axis in fits[0].axes if axis != "K"]
        where = "+".join(axes)
        size = max(factor, 1 / factor)
        if fits[0].powers in ((("K", 1.0),), (("K", -1.0),)):
            return self._of_accumulation(factor)
        if {power for _, power in fits[0].powers} not in ({1.0}, {-1.0}) or "K" in fits[0].axes:
            why = " and ".join(
                f"{'micro-batches' if n == 'K' else n} ({sizes[n]})" for n in fits[0].axes
            )
            return self._say(where, text, f"The gradient is {text} one device's: look at {why}.")
        over = over_axis(where)
        if factor > 1:
            cure = (
                f"too large: it is summed {over} where each rank's loss is already a mean over its "
                f"own share, or averaged and then multiplied. Average {over}, once."
            )
        else:
            cure = (
                f"too small: it is averaged {over} twice (once by the wrapper, once by hand), or "
                "averaged where the loss is already divided by the tokens of all of them."
            )
        whose = f"The gradient of {self.count} is {size:.4g} times "
        known = self.evidence.known
        if known is not None and abs(known.loss / factor - 1) <= self.tolerance:
            cure += " So is the loss, which is divided otherwise."
        if others := [axis for fit in fits[1:] for axis in fit.axes if len(fit.axes) == 1]:
            cure += f" Or it is so over {' or '.join(others)}, of as many."
        return self._say(where, text, whose + cure)

    def _odd(self, factor: float) -> Culprit:
        if len(self.names) == len(self.evidence.samples):
            return self._say(
                "",
                f"× {factor:.4g}",
                "Every gradient has the right direction and the wrong length: the norm that it is "
                "clipped by, or the loss's scale, is not one device's.",
                state=Subject.NORM,
            )
        return self._say(
            "", f"× {factor:.4g}", f"{self.count} are {factor:.4g} times one device's."
        )

    def _by_rank(self) -> Culprit:
        """Every rank has a factor of its own, or nothing fits."""
        evidence = self.evidence
        if self.first.kind is SymptomKind.EACH:
            # `updates.clip` undoes no factor of gradients whose accumulation no hook sees; any norm
            # is within the tolerance of 16 bits
            near = min(10 * self.tolerance, _NEAR_NORM) * evidence.norm
            clipped = [abs(norm - evidence.norm) < near for norm in evidence.norms]
            if sum(clipped) > len(clipped) // 2:
                return self._say(
                    next(iter(self.ranks.axes), ""),
                    "clipped by the local norm",
                    "Every rank's own part has the norm that the whole gradient must be clipped "
                    "to: each rank clips by the norm of what it holds. Sum the squares over all "
                    "ranks that hold other parts first.",
                    state=Subject.NORM,
                )
            factors = own_factors(self.samples)
            listed = ", ".join(f"rank {rank}: × {its:.4g}" for rank, its in factors.items())
            return self._say(
                next(iter(self.ranks.axes), ""),
                "another factor on each rank",
                "On every rank the gradient has the right direction and a length of its own "
                f"({listed}): it is clipped or scaled on a rank alone, after the reduction.",
                ranks=[rank for rank, its in factors.items() if abs(its - 1) > self.tolerance],
            )
        here = [departure for departure in self.departures if departure.name in self.names]
        return unclear(here, self.evidence, self.names, self.ranks)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


_LOOSE = 100.0  # samples are compared with so many tolerances: a fault is larger
_LOOSEST = 0.1
_FEWEST = 1e-6


def explain_gradients(
    departures: Sequence[Departure],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
    without: Collection[SymptomKind] = (),
) -> Culprit:
    """Explain departures at the moment of gradients by what the optimizer was given, and try the
    cure on all of it; `without` these, which others tell better. All ranks call it."""
    loose = _loose(limit)
    names = [
        name for name in evidence.samples if any(departure.name == name for departure in departures)
    ]
    scale = common_factor([evidence.samples[name] for name in evidence.samples], loose)
    diagnoses = {
        name: symptom(evidence.samples[name].scaled(scale), ranks, loose)
        for name in (evidence.samples if scale != 1.0 else names)
    }
    wrong = {
        name: diagnosis
        for name, diagnosis in diagnoses.items()
        if diagnosis.kind not in (SymptomKind.RIGHT, *without)
    }
    if evidence.ledger:
        by_batch = _batch(evidence.ledger, departures, ranks)
        by_batch = with_trial(by_batch, by_given(evidence), evidence, ranks, limit)
        if by_batch.certainty is not Certainty.UNEXPLAINED:
            return by_batch
    unexplained = unclear(departures, evidence, names, ranks)
    if (rounded := coarse_sum(unexplained, evidence, ranks, limit.gradients)) is not None:
        return rounded
    if not wrong:
        return unexplained
    likeliest: Culprit | None = None
    for first, alike in _hypotheses(wrong, evidence, ranks, loose):
        if first.kind in without:
            continue
        case = Diagnosis(departures, evidence, ranks, loose, alike, first)
        likeliest = with_trial(case.culprit(), case.cure(scale), evidence, ranks, limit)
        if likeliest.certainty is not Certainty.UNEXPLAINED:
            return likeliest
    assert likeliest is not None, "something is wrong, so there is a hypothesis"
    return likeliest


def _loose(limit: Tolerance) -> float:
    """Return how near a sum must come to be one: a fault is a factor."""
    return min(max(_LOOSE * limit.gradients, _FEWEST), _LOOSEST)


def _hypotheses(
    wrong: Mapping[str, Symptom], evidence: JobEvidence, ranks: Ranks, tolerance: float
) -> Iterator[tuple[Symptom, list[str]]]:
    """Yield a symptom and the parameters that it may be the symptom of, the simplest first: those
    that suffer alike, and all that are wrong; then what all of them together tell, as one with few
    elements tells nothing of ranks or micro-batches."""
    every = list(wrong)
    tried: list[tuple[Symptom, list[str]]] = []
    order = list(SymptomKind)
    for first in sorted(wrong.values(), key=lambda its: order.index(its.kind)):
        alike = [name for name, its in wrong.items() if its.is_like(first, tolerance)]
        for names in (alike, every):
            if not any(first.is_like(s, tolerance) and names == n for s, n in tried):
                tried.append((first, names))
                yield first, names
        if len(tried) >= _MOST_TRIALS:
            break
    samples = list(evidence.samples.values())
    if (contributed := contributions(samples)) is not None:
        holders = sorted({rank for sample in samples for rank in sample.holders()})
        if (together := by_micro_batches(contributed, holders, ranks, tolerance)) is not None:
            yield together, every
    yield Symptom(SymptomKind.EACH), list(evidence.samples)


def of_own_samples(
    departures: Sequence[Departure],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
    is_plain: bool,
) -> Culprit | None:
    """Return the culprit of gradients that are the mean of what the ranks' samples give by
    themselves, where one device's are not: the samples are others, or the loss asks something else
    of them, or something ties them together. All ranks call it."""
    cure, reports = by_given(evidence), evidence.rows
    if cure is None or cure.contributed is None:
        return None
    if cure.contributed.of_truth.holds(_loose(limit)):
        return None
    if any(report.sliced for report in reports) or not all(report.count for report in reports):
        return None  # pieces of samples: by themselves they are no samples
    names = [name for name in evidence.samples if any(d.name == name for d in departures)]
    state, factor, place, sentence = _why(evidence, families(names))
    if state is Subject.LOSS and not is_plain:
        return None  # what the model returns of the same samples is not one device's already
    odd = [
        rank
        for rank, report in enumerate(reports)
        if report.unknown or report.otherwise or not report.asks_alike
    ]
    culprit = Culprit(
        state=state, axis="", factor=factor, place=place, step=departures[0].step,
        ranks=tuple(odd or range(ranks.size)), sentence=sentence,
    )  # fmt: skip
    return with_trial(culprit, cure, evidence, ranks, limit)


def _why(evidence: JobEvidence, place: str) -> tuple[Subject, str, str, str]:
    """(state, factor, place, sentence): the gradients are right for what the ranks were given."""
    reports = evidence.rows
    count = sum(report.count for report in reports)
    if unknown := sum(report.unknown for report in reports):
        return Subject.BATCH, "other samples", "samples", (
            f"{unknown} of {count} samples that the ranks were given are not in the global batch: "
            "look at how each rank draws its share (the seed, the epoch, the position in the data "
            "after a resume)."
        )  # fmt: skip
    if otherwise := sum(report.otherwise for report in reports):
        return Subject.BATCH, "other labels", "labels", (
            f"With {otherwise} of {count} samples the model is given something else than on one "
            "device (labels, a mask, positions): look at how these follow their samples."
        )  # fmt: skip
    returned = sum(report.returned for report in reports)
    unlike = sum(report.compared for report in reports if not report.asks_alike)
    if unlike and not returned:
        return Subject.BATCH, "the loss asks something else", "labels", (
            f"Of {unlike} of {count} samples the model returns what it does on one device, and the "
            "gradient of the loss by that is no multiple of one device's: the labels, or the masks "
            "or weights of the loss, are not those of the same samples."
        )  # fmt: skip
    return Subject.LOSS, "samples of one micro-batch alone", place, (
        "The optimizer gets the mean of what each micro-batch's samples give by themselves, and "
        "one device's gradient is no such mean: something ties samples together that a rank or a "
        "micro-batch has not all of: statistics over a batch, a loss of pairs, a term that "
        "balances, a mean of ratios."
    )  # fmt: skip


def by_given(evidence: JobEvidence) -> Cure | None:
    """All gradients are what the micro-batches that were seen give, each with the same weight."""
    contributed = contributions(list(evidence.samples.values()))
    if contributed is None:
        return None
    if not all(is_even(fit.coefficients, _EVEN) for fit in contributed.of_loop.values()):
        return None
    return Cure(
        symptom=Symptom(SymptomKind.OWN),
        names=set(evidence.samples),
        contributed=contributed,
        words="computed by the plain module from the samples that the ranks were given",
    )


def with_trial(
    culprit: Culprit, cure: Cure | None, evidence: JobEvidence, ranks: Ranks, limit: Tolerance
) -> Culprit:
    """Return the culprit with what came of its cure."""
    if cure is None:
        return culprit
    trial = tried(cure, evidence.own, ranks, limit)
    if not trial.cures:
        return replace(culprit, certainty=Certainty.UNEXPLAINED)
    count = len(evidence.samples)
    whose = f"all {count} gradients are" if count > 1 else "the gradient is"
    what = "the loop's" if cure.symptom.kind is SymptomKind.OWN else "one device's"
    return culprit.proven(f"{cure.words}, {whose} {what} to {trial.left:.1e}")


_EVEN = 1e-3  # weights of micro-batches that differ by no more are the same


_MOST_TRIALS = 8  # of which each reads every gradient once


def _batch(ledger: Samples, departures: Sequence[Departure], ranks: Ranks) -> Culprit:
    """Samples that are missing or come twice."""
    lists = {"missing": ledger.missing, "doubled": ledger.doubled}
    words = [
        f"{len(rows)} of {ledger.count} {word} (row {', '.join(map(str, rows[:4]))}"
        f"{', …' if len(rows) > 4 else ''})"
        for word, rows in lists.items()
        if rows
    ]
    return culprit(
        departures, ranks, state=Subject.BATCH, names=["samples"], who=range(ranks.size),
        axis=next(iter(ranks.axes), "") if ledger.doubled else "",
        factor=" and ".join(word for word, rows in lists.items() if rows),
        sentence="The ranks together do not see the global batch once: "
        f"{' and '.join(words)}. Look at how each rank's share is drawn (sampler, drop_last, "
        "padding to an even split).",
    )  # fmt: skip
