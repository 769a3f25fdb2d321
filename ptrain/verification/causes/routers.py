"""Why gradients of a router, and of what lies before it, are not those of one device: its losses
count otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ptrain.models.balance import Balance, weigh
from ptrain.models.moe import Gate
from ptrain.report.finding import Culprit, Moment
from ptrain.verification.causes.rerun import (
    EXACT,
    Investigation,
    call_of,
    instead,
    own_part_of,
    proven,
)
from ptrain.verification.parts import factor_text, is_even, multiple, products, relative

_ENOUGH = 8  # tensors that tell


def of_router_losses(scene: Investigation, names: list[str]) -> Culprit | None:
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
    words = f"{counted[0]:.4g} times the gradients of the routers' losses"
    return proven(scene, cause, words, instead(wrong))


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


def _of_tokens_together(scene: Investigation) -> Culprit | None:
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
    cause = scene.culprit(*_TOGETHER)
    return proven(scene, cause, "the losses of all tokens together", instead(wrong))


def balance_cause(scene: Investigation) -> Culprit | None:
    """Explain what a router's loss is, where the departing module computes one: that of all tokens
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
    cause = scene.culprit(*_TOGETHER)
    return cause.proven(f"{path} with all tokens together is what ranks have")


_TOGETHER = (
    "",
    "routers' losses of whole micro-batches",
    "the routers' losses are of all tokens of a micro-batch together: shares and mean scores "
    "are those of each sample's tokens, so that it is the same wherever samples are computed",
)


def _together(loss: Callable[..., Tensor], *routing_BT: Tensor) -> Tensor:
    """Return a loss of all samples' tokens as if they were one sample's, for each of these."""
    return len(routing_BT[0]) * loss(*(x_BT.flatten(0, 1)[None] for x_BT in routing_BT))


def _counted(scene: Investigation, ratio: float, place: str) -> Culprit:
    once = "their sum over all samples, divided by the global number of samples, is to be minimised"
    if abs(ratio) <= EXACT:
        sentence = f"the routers' losses are left out of what is minimised: {once}"
        factor = "routers' losses left out"
        return scene.culprit("", factor, sentence, place=place)
    candidates = products(ratio, scene.degrees)
    axis = next((name for its in candidates for name in its.axes if name != "K"), "")
    text = factor_text(ratio, scene.degrees)
    factor, sentence = f"routers' losses {text}", f"the routers' losses count {text}: {once}"
    return scene.culprit(axis, factor, sentence, place=place)
