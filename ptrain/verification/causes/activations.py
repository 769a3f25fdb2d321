"""Why a module's output, or the gradient of it, is not that of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ptrain.report.finding import Culprit, Moment, Subject
from ptrain.verification.causes.context import context_cause, departing
from ptrain.verification.causes.experts import experts_cause
from ptrain.verification.causes.rerun import (
    EXACT,
    LIKE_ROUNDINGS,
    Investigation,
    directly,
    output_with,
)
from ptrain.verification.causes.routers import balance_cause
from ptrain.verification.causes.values import OF_VALUES, Explanation, Sides, of_values
from ptrain.verification.parts import COARSER, missing_sum, named, relative, rounded

_MOST_VALUES = 4096  # of an output that ranks tell each other
RULED_OUT = (
    "an addend of a sum over ranks, other parameters, rows of other tokens or experts, keys and "
    f"positions of other slices, {OF_VALUES}"
)


def output_cause(scene: Investigation) -> Culprit | None:
    """Explain the first departure, a module's output or the gradient of it. Collective."""
    causes: tuple[Callable[[Investigation], Culprit | None], ...] = (
        balance_cause,
        _partial,
        _other_weights,
        experts_cause,
        context_cause,
        _by_values,
    )
    return next(filter(None, (cause(scene) for cause in causes)), None)


def _what(scene: Investigation) -> str:
    what = "output" if scene.first.moment is Moment.FORWARD else "output's gradient"
    return f"the {what} of {scene.first.place}"


def _partial(scene: Investigation) -> Culprit | None:
    """Over some axis the sum of what the departing ranks have is one device's."""
    sides, departing_ranks = departing(scene), set(scene.ranks_of(scene.first))
    rows = torch.full((2, _MOST_VALUES), math.nan, dtype=torch.float64)
    for row, tensor in zip(rows, (sides.own, sides.expected) if sides else (), strict=False):
        values = tensor.double().reshape(-1)[:_MOST_VALUES].nan_to_num(nan=math.inf)
        row[: len(values)] = values
    parts, truths = scene.ranks.stack(rows).unbind(1)
    for axis, groups in scene.ranks.summed.items():
        its = [group for group in groups if departing_ranks & set(group)]
        factor = missing_sum(parts, truths, its, EXACT)
        if factor is not None and abs(factor - 1.0) <= EXACT:
            axes = axis.replace("+", " and ")
            what = f"each rank of {axes} has its own addend of {_what(scene)}: sum it over {axes}"
            cause = scene.culprit(axis.partition("+")[0], f"missing all-reduce over {axes}", what)
            return cause.proven(f"summed over {axes} it is one device's")
    return None


def _other_weights(scene: Investigation) -> Culprit | None:
    """The output is what the module makes with the weights of an earlier step, or rounded ones."""
    said: list[str] = []
    sides = departing(scene)
    if scene.first.moment is Moment.FORWARD and sides is not None and _is_off(sides):
        for text, weights in _candidates(scene):
            output = output_with(scene, weights)
            if output is None:
                continue
            right = sides.part.of(scene.as_held(scene.first.name, output))
            if relative(sides.own, right) <= EXACT * 1e-3:
                said.append(text)
                break
    if (elected := scene.elected(said)) is None:
        return None
    text, by_all = elected
    if text.startswith("stale"):
        sentence = (
            f"{scene.first.place} computes with parameters that the update has not reached: gather "
            "or copy them after it"
        )
    else:
        sentence = f"{scene.first.place} computes with parameters in another dtype: keep one dtype"
    tried = f"with these parameters one device's {scene.first.place} returns what the ranks have"
    return directly(scene.culprit(None, text, sentence), tried, by_all=by_all)


def _candidates(scene: Investigation) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return parameters of the departing module that might have been used: those of earlier steps,
    and the right ones rounded."""
    evidence, path = scene.evidence, scene.first.name
    candidates = []
    for back, states in enumerate(reversed(evidence.states)):
        own = {
            name: tensor
            for (subject, name), tensor in states.items()
            if subject is Subject.PARAMETERS and (not path or name.startswith(f"{path}."))
        }
        if back:
            candidates.append((f"stale by {back} step{'s' * (back > 1)}", own))
        else:
            candidates += [
                (f"{named(dtype)} parameters", {n: rounded(its, dtype) for n, its in own.items()})
                for dtype in COARSER
            ]
    return [(text, weights) for text, weights in candidates if weights]


def _is_off(sides: Sides) -> bool:
    return relative(sides.own, sides.expected) > EXACT * 1e-3


def _by_values(scene: Investigation) -> Culprit | None:
    """What it is of one device's, whatever computes it."""
    sides, name = departing(scene), scene.first.name
    boxes = scene.boxes({} if sides is None else {name: sides.part}).get(name, {})
    is_off = sides is not None and _is_off(sides)
    said = of_values(scene, _what(scene), sides, boxes) if sides is not None and is_off else None
    if (elected := scene.elected([] if said is None else [list(said)])) is None:
        return None
    agreed, by_all = Explanation(*elected[0]), elected[1]
    cause = scene.culprit(agreed.axis or None, agreed.factor, agreed.sentence)
    if agreed.tried:
        return directly(cause, agreed.tried, by_all=by_all)
    return replace(cause, tried=LIKE_ROUNDINGS if agreed.factor.startswith("rounded") else "")
