"""What causes of wrong gradients look at: a rank's part, a tensor that tells, a ratio in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.factors import is_even, multiple
from ptrain.verification.parts import TensorBox, held

SUM_ONCE = "sum each sample's gradient once, over the global number of tokens"


def own_part_of(
    scene: Investigation, name: str
) -> tuple[torch.Tensor, torch.Tensor, TensorBox] | None:
    """This rank's part of a gradient, that of the reference, and where it is."""
    evidence = scene.evidence
    tensor = evidence.gradients.get(name)
    whole = evidence.expected_gradients.get(name)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    if part is None or not held(tensor).numel():
        return None
    return held(tensor), part.of(whole), part


def raw(scene: Investigation, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    evidence = scene.evidence
    return evidence.gradients.get(name), evidence.expected_gradients.get(name)


def chosen(scene: Investigation, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first departure's kind of tensor, so that it is one that departs."""
    known = [name for name in names if name in scene.evidence.expected_gradients]
    sizes = {name: scene.evidence.expected_gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])


def even_ratio(scene: Investigation, names: Sequence[str]) -> float | None:
    """Return which multiple of the right gradients all of these are that depart, 0 where nothing is
    left of them; None where they are none, or different ones. Collective."""
    own: dict[str, float] = {}
    for name in names:
        pair = own_part_of(scene, name)
        if pair is None or not bool(pair[1].any()):
            continue
        if not bool(pair[0].any()):
            own[name] = 0.0
            continue
        fit = multiple(pair[0], pair[1])
        if not fit.holds(EXACT):
            own = {name: float("nan")}
            break
        own[name] = fit.factor
    factors = [factor for its in scene.exchange.gather(own) for factor in its.values()]
    wrong = [factor for factor in factors if abs(factor - 1.0) > EXACT]
    if not wrong or any(factor != factor for factor in factors) or not is_even(wrong):
        return None
    return 0.0 if abs(wrong[0]) <= EXACT else wrong[0]


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
