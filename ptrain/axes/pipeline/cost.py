"""What a rank of a pipeline holds, in closed form: its chunks in flight, and when it is fullest.

Written from what the literature says of each schedule, not from a schedule's order. p ranks with v
stages each, of which a loop gives rank r the stages r, p + r …, and a V the stages r and
2p - 1 - r; m micro-batches a step. A chunk is one micro-batch's activations on one stage, from its
forward to the last half of its backward.

The stages of a looping schedule fill and empty one after the other, a round of micro-batches at a
time, so that what they hold in all is largest where one of them is done with a round. These passes
are few; which of them is the fullest depends on the bytes of the stages, which are unknown here.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (1F1B, interleaved), Lamy-Poirier
2023 (breadth first), Qi et al. 2024 (ZB-H1, ZB-V), DeepSeek-V3's technical report, table 2, and Sea
AI Lab 2025 (DualPipeV). The bubble is `axes.pipeline.bubble`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple, assert_never

from ptrain.spec.pipeline import ScheduleName

Counts = tuple[int, ...]  # by stage of a rank, in the order of a forward pass

V_SHAPED = (ScheduleName.ZBV, ScheduleName.DUALPIPEV)
_NEVER = False, False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSize:
    """A schedule with its p ranks, v stages on each and m micro-batches."""

    schedule: ScheduleName
    ranks: int
    stages_per_rank: int
    microbatches: int

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


def stages_of(size: PipelineSize, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank in the order of a forward pass."""
    if size.schedule in V_SHAPED:
        return rank, 2 * size.ranks - 1 - rank
    return tuple(range(rank, size.stages, size.ranks))


def round_size(size: PipelineSize) -> int:
    """Return how many micro-batches of the interleaved schedules go through a rank's stages
    together: p, or a few more where p does not divide m (as torch's Interleaved1F1B does)."""
    return size.microbatches // max(1, size.microbatches // size.ranks)


def chunks_in_flight(size: PipelineSize, rank: int) -> int:
    """Return the most chunks whose activations a rank holds at once, over all of its stages."""
    ranks, per_rank, microbatches = size.ranks, size.stages_per_rank, size.microbatches
    ahead = ranks - 1 - rank  # ranks that a micro-batch has still to pass
    match size.schedule:
        case ScheduleName.NAIVE:
            return 1
        case ScheduleName.GPIPE | ScheduleName.BFS:
            return per_rank * microbatches
        case ScheduleName.ONE_F_ONE_B:
            return min(microbatches, ahead + 1)
        case ScheduleName.INTERLEAVED:
            # a round through all stages but the last, two forwards for each hop, and one
            return min(per_rank * microbatches, (per_rank - 1) * round_size(size) + 2 * ahead + 1)
        case ScheduleName.ZERO_BUBBLE:
            # 1F1B's of each rank, and the weights that lag `rank` behind: p on all of them
            return min(per_rank * microbatches, (per_rank - 1) * round_size(size) + ranks)
        case ScheduleName.ZBV:
            # 2p halves of a 1F1B stage; of fewer micro-batches those that there are
            return min(microbatches, ranks + ahead) + min(microbatches, rank + 1)
        case ScheduleName.DUALPIPEV:
            # "PP + 1" of DeepSeek's table, PP being the stages: a pair's forward is one more
            return 2 * ranks + 1
        case _:
            assert_never(size.schedule)


def forwards_first(size: PipelineSize, rank: int) -> int:
    """Return the forwards of a rank before its first backward pass."""
    flight = chunks_in_flight(size, rank)
    match size.schedule:
        case ScheduleName.ZERO_BUBBLE:
            # ZB-H1 warms up as 1F1B does: what its weights hold comes later
            warm_up = (size.stages_per_rank - 1) * round_size(size) + size.ranks - rank
            return min(size.stages_per_rank * size.microbatches, warm_up)
        case ScheduleName.DUALPIPEV:
            return flight - 1 if rank < size.ranks - 1 else flight
        case _:
            return flight


def chunks_between(size: PipelineSize, rank: int) -> int:
    """Return how many chunks are in flight on the rank before and not on this one, at most, where
    both have most of them."""
    return chunks_in_flight(size, rank - 1) - chunks_in_flight(size, rank) if rank else 0


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


def moments(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """Yield the moments at which a rank may be fullest, in a step's order."""
    match size.schedule:
        case ScheduleName.ZBV:
            yield from _of_zbv(size, rank)
        case ScheduleName.DUALPIPEV:
            yield from _of_dualpipev(size, rank)
        case ScheduleName.NAIVE | ScheduleName.GPIPE | ScheduleName.BFS:
            yield from _of_loops(size, rank)
        case ScheduleName.ONE_F_ONE_B | ScheduleName.INTERLEAVED | ScheduleName.ZERO_BUBBLE:
            yield from _of_loops(size, rank)
        case _:
            assert_never(size.schedule)


def _of_loops(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """Backward pass by backward pass, as many forwards ahead of each as of the first one, as long
    as there are any; weights lag as many passes behind as there are ranks before this one."""
    places = size.stages_per_rank
    total = places * size.microbatches
    height = size.microbatches if size.schedule is ScheduleName.BFS else round_size(size)
    first, period = forwards_first(size, rank), height * places
    is_split = size.schedule is ScheduleName.ZERO_BUBBLE
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


def _of_zbv(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """Its stages down and up the V: p - r micro-batches come back up before one does down, with a
    forward ahead of each, so that a rank holds 2p chunks. Then its last gradients of the inputs go
    down and up while those of the weights wait."""
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


def _of_dualpipev(size: PipelineSize, rank: int) -> Iterator[FlightMoment]:
    """In a pair a forward is one more chunk than before it. The weights of the last passes, which
    wait, are fewer than those that had been in flight."""
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
