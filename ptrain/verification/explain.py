"""From departures to a culprit: state, axis, factor, place, and a sentence to act on.

The first departure in time is what is explained; where the parameters' gradients of the same step
tell more of it (which samples, which ranks are in the sum) they are asked first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ptrain.interpreter.program import Program
from ptrain.report.finding import Culprit, Departure, Moment, Subject
from ptrain.train.exchange import Exchange
from ptrain.train.schedule import learning_rate
from ptrain.verification.causes.activations import output_cause
from ptrain.verification.causes.gradients import gradient_cause
from ptrain.verification.causes.scene import EXACT, Cause, Scene
from ptrain.verification.causes.states import state_cause
from ptrain.verification.evidence import Evidence
from ptrain.verification.factors import factor_text, products
from ptrain.verification.reference import OneDevice

_ORDER = (Subject.COUNTER, Subject.OPTIMIZER, Subject.PARAMETERS, Subject.BUFFERS)


def explain(
    found: Sequence[Departure],
    evidence: Evidence | None,
    sides: tuple[Program, OneDevice],
    exchange: Exchange,
) -> Culprit:
    """Of all ranks' departures, the first first; with program and reference as they were when
    these were found. Collective: all ranks give the same `found`."""
    program, reference = sides
    scene = Scene(found, evidence, reference, exchange)
    one, cause = _cause(scene, program)
    return Culprit(
        state=one.subject,
        axis=cause.axis,
        factor=cause.factor,
        place=cause.place or one.name,
        step=one.step,
        ranks=scene.ranks_of(one),
        sentence=cause.sentence,
    )


def _cause(scene: Scene, program: Program) -> tuple[Departure, Cause]:
    first = scene.first
    match first.moment:
        case Moment.START | Moment.UPDATE:
            one = _most_telling(scene)
            return one, state_cause(scene, one, program)
        case Moment.BATCH:
            return first, _samples(scene)
        case Moment.FORWARD if first.subject is Subject.ACTIVATIONS:
            return first, output_cause(scene) or _unexplained(scene)
        case Moment.FORWARD | Moment.BACKWARD | Moment.GRADIENTS:
            return _of_backward(scene)
        case Moment.CLIP:
            return first, _norm(scene)
    raise AssertionError(f"no moment of a step: {first.moment}")


def _most_telling(scene: Scene) -> Departure:
    """Of one moment: a counter, then optimizer state, from which parameters follow."""
    alike = scene.at(scene.first.moment)
    return min(alike, key=lambda each: _ORDER.index(each.subject))


def _of_backward(scene: Scene) -> tuple[Departure, Cause]:
    """The loss is wrong, or something of the backward pass, or the gradients' sum."""
    first = scene.first
    if first.subject is Subject.LEARNING_RATE:
        return first, _learning_rate(scene)
    gradients = scene.at(Moment.GRADIENTS, Subject.GRADIENTS)
    if first.moment is Moment.BACKWARD and (cause := output_cause(scene)) is not None:
        is_partial = cause.factor.startswith("missing")
        if is_partial or not gradients:
            return first, cause
    if gradients and (cause := gradient_cause(scene)) is not None:
        place = first.name if first.moment is Moment.BACKWARD else gradients[0].name
        return gradients[0], Cause(cause.axis, cause.factor, cause.sentence, place)
    if first.subject is Subject.LOSS:
        return first, _loss(scene)
    return first, _unexplained(scene)


def _samples(scene: Scene) -> Cause:
    told = scene.first.told
    ranks = scene.ranks_of(scene.first)
    factor = (
        "missing sample" if "missing" in told else "duplicate sample" if "twice" in told else told
    )
    if "missing" in told and "twice" in told:
        factor = "missing and duplicate samples"
    sentence = f"the mesh trains on other samples than the batch has: {told}"
    return Cause(scene.axis_of(ranks), factor, sentence)


def _learning_rate(scene: Scene) -> Cause:
    rate = float(scene.first.told.partition(" ")[0])
    schedule = scene.spec.optimizer
    others = [
        step
        for step in range(scene.spec.train.steps + 1)
        if math.isclose(learning_rate(schedule, step), rate, rel_tol=1e-9)
    ]
    axis = scene.axis_of(scene.ranks_of(scene.first))
    if others:
        sentence = f"the update has the learning rate of step {others[0]}: {scene.first.told}"
        return Cause(axis, f"of step {others[0]}", sentence)
    return Cause(axis, "other value", f"the update has another learning rate: {scene.first.told}")


def _loss(scene: Scene) -> Cause:
    evidence = scene.evidence
    ratio = evidence.loss / evidence.expected_loss
    text = factor_text(ratio, scene.degrees) if math.isfinite(ratio) else "not finite"
    sentence = (
        f"the loss is {evidence.loss:.6g}, one device's {evidence.expected_loss:.6g} ({text})"
    )
    return Cause("", text, sentence)


def _norm(scene: Scene) -> Cause:
    """Whether it is that of this rank's shards alone, or counts replicas several times."""
    evidence = scene.evidence
    norms = scene.exchange.gather(evidence.norm)
    expected = evidence.expected_norm
    for axis in scene.axes:
        squares = [norms[rank] ** 2 for rank in scene.line(scene.rank, axis)]
        right = math.isclose(math.sqrt(sum(squares)), expected, rel_tol=EXACT)
        if any(scene.exchange.gather(right)):
            sentence = (
                f"clipping uses the norm of each rank's own shards: sum its square over {axis}"
            )
            return Cause(str(axis), f"missing all-reduce over {axis}", sentence)
    ratio = norms[scene.first.rank] / expected if expected else math.inf
    found = products(ratio, scene.degrees)
    along = next((name for each in found for name in each.axes if name != "K"), "")
    text = factor_text(ratio, scene.degrees)
    sentence = f"the gradient norm is {text}: {scene.first.told}; count every element once"
    return Cause(along or scene.axis_of(scene.ranks_of(scene.first)), text, sentence)


def _unexplained(scene: Scene) -> Cause:
    first = scene.first
    ranks = scene.ranks_of(first)
    what = "gradient of its output" if first.moment is Moment.BACKWARD else "output"
    what = what if first.subject is Subject.ACTIVATIONS else str(first.subject)
    sentence = (
        f"{first.name} is the first to depart, by {first.difference:.3g} in its {what}: what comes "
        "before it is that of one device"
    )
    return Cause(scene.axis_of(ranks), f"differs by {first.difference:.3g}", sentence)
