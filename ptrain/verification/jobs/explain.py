"""From departures to a culprit: the state, the axis, the factor, and a sentence to act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ptrain.report.finding import Certainty, Culprit, Departure, Subject
from ptrain.verification.factors import is_even
from ptrain.verification.jobs.cures import Cure, tried
from ptrain.verification.jobs.diagnosis import Diagnosis, unclear
from ptrain.verification.jobs.evidence import JobEvidence
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.jobs.samples import Samples
from ptrain.verification.jobs.symptoms import (
    Symptom,
    SymptomKind,
    common_factor,
    contributions,
    symptom,
)
from ptrain.verification.jobs.words import families

_LOOSE = 100.0  # samples are compared with so many tolerances: a fault is larger
_LOOSEST = 0.1
_FEWEST = 1e-6


def explain_gradients(
    departures: Sequence[Departure], evidence: JobEvidence, ranks: Ranks, limit: Tolerance
) -> Culprit:
    """Explain departures at the moment of gradients by what the optimizer was given, and try the
    cure on all of it. All ranks call it."""
    loose = min(max(_LOOSE * limit.gradients, _FEWEST), _LOOSEST)
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
        if diagnosis.kind is not SymptomKind.RIGHT
    }
    if evidence.ledger and all(diagnosis.kind in _BY_BATCH for diagnosis in wrong.values()):
        return _proven(
            _batch(evidence.ledger, departures, ranks), _given(evidence), evidence, ranks, limit
        )
    first = min(wrong.values(), key=lambda diagnosis: _ORDER.index(diagnosis.kind), default=None)
    if first is None:
        return unclear(departures, evidence, names, ranks)
    alike = [
        name
        for name, diagnosis in wrong.items()
        if diagnosis.is_like(first, loose)
        or (first.kind in _BY_SUM and diagnosis.kind is SymptomKind.OTHER)
    ]
    case = Diagnosis(departures, evidence, ranks, loose, alike, first)
    return _proven(case.culprit(), case.cure(scale), evidence, ranks, limit)


def of_own_samples(
    departures: Sequence[Departure], evidence: JobEvidence, ranks: Ranks, limit: Tolerance
) -> Culprit | None:
    """Return the culprit of gradients that are the mean of what the ranks' samples give by
    themselves, where one device's are not: something ties samples together. All ranks call it."""
    cure = _given(evidence)
    if cure is None or cure.contributed is None or cure.contributed.of_truth.holds(_LOOSEST):
        return None
    names = [name for name in evidence.samples if any(d.name == name for d in departures)]
    culprit = Culprit(
        state=Subject.LOSS,
        axis="",
        factor="samples of one micro-batch alone",
        place=families(names),
        step=departures[0].step,
        ranks=tuple(range(ranks.size)),
        sentence="The optimizer gets the mean of what each micro-batch's samples give by "
        "themselves, and one device's gradient is no such mean: something ties samples together "
        "that a rank or a micro-batch has not all of: statistics over a batch, a loss of pairs, a "
        "term that balances, a mean of ratios.",
    )
    return _proven(culprit, cure, evidence, ranks, limit)


def _given(evidence: JobEvidence) -> Cure | None:
    """All gradients are what the micro-batches that were seen give, each with the same weight."""
    contributed = contributions(list(evidence.samples.values()))
    if contributed is None:
        return None
    if not all(is_even(fit.coefficients, _EVEN) for fit in contributed.of_found.values()):
        return None
    return Cure(
        symptom=Symptom(SymptomKind.OWN),
        names=set(evidence.samples),
        contributed=contributed,
        words="computed by the plain module from the samples that the ranks were given",
    )


def _proven(
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
    return replace(
        culprit,
        certainty=Certainty.PROVEN,
        tried=f"{cure.words}, {whose} {what} to {trial.left:.1e}",
    )


_ORDER = (
    SymptomKind.NOT_FINITE, SymptomKind.EMPTY, SymptomKind.PARTIAL, SymptomKind.STALE,
    SymptomKind.ADDED, SymptomKind.SOME, SymptomKind.WEIGHTS, SymptomKind.EVEN, SymptomKind.EACH,
    SymptomKind.OWN, SymptomKind.OTHER, SymptomKind.RIGHT,
)  # fmt: skip
_EVEN = 1e-3  # weights of micro-batches that differ by no more are the same


# Of a tensor with few elements no sum of many micro-batches can be told.
_BY_SUM = (SymptomKind.SOME, SymptomKind.WEIGHTS)
# What other samples than one device's look like; every other symptom has a cause of its own.
_BY_BATCH = (SymptomKind.OTHER, SymptomKind.SOME, SymptomKind.EACH, SymptomKind.EMPTY)


def _batch(ledger: Samples, departures: Sequence[Departure], ranks: Ranks) -> Culprit:
    """Samples that are missing or come twice."""
    lists = {"missing": ledger.missing, "doubled": ledger.doubled}
    words = [
        f"{len(rows)} of {ledger.count} {word} (row {', '.join(map(str, rows[:4]))}"
        f"{', …' if len(rows) > 4 else ''})"
        for word, rows in lists.items()
        if rows
    ]
    return Culprit(
        state=Subject.BATCH,
        axis=next(iter(ranks.axes), ""),
        factor=" and ".join(word for word, rows in lists.items() if rows),
        place="samples",
        step=departures[0].step,
        ranks=tuple(range(ranks.size)),
        sentence="The ranks together do not see the global batch once: "
        f"{' and '.join(words)}. Look at how each rank's share is drawn (sampler, drop_last, "
        "padding to an even split).",
    )
