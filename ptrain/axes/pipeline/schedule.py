"""A pipeline's schedule as data: what each rank computes, in order, and which rank has which stage.

Who runs, predicts or draws a schedule reads this. When an action starts follows from what it needs
(`simulate`), so a schedule holds no times and no idle slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, assert_never

from ptrain.timeline import Kind


class Action(NamedTuple):
    """What one stage computes of one micro-batch; both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of two micro-batches, computed beside each other on one rank: each
    one's communication is hidden behind the other's work (DeepSeek-V3, section 3.2.1)."""

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        """In the order in which they run where nothing overlaps them."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Step = Action | Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """How much there is to schedule: p ranks, v stages on each, m micro-batches a step."""

    ranks: int
    stages_per_rank: int = 1
    microbatches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


class StageCost(NamedTuple):
    """Of one micro-batch on one stage, in any one unit of time. A whole backward is input and
    weight. The first stage computes both in its weight step: nobody waits for its inputs."""

    forward: float = 1
    input: float = 1
    weight: float = 1

    def of(self, kind: Kind) -> float:
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
    """`orders` are the steps of each rank; `rank_of` the rank of each stage. `is_forward_only`: an
    evaluation, without backward passes."""

    microbatches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    is_forward_only: bool = False

    def __hash__(self) -> int:
        """Of little: to go through all actions costs milliseconds, and is paid for where two
        schedules have so much in common."""
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
        """Return how many backward passes of a stage are in two halves."""
        actions = (action for step in self.orders[self.rank_of[stage]] for action in step.parts)
        return sum(action.kind is Kind.INPUT and action.stage == stage for action in actions)

    def is_crossed(self, boundary: int) -> bool:
        """Return whether what goes from stage `boundary` to the next one leaves its rank."""
        return self.rank_of[boundary] != self.rank_of[boundary + 1]


def forward_only(rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """Return the schedule of an evaluation: one micro-batch after the other through the stages of
    every rank."""
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


def looped(pipeline: PipelineShape) -> tuple[int, ...]:
    """Round and round: rank r has the stages r, p + r, 2p + r …"""
    return tuple(stage % pipeline.ranks for stage in range(pipeline.stages))


def v_shaped(pipeline: PipelineShape) -> tuple[int, ...]:
    """Down and up again: rank r has the stages r and 2p - 1 - r, so the first rank has both ends
    of the model, and the last rank hands on to itself."""
    down = tuple(range(pipeline.ranks))
    return tuple(
        rank
        for turn in range(pipeline.stages_per_rank)
        for rank in (down if turn % 2 == 0 else reversed(down))
    )
