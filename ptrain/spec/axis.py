"""Mesh axes, outermost first in a spec, and the factor: one axis with its degree and tuple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptrain.spec.placement import Placement
from ptrain.word import Word


class Axis(Word):
    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    EP = "ep"
    TP = "tp"


DATA_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD)  # that do nothing but spread samples and states
EXPERT_AXES = (Axis.EP,)  # along which ranks have experts of their own
SAMPLE_AXES = (*DATA_AXES, *EXPERT_AXES)  # along which ranks have samples of their own
TOKEN_AXES = (Axis.CP,)  # along which they have tokens of their own of the same samples
# along which gradients are summed, as every rank has addends of them: outermost first
REDUCED_AXES = (*DATA_AXES, *TOKEN_AXES, *EXPERT_AXES)
# along which they run other parts of a layer, or it on other tokens
CUTTING_AXES = (*TOKEN_AXES, *EXPERT_AXES, Axis.TP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of the product: axis, number of ranks along it, placement on it."""

    axis: Axis
    degree: int
    placement: Placement


def axes_named(group: str) -> tuple[str, ...]:
    """Return the axes that a mesh's group of one or several cutting axes is named by: `ep`, or
    `ep_tp`. Any other name is its own."""
    parts = tuple(group.split("_"))
    return parts if {*parts} <= {*CUTTING_AXES} else (group,)


def without(axes: Sequence[Axis], others: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return these axes but for those."""
    return tuple(axis for axis in axes if axis not in others)
