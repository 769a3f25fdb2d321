"""Closed forms of pipeline costs: the wait of the ranks, and the chunks in flight.

They are taken from the literature on each schedule, not from a schedule's order. There are p ranks
with v stages each, and m micro-batches per step. A loop gives rank r the stages r, p + r …, and a V
the stages r and 2p - 1 - r. A chunk is the activations of one micro-batch on one stage, from its
forward to the last half of its backward. F, B and W are the times of one micro-batch's forward,
full backward and weight half on one of p*v equal stages, I = B - W, and communication is free.

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
    """The relation of the wait to the formula."""

    EQUAL = "="
    AT_LEAST = ">="
    AT_MOST = "<="


class ClosedForm(NamedTuple):
    """The wait in a step by formula.

    Attributes:
        idle: The wait of the rank with the longest wait.
        ideal: The computation of each rank, m*v*(F+B), without overlap in pairs.
        relation: Relation of the simulated wait to `idle`.
    """

    idle: float
    ideal: float
    relation: Relation = Relation.EQUAL

    @property
    def ratio(self) -> float:
        """The wait over the ideal time."""
        return self.idle / self.ideal


class ScheduleCost(NamedTuple):
    """The closed forms of a schedule, given a pipeline's shape.

    Attributes:
        bubble: Returns the wait for the costs of a stage and the time that a pair saves. None if
            the literature has no formula, or its premises do not hold.
        in_flight: Returns the highest number of chunks that a rank holds.
        is_v_shaped: The stages are placed in a V, not in a loop.
    """

    bubble: Callable[[PipelineShape, StageCost, float], ClosedForm | None]
    in_flight: Callable[[PipelineShape, int], int]
    is_v_shaped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSize(PipelineShape):
    """A pipeline's shape with its schedule and the schedule's cost."""

    schedule: ScheduleName
    cost: ScheduleCost


def stages_of(size: PipelineSize, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank in the order of a forward pass.

    Args:
        size: The pipeline, whose schedule places stages in a loop or in a V.
        rank: The rank along pp, from 0.
    """
    if size.cost.is_v_shaped:
        return rank, 2 * size.ranks - 1 - rank
    return tuple(range(rank, size.stages, size.ranks))


def round_size(pipeline: PipelineShape) -> int:
    """Return the number of micro-batches in a round of the interleaved schedules.

    A round goes through all stages of a rank. It has p micro-batches, or a few more if p does not
    divide m, as in torch's Interleaved1F1B.
    """
    return pipeline.microbatches // max(1, pipeline.microbatches // pipeline.ranks)


# -------- how long ranks wait


def _closed_form(
    pipeline: PipelineShape, cost: StageCost, idle: float, relation: Relation = Relation.EQUAL
) -> ClosedForm:
    """Return a closed form with the ideal time of this pipeline."""
    chunks = pipeline.microbatches * pipeline.stages_per_rank
    whole = cost.forward + cost.duration(Kind.BACKWARD)
    return ClosedForm(idle=idle, ideal=chunks * whole, relation=relation)


def serial_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait of a schedule in which one rank computes at a time.

    Args:
        pipeline: The number of ranks, stages and micro-batches.
        cost: The time of a micro-batch on one stage, in any unit.
        hidden: Not used: the schedule has no pairs.

    Returns:
        The wait and the ideal time per step and rank, in the unit of `cost`.
    """
    idle = (
        (pipeline.ranks - 1) * pipeline.microbatches * (cost.forward + cost.duration(Kind.BACKWARD))
    )
    return _closed_form(pipeline, cost, idle)


def fill_and_drain(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait for the first forward and the last backward.

    Args:
        pipeline: The number of ranks, stages and micro-batches.
        cost: The time of a micro-batch on one stage, in any unit.
        hidden: Not used: the schedule has no pairs.

    Returns:
        The wait and the ideal time per step and rank, in the unit of `cost`.
    """
    ranks = pipeline.ranks
    # with fewer micro-batches than ranks, the last has left before the first is back
    gap = max(0, ranks - pipeline.microbatches) * (pipeline.stages_per_rank - 1)
    return _closed_form(
        pipeline, cost, (ranks - 1 + gap) * (cost.forward + cost.duration(Kind.BACKWARD))
    )


def zero_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm:
    """Return the wait of ZB-H1, (p-1)(F + I - W) in Qi et al. 2024.

    Args:
        pipeline: The number of ranks, stages and micro-batches.
        cost: The time of a micro-batch on one stage, in any unit.
        hidden: Not used: the schedule has no pairs.

    Returns:
        The wait and the ideal time in the unit of `cost`. The wait is a lower bound if W is longer
        than F or I, or micro-batches are fewer than ranks: the drain is not filled then.
    """
    weight = cost.weight
    both = cost.forward + cost.duration(Kind.BACKWARD)
    fits = weight <= min(cost.forward, cost.input) and pipeline.microbatches >= pipeline.ranks
    relation = Relation.EQUAL if fits else Relation.AT_LEAST
    return _closed_form(pipeline, cost, (pipeline.ranks - 1) * (both - 2 * weight), relation)


def dualpipev_bubble(pipeline: PipelineShape, cost: StageCost, hidden: float) -> ClosedForm | None:
    """Return the wait of DualPipeV, DeepSeek's (PP/2 - 1)(F&B + B - 3W).

    Their PP counts stages; p ranks have 2p.

    Args:
        pipeline: The number of ranks, stages and micro-batches.
        cost: The time of a micro-batch on one stage, in any unit.
        hidden: The time that a pair of forward and backward saves by overlap, in the same unit.

    Returns:
        The wait, as an upper bound, and the ideal time. None if F or W is longer than I, for which
        the formula does not hold.
    """
    if max(cost.forward, cost.weight) > cost.input:
        return None
    backward = cost.duration(Kind.BACKWARD)
    pair = cost.forward + backward - hidden
    idle = (pipeline.ranks - 1) * (pair + backward - 3 * cost.weight)
    return _closed_form(pipeline, cost, idle, Relation.AT_MOST)


# -------- chunks in flight


def all_in_flight(pipeline: PipelineShape, rank: int) -> int:
    """Return all chunks, for a schedule that runs all forwards first."""
    return pipeline.stages_per_rank * pipeline.microbatches


def in_flight_of_1f1b(pipeline: PipelineShape, rank: int) -> int:
    """Return one chunk per rank from this one to the last."""
    return min(pipeline.microbatches, pipeline.ranks - rank)


def in_flight_of_interleaved(pipeline: PipelineShape, rank: int) -> int:
    """Return a round through all stages but the last, two forwards per later rank, and one."""
    ahead = pipeline.ranks - 1 - rank
    return _chunks_of_rounds(pipeline, 2 * ahead + 1)


def in_flight_of_zero_bubble(pipeline: PipelineShape, rank: int) -> int:
    """Return the chunks of ZB-H1: 1F1B's, plus `rank` delayed weight halves: p in all."""
    return _chunks_of_rounds(pipeline, pipeline.ranks)


def _chunks_of_rounds(pipeline: PipelineShape, more: int) -> int:
    """Return a round through all stages but the last, plus `more` chunks, at most all."""
    rounds = (pipeline.stages_per_rank - 1) * round_size(pipeline)
    return min(pipeline.stages_per_rank * pipeline.microbatches, rounds + more)


def in_flight_of_zbv(pipeline: PipelineShape, rank: int) -> int:
    """Return 2p halves of a 1F1B stage, fewer with fewer micro-batches."""
    number, ranks = pipeline.microbatches, pipeline.ranks
    return min(number, 2 * ranks - 1 - rank) + min(number, rank + 1)


def in_flight_of_dualpipev(pipeline: PipelineShape, rank: int) -> int:
    """Return "PP + 1" of DeepSeek's table, where PP counts stages: a pair has one more forward."""
    return 2 * pipeline.ranks + 1
