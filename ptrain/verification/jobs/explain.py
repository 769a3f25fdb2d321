"""From departures to a culprit: the state, the axis, the factor, and a sentence to act on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ptrain.report.finding import Certainty, Culprit, Departure, Subject
from ptrain.verification.jobs.culprits import culprit, families, unclear
from ptrain.verification.jobs.diagnosis import Diagnosis
from ptrain.verification.jobs.evidence import JobEvidence
from ptrain.verification.jobs.job import Ranks, Tolerance
from ptrain.verification.jobs.rows import Samples
from ptrain.verification.jobs.symptoms import (
    Cure,
    Symptom,
    SymptomKind,
    by_micro_batches,
    common_factor,
    contributions,
    symptom,
    tried,
)
from ptrain.verification.parts import is_even
from ptrain.verification.updates.swaps import coarse_sum

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
