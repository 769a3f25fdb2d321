"""How many samples a step takes, and how they are split over micro-batches and data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Resolved: `global_samples == micro * accumulate * data_degree`. `sequence` in tokens."""

    global_samples: int
    micro: int
    sequence: int
    accumulate: int

    @property
    def tokens(self) -> int:
        """Tokens of one step over the whole mesh."""
        return self.global_samples * self.sequence


class GradientSync(StrEnum):
    """When accumulated gradients are reduced: after every micro-batch, or after the last."""

    EVERY = "every"
    LAST = "last"


class Reshard(StrEnum):
    """Which gathered units are given back after forward, where that is neither all nor none:
    `non-root` keeps the root for its backward pass, which begins at once. It is what torch's
    `fully_shard` does by itself (`reshard_after_forward=None`)."""

    NON_ROOT = "non-root"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPolicy:
    """The accumulation's policy, resolved.

    With U gathered units, K micro-batches and S* parameters: (every, True, True) moves 3K units,
    (last, True, True) 2K+1, (last, True, False) K+2, (last, False, True) K+1, (last, False,
    False) 2. Whatever the policy, the last micro-batch reduces and reshards.
    Gradients that are R on every data axis are always `last`: to reduce a sum that already holds
    a reduced part would count that part once per rank.
    An integer n for `reshard_after_forward` keeps each gathered unit in n shards until backward
    (FSDP2's smaller groups of n neighbours); `non-root` is true for every unit but the root.
    """

    gradients: GradientSync = GradientSync.EVERY
    reshard_after_forward: bool | int | Reshard = True
    reshard_after_backward: bool = True

    def after_forward(self, *, is_root: bool) -> bool | int:
        """Whether a gathered unit is given back after its forward pass, or the number of shards
        that it is kept in."""
        if isinstance(self.reshard_after_forward, Reshard):
            return not is_root
        return self.reshard_after_forward


class ReduceScatterVia(StrEnum):
    """`native`: the backend's own (gloo executes it as an all-reduce); `all_to_all`: an exchange
    and a local sum, a true reduce-scatter on gloo."""

    NATIVE = "native"
    ALL_TO_ALL = "all_to_all"


class UnitKind(StrEnum):
    """What is gathered, reduced and freed together (the paper's s_unit)."""

    BLOCK = "block"
    SUB_BLOCK = "sub-block"  # a block's children that have children; the block keeps the rest
    BLOCKS = "blocks"  # n neighbouring blocks
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """`count` neighbouring blocks make one unit; 1 for every other kind."""

    kind: UnitKind = UnitKind.BLOCK
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} blocks" if self.kind is UnitKind.BLOCKS else self.kind.value


class Overlap(StrEnum):
    """Whether gradients are reduced beside the backward pass."""

    NONE = "none"
    BACKWARD = "backward"


class GatherAfterUpdate(StrEnum):
    """When the ranks' updated parts of the parameters become whole."""

    BLOCKING = "blocking"  # after each unit's update, awaited
    DURING_UPDATE = "during-update"  # issued after each unit's update, awaited at the end
    NEXT_FORWARD = "next-forward"  # by each unit when it is used next
