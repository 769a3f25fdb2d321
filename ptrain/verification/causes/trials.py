"""What a cause would make of every gradient, held against what the optimizers took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from ptrain.report.finding import Culprit
from ptrain.verification.causes.scene import EXACT, Investigation
from ptrain.verification.magnitude import Magnitude
from ptrain.verification.parts import TensorBox, difference, held

SUM_ONCE = "sum each sample's gradient once, over the global number of tokens"
LIKE_ROUNDINGS = "the difference is as large, and as even, as its roundings make one"
_SHARE = 0.1  # of what departs, that a cause may leave
# A parameter's name, one device's gradient of it, and which part of that this rank has, to this
# part as the cause makes it.
Hypothesis: TypeAlias = "Callable[[str, Tensor, TensorBox], Tensor]"


def own_part_of(scene: Investigation, name: str) -> tuple[Tensor, Tensor, TensorBox] | None:
    """This rank's part of a gradient, that of the reference, and where it is."""
    evidence = scene.evidence
    tensor = evidence.seen.gradients.get(name)
    whole = evidence.expected.gradients.get(name)
    if tensor is None or whole is None:
        return None
    part = scene.own_part(tensor, whole)
    if part is None or not held(tensor).numel():
        return None
    return held(tensor), part.of(whole), part


def chosen(scene: Investigation, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first departure's kind of tensor, so that it is one that departs."""
    known = [name for name in names if name in scene.evidence.expected.gradients]
    sizes = {name: scene.evidence.expected.gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])


def proven(
    scene: Investigation, cause: Culprit, words: str, hypothesis: Hypothesis
) -> Culprit | None:
    """Return the cause, proven, where it makes of one device's gradients those that the program's
    optimizers took, all of them, on all ranks; None where it does not. Collective."""
    truths = scene.evidence.expected.gradients
    scale = Magnitude.of(truths)
    left, departure = 0.0, 0.0
    for name, whole in truths.items():
        if (pair := own_part_of(scene, name)) is None:
            continue
        own, expected, part = pair
        length = scale.length(whole, expected)
        left = max(left, difference(own, hypothesis(name, whole, part), length))
        departure = max(departure, difference(own, expected, length))
    lefts, departures = zip(*scene.ranks.gather([left, departure]), strict=True)
    if max(lefts) > min(EXACT, _SHARE * max(departures)):
        return None
    count = len(truths)
    whose = f"all {count} gradients" if count > 1 else "the gradient"
    tried = f"{words} in one device's makes {whose} what the optimizers take, to {max(lefts):.1e}"
    return cause.proven(tried)


def instead(rows: Mapping[str, Tensor]) -> Hypothesis:
    """Return what makes these whole gradients in the place of one device's."""

    def hypothesis(name: str, whole: Tensor, part: TensorBox) -> Tensor:
        return part.of(rows.get(name, whole))

    return hypothesis


def directly(cause: Culprit, words: str, *, by_all: bool) -> Culprit:
    """Return the cause, proven where all ranks that depart say the same of it."""
    return cause.proven(words) if by_all else replace(cause, tried=f"on some ranks alone {words}")
