"""What causes of wrong gradients look at: a rank's part, a tensor that tells."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ptrain.verification.causes.scene import Investigation
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


def chosen(scene: Investigation, names: Iterable[str], least: int) -> str:
    """The smallest parameter of which every rank has at least so many elements, else the largest;
    chosen by the first departure's kind of tensor, so that it is one that departs."""
    known = [name for name in names if name in scene.evidence.expected_gradients]
    sizes = {name: scene.evidence.expected_gradients[name].numel() for name in known}
    enough = [name for name in known if sizes[name] >= least * scene.spec.world_size]
    if enough:
        return min(enough, key=lambda name: sizes[name])
    return max(known, key=lambda name: sizes[name])
