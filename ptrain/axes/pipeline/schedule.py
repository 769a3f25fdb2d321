"""A pipeline's schedule as data: the ordered steps of each rank, and the rank of each stage.

The runtime, the predictions and the drawings all read it. The start of an action follows from its
inputs (`simulate`), so a schedule has no times and no idle slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, assert_never

from ptrain.timeline import Kind


class Action(NamedTuple):
    """The pass of one micro-batch through one stage; both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of two micro-batches that overlap on one rank.

    The communication of each overlaps with the other's computation (DeepSeek-V3, section 3.2.1).
    """

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two actions in the order in which they run without overlap."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Step = Action | Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The size of a pipeline: p ranks, v stages per rank, m micro-batches per step."""

    ranks: int
    stages_per_rank: int = 1
    microbatches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


class StageCost(NamedTuple):
    """The time of one micro-batch on one stage, in any unit.

    A full backward is input and weight half. The first stage computes both in its weight half,
    since no stage waits for the gradients of its inputs.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1

    def duration(self, kind: Kind) -> float:
        """Return the time of a pass of this kind."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.INPUT:
                return self.input
            case Kind.WEIGHT:
                return self.weight
            case Kind.BACKWARD:
                return self.input + self.weight
            case _:
                assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of all ranks.

    Attributes:
        microbatches: Micro-batches per step.
        rank_of: The rank of each stage.
        orders: The ordered steps of each rank.
        is_forward_only: An evaluation, without backward passes.
    """

    microbatches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    is_forward_only: bool = False

    def __hash__(self) -> int:
        """Hash few fields: hashing all actions takes milliseconds, and equal fields are rare."""
        return hash((self.microbatches, self.rank_of, self.is_forward_only))

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of a forward pass."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def halves_of(self, stage: int) -> int:
        """Return the number of backward passes of a stage that are split in halves."""
        actions = (action for step in self.orders[self.rank_of[stage]] for action in step.parts)
        return sum(action.kind is Kind.INPUT and action.stage == stage for action in actions)

    def is_crossed(self, boundary: int) -> bool:
        """Return True if the boundary from stage `boundary` to the next is between two ranks."""
        return self.rank_of[boundary] != self.rank_of[boundary + 1]


def forward_only(rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """Return the schedule of an evaluation: micro-batches in turn through all stages.

    Args:
        rank_of: The rank of each stage along pp, first stage to last.
        microbatches: The number of micro-batches.
    """
    own = [[s for s, owner in enumerate(rank_of) if owner == rank] for rank in sorted({*rank_of})]
    return Schedule(
        microbatches=microbatches,
        rank_of=rank_of,
        orders=tuple(
            tuple(Action(Kind.FORWARD, stage, m) for m in range(microbatches) for stage in stages)
            for stages in own
        ),
        is_forward_only=True,
    )


def loop_ranks(pipeline: PipelineShape) -> tuple[int, ...]:
    """Return the rank of each stage in a loop: rank r has the stages r, p + r, 2p + r …"""
    return tuple(stage % pipeline.ranks for stage in range(pipeline.stages))


def v_shaped(pipeline: PipelineShape) -> tuple[int, ...]:
    """Return the rank of each stage in a V: rank r has the stages r and 2p - 1 - r.

    The first rank has both ends of the model, and the last rank passes tensors to itself.

    Args:
        pipeline: The shape, with two stages per rank for a single V.

    Returns:
        The rank of each stage, first stage to last.
    """
    down = tuple(range(pipeline.ranks))
    return tuple(
        rank
        for turn in range(pipeline.stages_per_rank)
        for rank in (down if turn % 2 == 0 else reversed(down))
    )
