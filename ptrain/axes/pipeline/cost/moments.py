"""When a rank of a pipeline is fullest, in closed form: of how many micro-batches each of its
stages holds the activations as a backward pass begins.

The stages of a looping schedule fill and empty one after the other, a round of micro-batches at a
time, so that what they hold in all is largest where one of them is done with a round. These passes
are few; which of them is the fullest depends on what the stages hold, which nobody here knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import NamedTuple, assert_never

from ptrain.axes.pipeline.cost.chunks import (
    PipelineSize,
    chunks_in_flight,
    forwards_first,
    round_size,
)
from ptrain.spec.pipeline import ScheduleName

Counts = tuple[int, ...]  # by stage of a rank, in the order of a forward pass

_NEVER = False, False


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
