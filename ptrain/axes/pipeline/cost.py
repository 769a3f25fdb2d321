"""What a pipeline costs in closed form: how long its ranks wait, and how many chunks are in flight.

Written from what the literature says of each schedule, not from a schedule's order. p ranks with v
stages each, of which a loop gives rank r the stages r, p + r …, and a V the stages r and
2p - 1 - r; m micro-batches a step. A chunk is one micro-batch's activations on one stage, from its
forward to the last half of its backward. F, B and W are one micro-batch's forward, whole backward
and weight half on one of p*v equal stages, I = B - W, and communication is free.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (1F1B, interleaved), Lamy-Poirier
2023 (breadth first), Qi et al. 2024 (ZB-H1, ZB-V), DeepSeek-V3's technical report, table 2, and Sea
AI Lab 2025 (DualPipeV).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind


class Relation(StrEnum):
    """Of the wait to the formula."""

    EQUAL = "="
    AT_LEAST = ">="
    AT_MOST = "<="


class ClosedForm(NamedTuple):
    """`idle`: what the rank that waits most waits in a step. `ideal`: what each rank computes,
    m*v*(F+B), nothing of it hidden by pairs."""

    idle: float
    ideal: float
    relation: Relation = Relation.EQUAL

    @property
    def ratio(self) -> float:
        """To the ideal time."""
        return self.idle / self.ideal


class ScheduleCost(NamedTuple):
    """The closed forms of a schedule, of a pipeline's shape.

    `bubble` gives the wait with these costs of a stage, and a pair hiding so much of its halves;
    None where the literature has no formula, or its formula's premises do not hold. `in_flight`
    gives the most chunks that a rank holds.
    """

    bubble: Callable[[PipelineShape, StageCost, float], ClosedForm | None]
    in_flight: Callable[[PipelineShape, int], int]
    is_v_shaped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSize(PipelineShape):
    """A pipeline's shape with its schedule, and what that costs."""

    schedule: ScheduleName
    cost: ScheduleCost


def stages_of(size: PipelineSize, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank in the order of a forward pass."""
    if size.cost.is_v_shaped:
        return rank, 2 * size.ranks - 1 - rank
    return tuple(range(rank, size.stages, size.ranks))


def round_size(pipeline: PipelineShape) -> int:
    """Return how many micro-batches of the interleaved schedules go through a rank's stages
    together: p, or a few more where p does not divide m (as torch's Interleaved1F1B does)."""
    return pipeline.microbatches // max(1, pipeline.microbatches // pipeline.ranks)


# -------- how long ranks wait


def _waiting(
    pipeline: PipelineShape, cost: StageCost, idle: float, relation: Relation = Relation.EQUAL
) -> ClosedForm:
    chunks = pipeline.microbatches * pipeline.stages_per_rank
    whole = cost.forward + cost.of(Kind.BACKWARD)
    return ClosedForm(idle=idle, ideal=chunks * whole, relation=relation)


def no_formula(pipeline: PipelineShape, cost: StageCost, hidden: float) -> None:
    """Return nothing: the literature has no formula."""


def serial_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait of a schedule in which one rank at a time computes."""
    idle = (pipeline.ranks - 1) * pipeline.microbatches * (cost.forward + cost.of(Kind.BACKWARD))
    return _waiting(pipeline, cost, idle)


def fill_and_drain(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait of a schedule whose ranks wait for the first forward and the last
    backward."""
    ranks = pipeline.ranks
    # fewer micro-batches than ranks: the first is not back when the last has gone
    gap = max(0, ranks - pipeline.microbatches) * (pipeline.stages_per_rank - 1)
    return _waiting(pipeline, cost, (ranks - 1 + gap) * (cost.forward + cost.of(Kind.BACKWARD)))


def zero_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait of ZB-H1, (p-1)(F + I - W) of Qi et al. 2024; with a longer W the drain is
    not filled."""
    weight = cost.weight
    both = cost.forward + cost.of(Kind.BACKWARD)
    fits = weight <= min(cost.forward, cost.input) and pipeline.microbatches >= pipeline.ranks
    relation = Relation.EQUAL if fits else Relation.AT_LEAST
    return _waiting(pipeline, cost, (pipeline.ranks - 1) * (both - 2 * weight), relation)


def dualpipev_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm | None:
    """Return the wait of DeepSeek's (PP/2 - 1)(F&B + B - 3W): their PP counts stages, and p ranks
    have 2p."""
    if max(cost.forward, cost.weight) > cost.input:
        return None
    backward = cost.of(Kind.BACKWARD)
    pair = cost.forward + backward - hidden
    idle = (pipeline.ranks - 1) * (pair + backward - 3 * cost.weight)
    return _waiting(pipeline, cost, idle, Relation.AT_MOST)


# -------- chunks in flight


def one_in_flight(pipeline: PipelineShape, rank: int) -> int:
    """Return the chunk of a schedule with one micro-batch at a time."""
    return 1


def all_in_flight(pipeline: PipelineShape, rank: int) -> int:
    """Return the chunks of a schedule that begins backward when all is forward."""
    return pipeline.stages_per_rank * pipeline.microbatches


def in_flight_of_1f1b(pipeline: PipelineShape, rank: int) -> int:
    """Return a chunk for each rank that a micro-batch has still to pass, and one."""
    return min(pipeline.microbatches, pipeline.ranks - rank)


def in_flight_of_interleaved(pipeline: PipelineShape, rank: int) -> int:
    """Return a round through all stages but the last, two forwards for each hop, and one."""
    ahead = pipeline.ranks - 1 - rank
    return _in_rounds(pipeline, 2 * ahead + 1)


def in_flight_of_zero_bubble(pipeline: PipelineShape, rank: int) -> int:
    """Return 1F1B's of each rank, and the weights that lag `rank` behind: p on all of them."""
    return _in_rounds(pipeline, pipeline.ranks)


def _in_rounds(pipeline: PipelineShape, more: int) -> int:
    """A round through all stages but the last and so many more, at most all."""
    rounds = (pipeline.stages_per_rank - 1) * round_size(pipeline)
    return min(pipeline.stages_per_rank * pipeline.microbatches, rounds + more)


def in_flight_of_zbv(pipeline: PipelineShape, rank: int) -> int:
    """Return 2p halves of a 1F1B stage; of fewer micro-batches those that there are."""
    number, ranks = pipeline.microbatches, pipeline.ranks
    return min(number, 2 * ranks - 1 - rank) + min(number, rank + 1)


def in_flight_of_dualpipev(pipeline: PipelineShape, rank: int) -> int:
    """Return "PP + 1" of DeepSeek's table, PP being the stages: a pair's forward is one more."""
    return 2 * pipeline.ranks + 1
