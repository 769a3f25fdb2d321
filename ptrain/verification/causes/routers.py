"""Why gradients of a router, and of what lies before it, are not those of one device: its losses
count otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ptrain.models.balance import Balance, weigh
from ptrain.models.moe import Gate
from ptrain.verification.causes.common import own_part_of
from ptrain.verification.causes.scene import EXACT, Cause, Investigation
from ptrain.verification.factors import factor_text, is_even, multiple, products

_ENOUGH = 8  # tensors that tell


def of_router_losses(scene: Investigation, names: list[str]) -> Cause | None:
    """The gradients are right but for a multiple of those of the routers' losses. Collective."""
    modules = dict(scene.reference.module.named_modules())
    if not any(isinstance(its, Balance) and its.is_wanted for its in modules.values()):
        return None
    alone = _of_losses(scene)
    own = _multiples(scene, alone, [name for name in names if bool(alone[name].any())])
    factors = [factor for its in scene.exchange.gather(own) for factor in its]
    if not factors or any(factor != factor for factor in factors):
        return None
    counted = [1.0 + factor for factor in factors]
    if abs(factors[0]) <= EXACT or not (is_even(counted) or max(map(abs, counted)) <= EXACT):
        return None
    routers = [path for path, its in modules.items() if isinstance(its, Gate)]
    place = next((path for path in routers if f"{path}.weight" in names), "")
    return _counted(scene, counted[0], place)


def _of_losses(scene: Investigation) -> dict[str, Tensor]:
    """Return the gradients of the routers' losses alone: what one device has more of where they
    count twice."""
    reference, evidence = scene.reference, scene.evidence
    weigh(reference.module, 2.0)
    try:
        sums = reference.accumulate(evidence.step).sums
    finally:
        weigh(reference.module, 0.5)
    return {
        name: sums[name] / evidence.scale - right
        for name, right in evidence.expected_gradients.items()
    }


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


def _counted(scene: Investigation, ratio: float, place: str) -> Cause:
    once = "their sum over all samples, divided by the global number of samples, is to be minimised"
    if abs(ratio) <= EXACT:
        sentence = f"the routers' losses are left out of what is minimised: {once}"
        return Cause("", "routers' losses left out", sentence, place)
    candidates = products(ratio, scene.degrees)
    axis = next((name for its in candidates for name in its.axes if name != "K"), "")
    text = factor_text(ratio, scene.degrees)
    sentence = f"the routers' losses count {text}: {once}"
    return Cause(axis, f"routers' losses {text}", sentence, place)
