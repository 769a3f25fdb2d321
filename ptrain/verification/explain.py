"""From departures to a culprit: state, axis, factor, place, and a sentence to act on.

The first departure in time is what is explained; where the parameters' gradients of the same step
tell more of it (which samples, which ranks are in the sum) they are asked first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ptrain.interpreter.program import Program
from ptrain.optimizers.update import COUNTER
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.train.schedule import learning_rate
from ptrain.verification.causes.activations import RULED_OUT as OUTPUTS_RULED_OUT
from ptrain.verification.causes.activations import output_cause
from ptrain.verification.causes.gradients import RULED_OUT as GRADIENTS_RULED_OUT
from ptrain.verification.causes.gradients import given_samples, gradient_cause
from ptrain.verification.causes.norms import norm_cause
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.causes.states import state_cause
from ptrain.verification.causes.targets import targets_cause
from ptrain.verification.causes.trials import directly
from ptrain.verification.causes.updates import proven_update
from ptrain.verification.evidence import Evidence
from ptrain.verification.factors import factor_text, products
from ptrain.verification.jobs.evidence import untold
from ptrain.verification.jobs.ranks import Ranks
from ptrain.verification.parts import held
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.samples import OF_ITS_SAMPLES
from ptrain.verification.states import of_program, of_reference

_LEDGER = {"missing": "missing", "duplicate": "twice"}  # samples, and the word that says so
_ORDER = (Subject.COUNTER, Subject.OPTIMIZER, Subject.PARAMETERS, Subject.BUFFERS)


def explain(
    departures: Sequence[Departure],
    evidence: Evidence | None,
    sides: tuple[Program, ReferenceTraining],
    ranks: Ranks,
) -> Culprit:
    """Explain all ranks' departures, the first first, with program and reference as they were when
    these were seen. Collective: all ranks give the same `departures`."""
    scene = Investigation(departures, evidence, sides, ranks)
    explainers = (*_EXPLAINERS[scene.first.subject], _unexplained)
    return next(filter(None, (explainer(scene) for explainer in explainers)))


def _of_state(scene: Investigation) -> Culprit:
    if scene.first.moment is not Moment.FORWARD:  # where parameters are used they depart alone
        scene = scene.about(_most_telling(scene))
    return _skipped(scene) if _is_left_out(scene) else state_cause(scene)


def _most_telling(scene: Investigation) -> Departure:
    """Return of one moment a counter, then optimizer state, from which parameters follow; but first
    what is not trained, and what nobody updated at all."""
    alike = scene.at(scene.first.moment)
    if scene.has_evidence and (untouched := _not_updated(scene, alike)) is not None:
        return untouched
    return min(alike, key=lambda departure: _ORDER.index(departure.subject))


def _not_updated(scene: Investigation, alike: Sequence[Departure]) -> Departure | None:
    """One that is not trained departs. Or some parameters' counters and values depart on a rank and
    others' there do not: its update did not take them along."""
    right = of_reference(scene.reference)
    counters = {
        name: float(held(tensor)) == float(right[subject, name])
        for (subject, name), tensor in of_program(scene.program).items()
        if subject is Subject.COUNTER
    }
    some = any(scene.ranks.gather(any(counters.values()) and not all(counters.values())))
    counted = {
        departure.name.rpartition(".")[0]
        for departure in alike
        if departure.subject is Subject.COUNTER
    }
    for departure in alike:
        if departure.subject is not Subject.PARAMETERS:
            continue
        if departure.name not in scene.evidence.expected.gradients:
            return departure
        if some and departure.name in counted:
            return replace(departure, subject=Subject.OPTIMIZER)
    return None


def _is_left_out(scene: Investigation) -> bool:
    """A parameter in the place of its optimizer state."""
    one = scene.one
    return one.subject is Subject.OPTIMIZER and one.name in scene.reference.parameters


def _skipped(scene: Investigation) -> Culprit:
    one = scene.one
    counter = replace(one, subject=Subject.COUNTER, name=f"{one.name}.{COUNTER}")
    of_values = replace(one, subject=Subject.PARAMETERS)
    ranks = scene.ranks_of(counter) or scene.ranks_of(of_values)
    before = scene.evidence.states[-1]
    still = True
    for (subject, name), tensor in of_program(scene.program).items():
        is_its = name == one.name or name.rpartition(".")[0] == one.name
        whole = before.get((subject, name)) if is_its else None
        if whole is not None and (part := scene.own_part(tensor, whole)) is not None:
            still = still and (scene.rank not in ranks or torch.equal(held(tensor), part.of(whole)))
    by_all = all(scene.ranks.gather(still))
    sentence = (
        f"the update leaves {one.name} out: its values, its moments and its counter are those of "
        "before; give it to the optimizer, and step the optimizer of every shard"
    )
    tried = "all of these are what they were before the update"
    cause = scene.culprit(scene.axis_of(ranks), "update skipped", sentence)
    return directly(replace(cause, ranks=ranks), tried, by_all=by_all)


def _of_output(scene: Investigation) -> Culprit | None:
    """Parameters' gradients tell more than the gradient of an output, unless a sum is missing from
    that."""
    cause = output_cause(scene)
    if scene.first.moment is Moment.FORWARD or (cause and cause.factor.startswith("missing")):
        return cause
    return _of_gradients(scene) or cause


def _of_gradients(scene: Investigation) -> Culprit | None:
    gradients = scene.at(Moment.GRADIENTS, Subject.GRADIENTS)
    if not gradients:
        return None
    is_output = scene.first.moment is Moment.BACKWARD  # whose gradient departs before
    one = replace(gradients[0], name=scene.first.name) if is_output else gradients[0]
    return gradient_cause(scene.about(one))


def _samples(scene: Investigation) -> Culprit:
    words = scene.first.told
    kinds = [kind for kind, word in _LEDGER.items() if word in words]
    factor = f"{' and '.join(kinds)} sample{'s' * (len(kinds) > 1)}" if kinds else words
    sentence = (
        f"the mesh trains on other samples than the batch has: {words}; look at the sampler, "
        "and at which share of the batch each rank takes"
    )
    axis = scene.token_axis if OF_ITS_SAMPLES in words else None
    return given_samples(scene, scene.culprit(axis, factor, sentence))


def _learning_rate(scene: Investigation) -> Culprit:
    cause = _rate_in_words(scene)
    update = next(iter(scene.at(Moment.UPDATE)), None)
    proof = proven_update(scene.about(update)) if update is not None else None
    if proof is None:
        return cause
    return replace(cause, certainty=proof.certainty, tried=proof.tried)


def _rate_in_words(scene: Investigation) -> Culprit:
    rate = float(scene.first.told.partition(" ")[0])
    schedule = scene.spec.optimizer
    others = [
        step
        for step in range(scene.spec.train.steps + 1)
        if math.isclose(learning_rate(schedule, step), rate, rel_tol=1e-9)
    ]
    if others:
        sentence = (
            f"the update has the learning rate of step {others[0]}: {scene.first.told}; step the "
            "schedule once for each update"
        )
        return scene.culprit(None, f"of step {others[0]}", sentence)
    sentence = (
        f"the update has another learning rate: {scene.first.told}; set the schedule's in every "
        "group of every rank's optimizer"
    )
    return scene.culprit(None, "other value", sentence)


def _loss(scene: Investigation) -> Culprit:
    own, right = scene.evidence.seen.loss, scene.evidence.expected.loss
    ratio = own / right if right else math.inf
    text = factor_text(ratio, scene.degrees) if math.isfinite(ratio) else "not finite"
    sentence = (
        f"the loss is {own:.6g}, one device's {right:.6g} ({text}): sum it over the data ranks "
        "once, over the global number of tokens"
    )
    cause = scene.culprit("", text, sentence)
    if products(ratio, scene.degrees, EXACT):
        return cause.proven(f"divided by {ratio:.4g} it is one device's")
    out = "other targets, a product of the mesh's degrees; the gradients are right"
    return cause.unexplained(out)


def _unexplained(scene: Investigation) -> Culprit:
    first = scene.first
    what = "gradient of its output" if first.moment is Moment.BACKWARD else "output"
    what = what if first.subject is Subject.ACTIVATIONS else str(first.subject)
    sentence = (
        f"{first.place} is the first to depart, by {first.difference:.3g} in its {what}: what "
        "comes before it is that of one device, so look at how it is computed and moved between "
        "ranks"
    )
    out = OUTPUTS_RULED_OUT
    if first.moment is Moment.GRADIENTS:
        out = GRADIENTS_RULED_OUT + untold(scene.spec.batch.accumulate)
    factor = f"differs by {first.difference:.3g}"
    return scene.culprit(None, factor, sentence).unexplained(out)


# What explains a first departure, by what departs: the first that can.
_EXPLAINERS: dict[Subject, tuple[Callable[[Investigation], Culprit | None], ...]] = {
    **dict.fromkeys(_ORDER, (_of_state,)),
    Subject.BATCH: (_samples,),
    Subject.ACTIVATIONS: (_of_output,),
    Subject.LOSS: (targets_cause, _of_gradients, _loss),
    Subject.LEARNING_RATE: (_learning_rate,),
    Subject.GRADIENTS: (_of_gradients,),
    Subject.NORM: (norm_cause,),
}
