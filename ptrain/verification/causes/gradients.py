"""Why parameter gradients are not those of one device: what explains those of any loop, and beside
it what a program alone shows, each tried on what the samples and the ranks contribute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ptrain.report.copies import listed
from ptrain.report.finding import Certainty, Culprit, Moment, Subject
from ptrain.verification.causes.addends import (
    of_another_operator,
    of_other_ranks,
    of_samples,
)
from ptrain.verification.causes.as_job import as_job
from ptrain.verification.causes.own_experts import of_experts
from ptrain.verification.causes.routers import of_router_losses
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.causes.trials import LIKE_ROUNDINGS, directly, own_part_of
from ptrain.verification.jobs.explain import by_given, explain_gradients, with_trial
from ptrain.verification.jobs.job import TOLERANCES
from ptrain.verification.jobs.symptoms import SymptomKind
from ptrain.verification.jobs.words import families
from ptrain.verification.parts import held
from ptrain.verification.roundings import flipped_bit, odd_element, rounded_to

RULED_OUT = (
    "one element, one multiple, a sum over some axes, other micro-batches, other samples or other "
    "weights of them, the step before, another operator, other ranks, a rounding"
)
_ENOUGH = 8  # tensors that tell of roundings


def gradient_cause(scene: Investigation) -> Culprit | None:
    """Return the first culprit that explains them; None where none does. Collective."""
    departing = (departure.name for departure in scene.at(Moment.GRADIENTS, Subject.GRADIENTS))
    trained = scene.evidence.expected.gradients
    names = [name for name in dict.fromkeys(departing) if name in trained]
    lost = _lost(scene)
    names += [name for name in lost if name not in names]
    return next(_causes(scene, names, lost), None) if names else None


def given_samples(scene: Investigation, cause: Culprit) -> Culprit:
    """Return the cause of a batch that is not one device's, proven where one device makes the
    program's gradients of the samples that its ranks were given. Collective."""
    tried = "what each rank's model was given was compared with the batch, row by row"
    if scene.token_axis:  # pieces of samples: by themselves they are none
        return replace(cause, tried=tried)
    evidence = as_job(scene, as_given=True)
    limit = TOLERANCES[torch.float64]
    trial = with_trial(cause, by_given(evidence), evidence, scene.ranks, limit)
    return trial if trial.certainty is Certainty.PROVEN else replace(cause, tried=tried)


def _causes(scene: Investigation, names: list[str], lost: Sequence[str]) -> Iterator[Culprit]:
    before: tuple[Callable[[Investigation, list[str]], Culprit | None], ...] = (
        _one_element,
        of_experts,
    )
    behind = of_router_losses, of_samples, of_another_operator, of_other_ranks
    yield from filter(None, (cause(scene, names) for cause in before))
    # a sample, or a rank of cp, says more of uneven weights than a micro-batch
    evidence, limit = as_job(scene), TOLERANCES[torch.float64]
    departures = [
        *scene.at(Moment.GRADIENTS, Subject.GRADIENTS),
        *(replace(scene.first, subject=Subject.GRADIENTS, name=name) for name in lost),
    ]
    for without in ((SymptomKind.UNEVEN,), ()):
        culprit = explain_gradients(departures, evidence, scene.ranks, limit, without)
        if culprit.certainty is Certainty.PROVEN:
            yield replace(culprit, state=scene.one.subject)  # a program shows its loss
        if without:
            yield from filter(None, (cause(scene, names) for cause in behind))
    yield from filter(None, [_without_gradient(scene, lost), _rounded(scene, names)])


def _lost(scene: Investigation) -> list[str]:
    """Return what has a gradient on one device, and on no rank, or zeros."""
    evidence = scene.evidence
    own = [name for name, its in evidence.seen.gradients.items() if bool(held(its).any())]
    reached = {name for its in scene.ranks.gather(own) for name in its}
    expected = evidence.expected.gradients.items()
    return [name for name, whole in expected if name not in reached and bool(whole.any())]


def _without_gradient(scene: Investigation, gone: Sequence[str]) -> Culprit | None:
    """No rank has a gradient of some parameters, and others depart, which may follow from it."""
    if not gone:
        return None
    sentence = (
        f"no gradient reaches {families(gone)}: find where what it makes leaves the graph (detach, "
        "no_grad, an index in the place of a value), or what keeps it from the reduction"
    )
    tried = "that all else which departs follows from it was not tried"
    return scene.culprit("", "no gradient", sentence, place=families(gone), tried=tried)


def _one_element(scene: Investigation, names: list[str]) -> Culprit | None:
    """One element of one tensor is off, and nothing else."""
    if len(names) > 1:
        return None
    said = None
    if (own := own_part_of(scene, names[0])) is not None:
        clipped = scene.clipped_by
        odd = odd_element(own[0], own[1])
        if odd is not None:
            bit = flipped_bit(own[0] * clipped, own[1] * clipped)
            said = "one element" if bit is None else f"flipped bit {bit} of one element"
    everyone = scene.ranks.gather(said)
    factors = [factor for factor in everyone if factor is not None]
    if not factors:
        return None
    ranks = scene.ranks_of(scene.at(Moment.GRADIENTS, Subject.GRADIENTS)[0])
    sentence = (
        f"one element of the gradient of {names[0]} is off on {listed(ranks)} and nothing "
        "else: suspect the memory there, or what writes to the buffer after the reduction"
    )
    tried = "with one device's in the place of this element, all gradients are one device's"
    by_all = all(everyone[rank] == factors[0] for rank in ranks)
    return directly(scene.culprit(None, factors[0], sentence), tried, by_all=by_all)


def _rounded(scene: Investigation, names: list[str]) -> Culprit | None:
    """It differs by the rounding of a coarser dtype, in size and evenness alone."""
    pairs = [pair for name in names[:_ENOUGH] if (pair := own_part_of(scene, name)) is not None]
    dtypes = [dtype for own, right, _ in pairs if (dtype := rounded_to(own, right))]
    if (elected := scene.elected(dtypes)) is None:
        return None
    dtype, _ = elected
    sentence = f"gradients have the rounding of {dtype}: compute and reduce them in one dtype"
    axis = scene.axis_of(scene.ranks_of(scene.first))
    return scene.culprit(axis, f"rounded to {dtype}", sentence, tried=LIKE_ROUNDINGS)
