"""The placement of states on a mesh (Definition 2): modes, mesh axes (outermost first in a spec),
the tuple (Θ, Ω, G, A) of an axis, and factors. Also the roles of modules in tensor parallelism:
which operators are sharded, and along which dimension.

Roles follow Shoeybi et al. 2019 (Megatron-LM): a column operator is sharded by output features, and
the row operator after it by input features, so that a pair needs one sum in forward and one in
backward. Module names are dotted; `*` stands for a block's index.
"""

from __future__ import annotations

import re
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


class Role(Word):
    """The part of a module in tensor, sequence or expert parallelism."""

    COLUMN = "column"  # sharded by output features
    FUSED_COLUMN = "fused column"  # several concatenated projections, each sharded by outputs
    TRANSPOSED_COLUMN = "transposed column"  # a weight stored as inputs x outputs
    # sharded by output features, which are all-gathered over the ranks that share a key-value head
    GROUP_COLUMN = "group column"
    ROW = "row"  # sharded by input features; outputs are partial sums
    TRANSPOSED_ROW = "transposed row"
    VOCABULARY = "vocabulary"  # an embedding, sharded by rows
    HEAD = "head"  # a column operator over the vocabulary
    WHOLE_INPUT = "whole input"  # a sub-block: the input of its column operators is gathered once
    # a sub-block of latent features: its input is full, and the input gradient a partial sum
    LATENT_INPUT = "latent input"
    LATENT = "latent"  # before its inner columns: replicated, gradients summed
    # a sub-block of experts: its input is full, and its output a partial sum
    EXPERTS = "experts"
    # a sub-block of experts that are not sharded: its input and output are the rank's tokens
    WHOLE_EXPERTS = "whole experts"
    INNER_COLUMN = "inner column"  # within these sub-blocks: sharded by output features
    INNER_ROW = "inner row"  # sharded by input features; outputs are partial sums of the sub-block
    SHARED = "shared"  # a replicated tensor, used on the rank's shard of the features
    NORM = "norm"  # a replicated tensor, used on the rank's shard of the tokens
    LAST_NORM = "last norm"  # a norm whose output is all-gathered for the head
    POSITIONS = "positions"  # an embedding of positions, added to the token embedding
    COUNT = "count"  # an integer attribute instead of a module: a number of features or heads
    BLOCK = "block"  # of a model that is not built in: holds only the rank's tokens
    FIRST_BLOCK = "first block"  # its input is sharded by tokens
    LAST_BLOCK = "last block"  # its output is all-gathered


Roles = tuple[tuple[str, Role], ...]
# The sizes of the concatenated outputs of a fused projection, by patterns of module names.
Fusions = tuple[tuple[str, tuple[int, ...]], ...]

COLUMNS = (Role.COLUMN, Role.FUSED_COLUMN, Role.TRANSPOSED_COLUMN, Role.GROUP_COLUMN)
ROWS = (Role.ROW, Role.TRANSPOSED_ROW)

# The roles that a user's plan may contain, with their meanings.
GIVEN = {
    Role.COLUMN: "a linear layer, sharded by output features",
    Role.FUSED_COLUMN: "a linear layer of several projections, each sharded by output features",
    Role.ROW: "a linear layer, sharded by input features; its outputs are summed over the ranks",
    Role.VOCABULARY: "an embedding, sharded by rows",
    Role.HEAD: "the linear layer to the vocabulary, sharded by output features",
    Role.WHOLE_INPUT: "a module whose column layers share one input; its gradient is summed once",
    Role.SHARED: "replicated, used between column and row layers; its gradients are summed",
    Role.NORM: "replicated, between the sub-blocks; takes the tokens of the rank if A is S or S*",
    Role.LAST_NORM: "the norm before the head; takes all tokens",
    Role.COUNT: "an integer attribute of a module, as its number of heads: the value of the rank",
    Role.EXPERTS: "the module of all experts of a layer; sharded over ep, replicated on tp",
}


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if the pattern matches a dotted module name."""
    return _compile_pattern(pattern).fullmatch(name) is not None


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def in_any_block(name: str) -> str:
    """Return a module's name with `*` for each index, as plans write it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
