"""What a pipeline costs in closed form: how long its ranks wait, how many chunks are in flight, and
when a rank is fullest.

Written from what the literature says of each schedule, not from a schedule's order. p ranks with v
stages each, of which a loop gives rank r the stages r, p + r …, and a V the stages r and
2p - 1 - r; m micro-batches a step. A chunk is one micro-batch's activations on one stage, from its
forward to the last half of its backward. F, B and W are one micro-batch's forward, whole backward
and weight half on one of p*v equal stages, I = B - W, and communication is free.

The stages of a looping schedule fill and empty one after the other, a round of micro-batches at a
time, so that what they hold in all is largest where one of them is done with a round. These passes
are few; which of them is the fullest depends on the bytes of the stages, which are unknown here.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (1F1B, interleaved), Lamy-Poirier
2023 (breadth first), Qi et al. 2024 (ZB-H1, ZB-V), DeepSeek-V3's technical report, table 2, and Sea
AI Lab 2025 (DualPipeV).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from operator import sub
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import PipelineShape, StageCost
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind

Counts = tuple[int, ...]  # by stage of a rank, in the order of a forward pass

_NEVER = False, False


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
    gives the most chunks that a rank holds, `warm_up` its forwards before its first backward, as
    many where nothing is said, and `moments` when it may be fullest.
    """

    bubble: Callable[[PipelineShape, StageCost, float], ClosedForm | None]
    in_flight: Callable[[PipelineShape, int], int]
    moments: Callable[[PipelineSize, int], Iterator[FlightMoment]]
    warm_up: Callable[[PipelineShape, int], int] | None = None
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


def chunks_in_flight(size: PipelineSize, rank: int) -> int:
    """Return the most chunks whose activations a rank holds at once, over all of its stages."""
    return size.cost.in_flight(size, rank)


def forwards_first(size: PipelineSize, rank: int) -> int:
    """Return the forwards of a rank before its first backward pass."""
    return (size.cost.warm_up or size.cost.in_flight)(size, rank)


def chunks_between(size: PipelineSize, rank: int) -> int:
    """Return how many chunks are in flight on the rank before and not on this one, at most, where
    both have most of them."""
    return chunks_in_flight(size, rank - 1) - chunks_in_flight(size, rank) if rank else 0


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


def warm_up_of_zero_bubble(pipeline: PipelineShape, rank: int) -> int:
    """Return the forwards as of 1F1B: what its weights hold comes later."""
    return _in_rounds(pipeline, pipeline.ranks - rank)


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


def warm_up_of_dualpipev(pipeline: PipelineShape, rank: int) -> int:
    """Return the forwards of a rank without the one of the first pair, which the last one has
    not."""
    return in_flight_of_dualpipev(pipeline, rank) - (rank < pipeline.ranks - 1)


# -------- when a rank is fullest


class FlightMoment(NamedTuple):
    """As a backward pass begins, or its half of the inputs, on the rank's stage `on`: micro-batches
    of each stage that are `whole`, from their forward on, and of which the half of the weights is
    still to come (`halved`). `graded`: whether the stage has summed a gradient before, `over`:
    whether all of the step's are summed."""

    whole: Counts
    halved: Counts
    graded: tuple[bool, ...]
    over: tuple[bool, ...]
    on: int
    is_half: bool


def moments_of_loops(
    size: PipelineSize, rank: int, *, is_by_stage: bool = False, is_split: bool = False
) -> Iterator[FlightMoment]:
    """Yield those of a loop, backward pass by backward pass, as many forwards ahead of each as of
    the first one, as long as there are any. `is_by_stage`: all micro-batches go through a stage
    before the next one; `is_split`: weights lag as many passes behind as there are ranks before
    this one."""
    places = size.stages_per_rank
    total = places * size.microbatches
    height = size.microbatches if is_by_stage else round_size(size)
    first, period = forwards_first(size, rank), height * places
    lag = min(rank, total) if is_split else 0

    def through(chunks: int) -> list[int]:
        if places == 1:
            return [chunks]
        rounds, left = divmod(chunks, period)
        done, begun = divmod(left, height)
        low = rounds * height
        return [low + height] * done + [low + begun] + [low] * (places - done - 1)

    for done in _fullest(first, total, period, height, lag):
        ahead, back = through(min(first + done, total)), through(done)[::-1]
        over = through(max(0, done - lag))[::-1] if lag else back
        yield FlightMoment(
            whole=tuple(map(sub, ahead, back)),
            halved=tuple(map(sub, back, over)),
            graded=tuple([number > 0 for number in over]),
            over=tuple([number == size.microbatches for number in over]),
            on=places - 1 - done % period // height,
            is_half=is_split,
        )


def _fullest(first: int, total: int, period: int, height: int, lag: int) -> list[int]:
    """Return the backward passes, counted from 0, at which a stage is done with a round of
    forwards, of backward passes or of weights, with the next one, in which there is a gradient
    already: of the first period and the next, and of one in which every stage has gradients."""
    later = -(-(period + lag) // period) * period
    bounds = [
        start + offset
        for start in sorted({0, period, later})
        for place in range(period // height)
        for offset in (place * height, (place * height - first) % period, place * height + lag)
    ]
    passes = {done + more for done in bounds for more in (0, 1)} | {
        lag,
        lag + 1,
        total - first,
        total - 1,
    }
    return sorted(done for done in passes if 0 <= done < total)


def moments_of_zbv(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """Yield those of a V, whose stages go down and up: p - r micro-batches come back up before one
    does down, with a forward ahead of each, so that a rank holds 2p chunks. Then its last gradients
    of the inputs go down and up while those of the weights wait."""
    ranks, number, behind = size.ranks, size.microbatches, size.ranks - rank
    filling = max(2 * ranks - 1, number)

    def there(first: int, count: int) -> int:
        """Return how many of `count` micro-batches from the `first` on there are."""
        return max(0, min(count, number - first))

    first_up = there(0, ranks + behind - 1), there(0, rank + 1)
    last_up = first_up[0], there(behind - 1, rank + 1)
    first_down = there(0, ranks + behind), there(behind, rank)
    then_up = there(1, ranks + behind - 1), there(behind, rank + 1)
    then_down = there(1, ranks + behind), there(behind + 1, rank)
    tail = there(filling - behind, behind), 0
    for whole, halved, graded, on in (
        (first_up, (0, 0), (False, False), 1),
        (last_up, (0, 0), (False, True), 1),
        (first_down, (0, 0), (False, True), 0),
        (then_up, (0, 0), (True, True), 1),
        (then_down, (0, 0), (True, True), 0),
        (tail, (there(filling - ranks, rank), there(filling - rank, rank)), (True, True), 0),
    ):
        if whole[on]:
            yield FlightMoment(
                whole=whole, halved=halved, graded=graded, over=_NEVER, on=on, is_half=True
            )


def moments_of_dualpipev(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """Yield those of pairs, in which a forward is one more chunk than before it. The weights of the
    last passes, which wait, are fewer than those that had been in flight."""
    up = rank + 1
    in_pair = chunks_in_flight(size, rank) - up, up
    has_turned = rank < size.ranks - 1  # some have come back up before the first pair
    if has_turned:
        first = in_pair[0] - 1, up
        yield FlightMoment(
            whole=first, halved=(0, 0), graded=(False, False), over=_NEVER, on=1, is_half=True
        )
    for graded, on in (((False, has_turned), 1), ((True, True), 0), ((True, True), 1)):
        yield FlightMoment(
            whole=in_pair, halved=(0, 0), graded=graded, over=_NEVER, on=on, is_half=False
        )
