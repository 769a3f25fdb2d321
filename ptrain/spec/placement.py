"""The placement of states on a mesh (Definition 2): modes, mesh axes (outermost first in a spec),
the tuple (Θ, Ω, G, A) of an axis, and factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ptrain.cost import State
from ptrain.word import Word


class Distribution(Word):
    """The way in which a state is distributed over the ranks of an axis, or recreated."""

    REPLICATED = "R"
    SHARDED = "S"
    GATHERED = "S*"
    MATERIALIZED = "M"


class Tier(Word):
    """The memory or storage that holds the bytes."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


CUT = (Distribution.SHARDED, Distribution.GATHERED)  # each rank stores a shard
TIER_DISTANCE = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.FILE: 2}  # from the device, in copies


@dataclass(frozen=True, slots=True)
class Mode:
    """A distribution on a tier: `R`, `S`, `S*`, `M`, `O` (= `S@host`), `R@host`, `S@file` …"""

    distribution: Distribution
    tier: Tier = Tier.DEVICE

    @classmethod
    @cache
    def parse(cls, text: str) -> Mode:
        """Parse the text of a mode.

        Tiers that only some states may have, such as M@host for activations, are checked by the
        grammar.

        Raises:
            ValueError: The text is not a mode.
        """
        if text == "O":
            return OFFLOADED
        head, _, tail = text.partition("@")
        return cls(Distribution(head), Tier(tail or "device"))

    def __str__(self) -> str:
        if self == OFFLOADED:
            return "O"
        suffix = "" if self.tier is Tier.DEVICE else f"@{self.tier}"
        return f"{self.distribution}{suffix}"


R = Mode(Distribution.REPLICATED)
S = Mode(Distribution.SHARDED)
S_STAR = Mode(Distribution.GATHERED)
M = Mode(Distribution.MATERIALIZED)
OFFLOADED = Mode(Distribution.SHARDED, Tier.HOST)
MODES = (R, S, S_STAR, M, OFFLOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The modes of parameters, optimizer state, gradients and activations on one axis."""

    parameters: Mode
    optimizer: Mode
    gradients: Mode
    activations: Mode = R

    def __getitem__(self, state: State) -> Mode:
        mode: Mode = getattr(self, state.value)
        return mode

    def __str__(self) -> str:
        return ",".join(
            map(str, (self.parameters, self.optimizer, self.gradients, self.activations))
        )


# The only legal tuple of experts on ep (`shorthand.fault_of_experts`): each expert is on one rank.
OF_EXPERTS = Placement(parameters=S, optimizer=S, gradients=S, activations=S)  # on ep


class Axis(Word):
    """An axis of the mesh."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    EP = "ep"
    TP = "tp"


DATA_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD)  # distribute only samples and states
EXPERT_AXES = (Axis.EP,)  # distribute the experts
SAMPLE_AXES = (*DATA_AXES, *EXPERT_AXES)  # ranks along them have different samples
TOKEN_AXES = (Axis.CP,)  # ranks along them have different tokens of the same samples
# Axes over which gradients are summed, because each rank has a partial gradient; outermost first.
REDUCED_AXES = (*DATA_AXES, *TOKEN_AXES, *EXPERT_AXES)
# Axes along which ranks compute different parts of a layer, or a layer on different tokens.
CUTTING_AXES = (*TOKEN_AXES, *EXPERT_AXES, Axis.TP)


class Factor(NamedTuple):
    """A factor of the mesh product: an axis, the number of ranks along it, and the placement on
    it."""

    axis: Axis
    degree: int
    placement: Placement


@cache
def axes_named(group: str) -> tuple[str, ...]:
    """Return the axes in the name of a process group: `ep_tp` is ep and tp. Any other name is a
    single axis."""
    # Only cutting axes form joint groups (experts folded over ep and tp). `dp_shard` also contains
    # an underscore, but is one axis.
    parts = tuple(group.split("_"))
    return parts if {*parts} <= {*CUTTING_AXES} else (group,)


def exclude_axes(axes: Sequence[Axis], others: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that are not in `others`, in order."""
    return tuple(axis for axis in axes if axis not in others)
