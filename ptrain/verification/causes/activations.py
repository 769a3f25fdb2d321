"""Explain why a module's output, or its gradient, differs from one device's.

Gradients of a router, and of layers before it, also differ if the router's losses are counted
differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ptrain.models.moe import Balance, Gate, weigh
from ptrain.report.finding import Moment, RootCause, Subject
from ptrain.verification.causes.context import (
    OF_VALUES,
    Explanation,
    Sides,
    context_cause,
    differing,
    of_values,
)
from ptrain.verification.causes.experts import experts_cause
from ptrain.verification.causes.rerun import (
    EXACT,
    LIKE_ROUNDINGS,
    Investigation,
    call_of,
    directly,
    instead,
    output_with,
    own_part_of,
    proven,
)
from ptrain.verification.parts import (
    COARSER,
    factor_text,
    is_even,
    missing_sum,
    multiple,
    named,
    products,
    relative,
    rounded,
)

_ENOUGH = 8  # tensors that tell


def of_router_losses(scene: Investigation, names: list[str]) -> RootCause | None:
    """The gradients are right but for a multiple of those of the routers' losses. Collective."""
    modules = dict(scene.reference.module.named_modules())
    if not any(isinstance(its, Balance) and its.is_wanted for its in modules.values()):
        return None
    alone = _of_losses(scene)
    own = _multiples(scene, alone, [name for name in names if bool(alone[name].any())])
    factors = [factor for its in scene.ranks.gather(own) for factor in its]
    if any(factor != factor for factor in factors):
        return _of_tokens_together(scene)
    if not factors:
        return None
    counted = [1.0 + factor for factor in factors]
    if abs(factors[0]) <= EXACT or not (is_even(counted) or max(map(abs, counted)) <= EXACT):
        return None
    routers = [path for path, its in modules.items() if isinstance(its, Gate)]
    place = next((path for path in routers if f"{path}.weight" in names), "")
    cause = _counted(scene, counted[0], place)
    wrong = {n: g + factors[0] * alone[n] for n, g in scene.evidence.expected.gradients.items()}
    return proven(
        scene, cause, f"{counted[0]:.4g} times the gradients of the router losses", instead(wrong)
    )


def _of_losses(scene: Investigation) -> dict[str, Tensor]:
    """Return the gradients of the routers' losses alone: what one device has more of where they
    count twice."""
    reference, evidence = scene.reference, scene.evidence
    weigh(reference.module, 2.0)
    try:
        twice = reference.accumulate(evidence.step).gradients
    finally:
        weigh(reference.module, 0.5)
    return {name: twice[name] - right for name, right in evidence.expected.gradients.items()}


def _multiples(scene: Investigation, alone: dict[str, Tensor], names: Sequence[str]) -> list[float]:
    """Return how often this rank's parts have them too much; no number of one that is no such
    multiple."""
    factors: list[float] = []
    for name in names[:_ENOUGH]:
        if (pair := own_part_of(scene, name)) is None:
            continue
        own, expected, part = pair
        addend = part.of(alone[name])
        if not bool(addend.any()):
            continue
        fit = multiple(own - expected, addend)
        factors.append(fit.factor if fit.holds(EXACT) else float("nan"))
    return factors


def _of_tokens_together(scene: Investigation) -> RootCause | None:
    """The gradients are those of losses of all tokens of a micro-batch, not of each sample's."""
    reference, evidence = scene.reference, scene.evidence
    balances = [its for its in reference.module.modules() if isinstance(its, Balance)]
    for balance in balances:
        balance.forward = partial(_together, balance.forward)  # type: ignore[method-assign]
    try:
        wrong = reference.accumulate(evidence.step).gradients
    finally:
        for balance in balances:
            del balance.forward
    cause = scene.root_cause(*_TOGETHER)
    return proven(scene, cause, "the router losses of all tokens together", instead(wrong))


def balance_cause(scene: Investigation) -> RootCause | None:
    """Explain what a router's loss is, where the differing module computes one: that of all tokens
    of a micro-batch. Collective."""
    path, number = scene.first.name, scene.first.index
    balance = scene.reference.module.get_submodule(path)
    if not isinstance(balance, Balance) or scene.first.moment is not Moment.FORWARD:
        return None
    own = scene.evidence.seen.outputs.forward.get((path, number))
    routing_BT, _ = call_of(scene, path) if own is not None else ((), None)
    with torch.no_grad():
        fits = own is not None and relative(own, _together(balance, *routing_BT)) <= EXACT
    everyone = [its for its in scene.ranks.gather(None if own is None else fits) if its is not None]
    if not everyone or not all(everyone):
        return None
    cause = scene.root_cause(*_TOGETHER)
    return cause.proven(f"{path} with all tokens together reproduces the output on the ranks")


_TOGETHER = (
    "",
    "router losses over full micro-batches",
    (
        "The router losses are computed over all tokens of a micro-batch together. Compute "
        "shares and mean scores per sample, so that the losses do not depend on where samples "
        "are computed."
    ),
)


def _together(loss: Callable[..., Tensor], *routing_BT: Tensor) -> Tensor:
    """Return a loss of all samples' tokens as if they were one sample's, for each of these."""
    return len(routing_BT[0]) * loss(*(x_BT.flatten(0, 1)[None] for x_BT in routing_BT))


def _counted(scene: Investigation, ratio: float, place: str) -> RootCause:
    once = "Minimize their sum over all samples, divided by the global number of samples."
    if abs(ratio) <= EXACT:
        sentence = f"The router losses are left out of the objective. {once}"
        factor = "router losses left out"
        return scene.root_cause("", factor, sentence, place=place)
    candidates = products(ratio, scene.degrees)
    axis = next((name for its in candidates for name in its.axes if name != "K"), "")
    text = factor_text(ratio, scene.degrees)
    factor, sentence = f"router losses {text}", f"The router losses are weighted {text}. {once}"
    return scene.root_cause(axis, factor, sentence, place=place)


_MOST_VALUES = 4096  # of an output that ranks tell each other
RULED_OUT = (
    "a partial sum over ranks, other parameters, rows of other tokens or experts, keys and "
    f"positions of other sequence shards, {OF_VALUES}"
)


def output_cause(scene: Investigation) -> RootCause | None:
    """Explain the first mismatch, a module's output or the gradient of it. Collective."""
    causes: tuple[Callable[[Investigation], RootCause | None], ...] = (
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


def _partial(scene: Investigation) -> RootCause | None:
    """Over some axis the sum of what the differing ranks have is one device's."""
    sides, departing_ranks = differing(scene), set(scene.ranks_of(scene.first))
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
            what = f"Each rank of {axes} has a partial sum of {_what(scene)}. Sum it over {axes}."
            cause = scene.root_cause(
                axis.partition("+")[0], f"missing all-reduce over {axes}", what
            )
            return cause.proven(f"summed over {axes} it matches the reference")
    return None


def _other_weights(scene: Investigation) -> RootCause | None:
    """The output is what the module makes with the weights of an earlier step, or rounded ones."""
    said: list[str] = []
    sides = differing(scene)
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
            f"{scene.first.place} computes with parameters from before the update. Gather or "
            "copy them after the update."
        )
    else:
        sentence = f"{scene.first.place} computes with parameters in another dtype. Use one dtype."
    tried = (
        f"with these parameters, {scene.first.place} of the reference returns the values "
        "on the ranks"
    )
    return directly(scene.root_cause(None, text, sentence), tried, by_all=by_all)


def _candidates(scene: Investigation) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return parameters of the differing module that might have been used: those of earlier steps,
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


def _by_values(scene: Investigation) -> RootCause | None:
    """What it is of one device's, whatever computes it."""
    sides, name = differing(scene), scene.first.name
    boxes = scene.boxes({} if sides is None else {name: sides.part}).get(name, {})
    is_off = sides is not None and _is_off(sides)
    said = of_values(scene, _what(scene), sides, boxes) if sides is not None and is_off else None
    if (elected := scene.elected([] if said is None else [list(said)])) is None:
        return None
    agreed, by_all = Explanation(*elected[0]), elected[1]
    cause = scene.root_cause(agreed.axis or None, agreed.factor, agreed.sentence)
    if agreed.tried:
        return directly(cause, agreed.tried, by_all=by_all)
    return replace(cause, tried=LIKE_ROUNDINGS if agreed.factor.startswith("rounded") else "")
