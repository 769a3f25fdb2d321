"""Definition 2: the five modes, mesh axes (outermost first in a spec), the tuple (Theta, Omega, G,
A) of an axis, and a factor: an axis with its degree and tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ptrain.cost import State
from ptrain.word import Word


class Distribution(Word):
    """How a state is spread over the ranks of an axis, or how it comes to be."""

    REPLICATED = "R"
    SHARDED = "S"
    GATHERED = "S*"
    MATERIALIZED = "M"


class Tier(Word):
    """Where the bytes live."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


CUT = (Distribution.SHARDED, Distribution.GATHERED)  # a rank keeps a slice
TIER_DISTANCE = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.FILE: 2}  # from the device, in copies


@dataclass(frozen=True, slots=True)
class Mode:
    """A distribution on a tier: `R`, `S`, `S*`, `M`, `O` (= `S@host`), `R@host`, `S@file` …"""

    distribution: Distribution
    tier: Tier = Tier.DEVICE

    @classmethod
    @cache
    def parse(cls, text: str) -> Mode:
        """Raises ValueError for anything that is not a mode. That M has a tier for A alone (whose
        recomputed blocks keep their inputs there) the grammar says."""
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
    """One tuple (Theta, Omega, G, A)."""

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


OF_EXPERTS = Placement(parameters=S, optimizer=S, gradients=S, activations=S)  # on ep


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


class Factor(NamedTuple):
    """One factor of the product: axis, number of ranks along it, placement on it."""

    axis: Axis
    degree: int
    placement: Placement


@cache
def axes_named(group: str) -> tuple[str, ...]:
    """Return the axes that a mesh's group of one or several cutting axes is named by: `ep`, or
    `ep_tp`. Any other name is its own."""
    parts = tuple(group.split("_"))
    return parts if {*parts} <= {*CUTTING_AXES} else (group,)


def without(axes: Sequence[Axis], others: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return these axes but for those."""
    return tuple(axis for axis in axes if axis not in others)
