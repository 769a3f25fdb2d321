"""Derive root causes from differences: the state, the axis, the factor, and a sentence to act on.

A diagnosis explains one symptom of some parameters in words, and names the change that would undo
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import fmean

from torch import Tensor

from ptrain.report.finding import POSSIBLE, RULED_OUT, Certainty, Mismatch, RootCause, Subject
from ptrain.verification.jobs.evidence import JobEvidence
from ptrain.verification.jobs.job import RANKS, Ranks, Tolerance
from ptrain.verification.jobs.root_causes import (
    blame,
    explain_samples,
    families,
    over_axis,
    root_cause,
    unclear,
)
from ptrain.verification.jobs.symptoms import (
    Contributions,
    Fix,
    Symptom,
    SymptomKind,
    by_micro_batches,
    coarse_sums,
    common_factor,
    contributions,
    own_factors,
    stale_factor,
    symptom,
    tried,
)
from ptrain.verification.parts import DegreeProduct, factor_text, is_even, named, products

TIED = "samples of one micro-batch only"
OTHER_LOSS = "other gradient of the loss"
_NEAR_NORM = 0.01  # of the reference's: any norm is within the tolerance of 16 bits
_EPSILON = 1e-5  # of a norm, to which torch adds 1e-6 before it divides by it
_MICRO = "micro-batches"
_NAMES = {RANKS: "all ranks", _MICRO: "the micro-batches"}
# Returns in words what still differs with these gradients, "" where nothing does.
After = Callable[[Mapping[str, Tensor], Fix], str]
_OF_LOSS, _REDUCED = " in the loss", " after the backward pass"


class Diagnosis:
    """One symptom of some parameters, put into words."""

    def __init__(
        self,
        mismatches: Sequence[Mismatch],
        evidence: JobEvidence,
        ranks: Ranks,
        tolerance: float,
        names: Sequence[str],
        first: Symptom,
    ) -> None:
        self.mismatches, self.evidence, self.ranks = mismatches, evidence, ranks
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

    def hypothesis(self, scale: float) -> tuple[RootCause, Fix | None]:
        """Return the symptom in words, and what undoes it; None where nothing does. All gradients
        are divided by `scale` first."""
        symptom, factors = self.first, None
        factor, axis, contributed = symptom.factor, symptom.axis, self.contributed
        match symptom.kind:
            case SymptomKind.NOT_FINITE:
                said = self._say(
                    "", "not finite", "The gradient has an infinity or a NaN.",
                    "Look for a division by zero, a log of zero or an overflow of 16 bits.",
                )  # fmt: skip
                return said, None
            case SymptomKind.EMPTY:
                said, words = self._empty(), (
                    "none is there when the optimizer steps; with the reference gradient instead"
                )  # fmt: skip
            case SymptomKind.PARTIAL:
                times = "" if abs(factor - 1) <= self.tolerance else f", times {factor:.4g}"
                said, words = self._partial(), f"summed {over_axis(axis)}{times}"
            case SymptomKind.STALE:
                words = f"compared with {factor:.4g} times those of the previous step"
                said = self._say(
                    "", "stale by 1 step", "The optimizer takes the gradient of the previous step.",
                    "Wait for this step's reduction, or copy it to the optimizer, before it steps.",
                )  # fmt: skip
            case SymptomKind.ADDED:
                symptom = replace(symptom, factor=stale_factor(self.samples)[1])
                words = f"minus {symptom.factor:.4g} times those of the previous step"
                said = self._say(
                    "", "previous step added",
                    "The gradient still includes that of the previous step.",
                    "Set gradients to None after every update, before the first backward of the "
                    "next step.",
                )  # fmt: skip
            case (
                SymptomKind.SOME | SymptomKind.LOCAL | SymptomKind.WEIGHTS | SymptomKind.UNEVEN
            ) if contributed:
                words = "with the weight that each micro-batch has in the reference"
                said = self._weighed(contributed)
            case SymptomKind.EVEN:
                said, words = self._even(), f"divided by {factor:.4g}"
            case SymptomKind.EACH:
                factors = own_factors([sample.scaled(scale) for sample in self.samples])
                said, words = self._by_rank(), "divided by a different factor on each rank"
            case _:
                return self._unclear(), None
        is_scaled = abs(scale - 1) > self.tolerance
        both = f"divided by {scale:.4g} and " if is_scaled else ""
        return said, Fix(
            symptom=symptom, names=set(self.names), scale=scale, contributed=contributed,
            factors=factors, words=both + words,
        )  # fmt: skip

    def _unclear(self) -> RootCause:
        here = [mismatch for mismatch in self.mismatches if mismatch.name in self.names]
        return unclear(here or self.mismatches, self.evidence, self.names, self.ranks)

    def _say(
        self,
        axis: str,
        factor: str,
        sentence: str,
        fix: str,
        *,
        ranks: Sequence[int] = (),
        state: Subject = Subject.GRADIENTS,
    ) -> RootCause:
        here = [mismatch for mismatch in self.mismatches if mismatch.name in self.names]
        return root_cause(
            here or self.mismatches, self.ranks, state=state, axis=axis, factor=factor,
            names=self.names, who=ranks or {mismatch.rank for mismatch in here},
            sentence=sentence, fix=fix,
        )  # fmt: skip

    def _empty(self) -> RootCause:
        holders = {rank for sample in self.samples for rank in sample.holders()}
        own = self.evidence.own
        seen = [own.emptiness(name) for name in self.names if name in own.holds]
        kinds = {kind for kinds in self.ranks.gather(seen) for kind in kinds if kind}
        whose = "no rank" if set(self.first.ranks) == holders else "not every rank"
        return self._say(
            self.ranks.axis_of(sorted(holders)) if whose == "not every rank" else "",
            "no gradient",
            f"{self.count[0].upper()}{self.count[1:]} get a gradient in the reference, but "
            f"{whose} that holds them has one when the optimizer steps: "
            f"{' or '.join(sorted(kinds)) or 'all gradients are zero'}.",
            "Let backward reach these parameters, and hand their gradients to the optimizer.",
            ranks=self.first.ranks,
        )

    def _partial(self) -> RootCause:
        axis = self.first.axis
        size = len(self.ranks.summed[axis][0])
        kind, factor = "sum", self.first.factor
        if abs(factor * size - 1) <= self.tolerance:
            kind, factor = "mean", 1.0
        besides = "" if abs(factor - 1) <= self.tolerance else f", {factor_text(factor, {})}"
        return self._say(
            axis.partition("+")[0],
            f"missing all-reduce {over_axis(axis)}{besides}",
            f"Each rank has a partial gradient of {self.count}: the {kind} {over_axis(axis)} "
            f"({size}) is the reference gradient{besides and f' times {1 / factor:.4g}'}.",
            f"All-reduce it {over_axis(axis)} ({kind}) before the optimizer steps.",
        )

    def _weighed(self, contributed: Contributions) -> RootCause:
        """Some micro-batches are not in the gradient, or they have another weight."""
        ranks, numbers, count = self.first.ranks, self.first.numbers, self.evidence.micro_batches
        if self.first.kind is SymptomKind.LOCAL:
            over = over_axis(self.first.axis)
            return self._say(
                self.first.axis.partition("+")[0], f"missing all-reduce {over}",
                f"The gradient of {self.count} on each rank includes only the ranks at the same "
                "coordinate.",
                f"Reduce it {over} before the optimizer steps.",
            )  # fmt: skip
        if self.first.kind is not SymptomKind.SOME:
            return self._reweighted(contributed)
        listed, who = (", ".join(map(str, its)) for its in (numbers, ranks))
        if set(numbers) == set(range(count - 1)) and count > 1:
            return self._say(
                "", f"last of {count} micro-batches only",
                f"Only the gradient of the last of {count} micro-batches reaches the "
                "optimizer. The earlier ones are set to None or zero, or overwritten, "
                "between micro-batches.",
                "Add them up.",
            )  # fmt: skip
        if len(numbers) == count:
            return self._say(
                self.ranks.axis_of([ranks[0], (ranks[0] + 1) % self.ranks.size]),
                f"rank {who} missing",
                f"The gradient of rank {who} reaches no optimizer. It is missing from the sum.",
                "Reduce over all ranks, this one too.", ranks=ranks,
            )  # fmt: skip
        return self._say(
            "", f"micro-batch {listed} missing",
            f"The gradient lacks micro-batch {listed} of ranks {who} (of {count}): it is "
            "accumulated without synchronization, and then dropped.",
            "Synchronize the gradients of all micro-batches before the optimizer steps.",
            ranks=ranks,
        )  # fmt: skip

    def _even(self) -> RootCause:
        """State the multiple, and the number of ranks or micro-batches that it is; apart from it
        what may cause it, where that is not one of these alone."""
        factor = self.first.factor
        sizes, where = self._side_of(factor)
        fits = products(factor, sizes, self.tolerance)
        alike = [fit for fit in fits if _powers(fit) == _powers(fits[0])]
        verb = "not divided by" if factor > 1 else "divided twice by"
        causes = [
            f"{verb} "
            + " and ".join(f"{_NAMES.get(n, f'the ranks of {n}')} ({sizes[n]})" for n in fit.axes)
            for fit in alike
            if set(_powers(fit)) in ({1.0}, {-1.0})
        ]
        text = str(fits[0]) if len(alike) == 1 else f"× {factor:.4g}"
        what = f"The gradient of {self.count} is {factor:.4g} times the reference"
        if where and len(causes) == len(alike) == 1:
            return self._say(
                "+".join(axis for axis in fits[0].axes if axis != _MICRO),
                f"{text} ({_MICRO})" if fits[0].axes == (_MICRO,) else text,
                f"{what}: it is {causes[0]}{where}.",
                "Divide by their number once.",
                state=Subject.LOSS if where == _OF_LOSS else Subject.GRADIENTS,
            )
        every = len(self.names) == len(self.evidence.samples)
        is_norm = not fits and every and where != _OF_LOSS
        if is_norm or where != _REDUCED:  # clipping hides what a loss is multiplied by
            causes.append("another scale of the loss")
        causes += [f"another scale{_REDUCED}"] * (where == _REDUCED)
        causes += ["another clipping norm"] * is_norm
        return self._say(
            "", text, f"{what}. {POSSIBLE}{'; '.join(causes)}.",
            f"Undo the one that holds: this factor must be {1 / factor:.4g} times what it is.",
            state=Subject.NORM if is_norm else Subject.GRADIENTS,
        )  # fmt: skip

    def _side_of(self, factor: float) -> tuple[dict[str, int], str]:
        """Return what may have the factor, with sizes, and where it is: in the loss or in the
        reduction, as the weight says that a micro-batch's own gradient has in the loop's and in the
        reference's; nothing where these are not known."""
        degrees, micro = self.ranks.degrees, {_MICRO: self.evidence.micro_batches}
        contributed = self.contributed
        if contributed is None or not contributed.of_truth.holds(self.tolerance):
            return degrees | micro, ""
        actual = fmean(next(iter(contributed.of_loop.values())).coefficients)
        right = fmean(contributed.of_truth.coefficients)
        # not every rank need use these parameters
        data = (contributions([*self.evidence.samples.values()]) or contributed).data_ranks
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
        return micro if products(factor, micro, self.tolerance) else degrees, _OF_LOSS

    def _reweighted(self, contributed: Contributions) -> RootCause:
        """Every micro-batch is in it, but not with the weight that it has in the reference: there
        all have the same, or in the loop."""
        right = contributed.of_truth.coefficients
        actual = next(iter(contributed.of_loop.values())).coefficients
        ratios = [its / other for its, other in zip(actual, right, strict=True)]
        is_loss = self.first.kind is SymptomKind.WEIGHTS
        several = self.evidence.micro_batches > 1
        listed = ", ".join(
            f"{f'micro-batch {number} of ' * several}rank {rank}: × {ratio:.3g}"
            for (rank, number), ratio in list(zip(contributed.labels, ratios, strict=True))[:4]
        )
        same, fix = (
            ("in the loop, but not in the reference", "Divide the sum of the loss over all tokens "
             "by the number of tokens in the full global batch")
            if is_loss
            else ("in the reference, but not in the loop", "Clip and divide the full gradient")
        )  # fmt: skip
        return self._say(
            "" if several else self.ranks.axis_of(contributed.data_ranks),
            f"{'local normalisation' if is_loss else 'scaled before the sum'}, "
            f"× {min(ratios):.3g} to × {max(ratios):.3g}",
            f"The gradient of each {'micro-batch' if several else 'rank'} has the same weight in "
            f"the sum {same}; they differ by these factors: {listed}.",
            f"{fix}.",
            state=Subject.LOSS if is_loss else Subject.GRADIENTS,
        )

    def _by_rank(self) -> RootCause:
        """Every rank has a factor of its own."""
        evidence = self.evidence
        # `updates.clip` undoes no factor of gradients whose accumulation no hook sees
        near = min(max(self.tolerance / 10, _EPSILON), _NEAR_NORM) * evidence.norm
        if all(abs(norm - evidence.norm) < near for norm in evidence.norms):
            return self._say(
                next(iter(self.ranks.axes), ""), "clipped by the local norm",
                "The shard on every rank has the norm that the full gradient must be clipped to: "
                "each rank clips by its local norm.",
                "Sum the squares over all ranks that hold other shards first.",
                state=Subject.NORM,
            )  # fmt: skip
        factors = own_factors(self.samples)
        listed = ", ".join(f"rank {rank}: × {its:.4g}" for rank, its in factors.items())
        return self._say(
            next(iter(self.ranks.axes), ""), "different factor on each rank",
            "On every rank the gradient has the right direction and a different length "
            f"({listed}): each rank scales it by its own number after the reduction.",
            "Clip by one norm on all ranks.",
            ranks=[rank for rank, its in factors.items() if abs(its - 1) > self.tolerance],
        )  # fmt: skip


def _powers(fit: DegreeProduct) -> list[float]:
    return sorted(power for _, power in fit.powers)


_LOOSE = 100.0  # samples are compared with so many tolerances: a fault is larger
_LOOSEST = 0.1
_FEWEST = 1e-6


def explain_gradients(
    mismatches: Sequence[Mismatch],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
    after: After,
) -> RootCause:
    """Explain mismatches at the moment of gradients by what the optimizer was given, and try the
    fix on all of it; `after` tells what still differs then. All ranks call it."""
    loose = _loose(limit)
    names = [
        name for name in evidence.samples if any(mismatch.name == name for mismatch in mismatches)
    ]
    scale = common_factor([evidence.samples[name] for name in evidence.samples], loose)
    diagnoses = {
        name: symptom(evidence.samples[name].scaled(scale), ranks, loose)
        for name in (evidence.samples if scale != 1.0 else names)
    }
    wrong = {
        name: diagnosis
        for name, diagnosis in diagnoses.items()
        if diagnosis.kind is not SymptomKind.RIGHT
    }
    unexplained = unclear(mismatches, evidence, names, ranks)
    if (rounded := coarse_sum(unexplained, evidence, ranks, limit, after)) is not None:
        return rounded
    if not wrong:
        return unexplained
    out: list[str] = []
    for first, alike in _hypotheses(wrong, evidence, ranks, loose):
        case = Diagnosis(mismatches, evidence, ranks, loose, alike, first)
        said, fix = case.hypothesis(scale)
        likeliest = with_trial(said, fix, evidence, ranks, limit, after)
        if likeliest.certainty is not Certainty.UNEXPLAINED:
            return likeliest
        out.append(likeliest.tried.removeprefix(RULED_OUT))
    return unexplained.unexplained("; ".join(filter(None, dict.fromkeys(out))))


def coarse_sum(
    said: RootCause, evidence: JobEvidence, ranks: Ranks, limit: Tolerance, after: After
) -> RootCause | None:
    """Return the root cause of gradients that are a sum of rounded micro-batches, which is the
    reference's without roundings; None where they are none. All ranks call it."""
    samples = evidence.samples
    for way, left in coarse_sums(samples.values(), limit.gradients):
        count = samples[next(iter(samples))].basis.shape[1]
        what = f"{'accumulated in' if count > 1 else 'rounded to'} {named(way.dtype)}"
        fix = Fix(
            symptom=Symptom(SymptomKind.COARSE, factor=way.divisor), names=set(samples),
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


def of_samples(
    mismatches: Sequence[Mismatch], evidence: JobEvidence, ranks: Ranks
) -> RootCause | None:
    """Return what is wrong with the samples that the ranks read, as far as these tell; None where
    they are the global batch's, or pieces of its samples."""
    if evidence.ledger:
        return explain_samples(evidence.ledger, mismatches, ranks)
    reports = evidence.rows
    if any(report.sliced for report in reports) or not all(report.count for report in reports):
        return None  # pieces of samples: by themselves they are no samples
    count = sum(report.count for report in reports)
    unknown, otherwise = (
        sum(getattr(report, kind) for report in reports) for kind in ("unknown", "otherwise")
    )
    odd = [rank for rank, its in enumerate(reports) if its.unknown or its.otherwise]
    said = partial(blame, step=mismatches[0].step, ranks=odd, axis=ranks.parting(odd))
    if unknown:
        other = said(
            Subject.BATCH, "other samples", "samples",
            f"{unknown} of {count} samples that the model is given are not in the global batch, on "
            f"ranks {', '.join(map(str, odd))}.",
            "Check how these ranks draw their samples (the seed, the epoch, the position in the "
            "data after a resume); ranks of tensor parallelism must read the same ones.",
        )  # fmt: skip
        is_clear = len(odd) < ranks.size and all(its.unknown in (0, its.count) for its in reports)
        return other.fits(
            "the inputs of the model were compared with the global batch, sample by sample"
        ) if is_clear else other  # fmt: skip
    if otherwise:
        return said(
            Subject.BATCH, "other labels", "labels",
            f"For {otherwise} of {count} samples the model gets other inputs than in the "
            "reference (labels, a mask, positions).",
            "Check how these follow their samples.",
        )  # fmt: skip
    return None


def is_of_given(evidence: JobEvidence, ranks: Ranks, limit: Tolerance) -> bool:
    """Return whether all gradients are the mean of what the ranks' samples give by themselves. All
    ranks call it."""
    fix = _by_given(evidence)
    return fix is not None and tried(fix, evidence.own, ranks, limit).fixes


def of_own_samples(
    mismatches: Sequence[Mismatch],
    evidence: JobEvidence,
    ranks: Ranks,
    limit: Tolerance,
    is_plain: bool,
) -> RootCause | None:
    """Return where gradients begin to differ that are the mean of what the ranks' samples give by
    themselves, though the reference's are not: the loss asks something else of them, or something
    ties them together. All ranks call it."""
    fix, reports = _by_given(evidence), evidence.rows
    if fix is None or fix.contributed is None or fix.contributed.of_truth.holds(_loose(limit)):
        return None
    if any(report.sliced for report in reports) or not all(report.count for report in reports):
        return None
    names = [name for name in evidence.samples if any(d.name == name for d in mismatches)]
    count = sum(report.count for report in reports)
    unlike = sum(report.compared for report in reports if not report.asks_alike)
    odd = [rank for rank, report in enumerate(reports) if not report.asks_alike]
    said = partial(
        blame, Subject.LOSS, place=families(names), step=mismatches[0].step,
        ranks=odd or range(ranks.size),
        fix="Compute this part of the loss over the full global batch, as the reference does.",
    )  # fmt: skip
    if unlike and not any(report.returned for report in reports):
        where = said(OTHER_LOSS, sentence=(
            f"For {unlike} of {count} samples the model output matches the reference, but the "
            f"gradient of the loss by it does not. {POSSIBLE}labels, masks or weights of the loss "
            "that belong to other samples; another number that it computes for each (a local "
            "count, a margin, the output of a frozen model); a loss that is computed or gathered "
            "over the ranks in another way."
        ))  # fmt: skip
    elif is_plain:
        where = said(TIED, sentence=(
            "The optimizer takes the mean of the micro-batches computed separately, but the "
            f"reference gradient is not such a mean. {POSSIBLE}something depends on samples of "
            "several ranks or micro-batches (batch statistics, a loss of pairs, a balancing term, "
            "a mean of ratios); a term of the loss is divided by another number."
        ))  # fmt: skip
    else:
        return None  # what the model returns of the same samples is not one device's already
    trial = tried(fix, evidence.own, ranks, limit)
    count = len(evidence.samples)
    return where.located(
        f"{fix.words}, {f'all {count} gradients match' if count > 1 else 'the gradient matches'} "
        f"the loop to {trial.left:.1e}"
    ) if trial.fixes else None  # fmt: skip


def _by_given(evidence: JobEvidence) -> Fix | None:
    """All gradients are what the micro-batches that were seen give, each with the same weight."""
    contributed = contributions(list(evidence.samples.values()))
    if contributed is None:
        return None
    if not all(is_even(fit.coefficients, _EVEN) for fit in contributed.of_loop.values()):
        return None
    return Fix(
        symptom=Symptom(SymptomKind.OWN),
        names=set(evidence.samples),
        contributed=contributed,
        words="computed by the plain module from the samples given to the ranks",
    )


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
    count, others = len(evidence.samples), after(trial.gradients, fix)
    whose = f"all {count} gradients match" if count > 1 else "the gradient matches"
    words = f"{fix.words}, {whose} the reference to {trial.left:.1e}{others}"
    return said.fits(words) if others else said.proven(words)


_EVEN = 1e-3  # weights of micro-batches that differ by no more are the same
_MOST_TRIALS = 8  # of which each reads every gradient once
