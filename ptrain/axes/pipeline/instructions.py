"""The instructions of a rank: what it computes, receives and sends in a step, and where it waits
for what it sent. This list is what runs, and what is predicted from; nothing stands beside it.

Receives and sends stand in one order of the whole pipeline: that of a step in which a forward takes
one unit of time, a backward two and a message none. Every rank has its part of this order, so both
ends of a message come to it with the same messages behind them: no two ranks can wait for each
other, even where a backend holds a send until it is received, or carries one message after the
other between two ranks (NCCL does both). A receive makes its buffer when the sender sends.

A tensor that was sent is let go

- before the pass that takes what the receiver sent later: with that, the send is over for certain;
- if nothing else holds it, before the next message of its kind to the same rank at the latest. In
  training the output of a stage is held for its own backward pass, with or without the send.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import Action, Schedule, Step, forward_only
from ptrain.axes.pipeline.simulate import simulate
from ptrain.cost import Phase
from ptrain.timeline import Kind


class Message(NamedTuple):
    """The output of stage `source` to the next stage (forward), or the gradient of its input to the
    one before (backward), of one micro-batch."""

    phase: Phase
    source: int
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that takes it."""
        return self.source + (1 if self.phase is Phase.FORWARD else -1)


@dataclass(frozen=True, slots=True)
class Receive:
    """A buffer is made and its receive posted; the pass that takes the message waits for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Posted; the tensor is held until `Release`."""

    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """Waits until the message is sent, and lets go of its tensor."""

    message: Message


Instruction = Action | Receive | Send | Release


@lru_cache(maxsize=16)  # of the variants that a command tries, most have the same schedule
def training(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of a step by rank. Raises BrokenSchedule where the schedule is none. Takes
    O(n log n) of n actions; a rank alone sends nothing."""
    if schedule.ranks == 1:
        return (tuple(part for step in schedule.orders[0] for part in step.parts),)
    return _instructions(schedule)


def evaluation(rank_of: tuple[int, ...], microbatches: int) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions by rank of forward passes alone, one micro-batch after the other."""
    return _instructions(forward_only(rank_of, microbatches))


def taken(action: Action, stages: int) -> Message | None:
    """Return the message that a pass takes from another of so many stages, if it takes one."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage > 0:
            return Message(Phase.FORWARD, stage - 1, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage < stages - 1:
            return Message(Phase.BACKWARD, stage + 1, microbatch)
        case _:
            return None


def given(action: Action, stages: int) -> Message | None:
    """Return the message that a pass gives to another of so many stages, if it gives one."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage < stages - 1:
            return Message(Phase.FORWARD, stage, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage > 0:
            return Message(Phase.BACKWARD, stage, microbatch)
        case _:
            return None


# A place in the order of the whole pipeline: at one time messages come before the passes that
# begin, and gradients before outputs: a rank that takes an output has let go of the gradient that
# it sent.
_Place = tuple[float, int, int, int]
_Moment = tuple[_Place, Step | Receive | Send]


def _instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    moments: list[list[_Moment]] = [[] for _ in schedule.orders]
    sends: dict[Message, _Place] = {}
    rank_of, stages = schedule.rank_of, schedule.stages
    for rank, spans in enumerate(simulate(schedule).timeline):
        for number, span in enumerate(spans):
            moments[rank].append(((span.start, 1, rank, number), span.step))
            for part in span.step.parts:
                message = given(part, stages)
                if message is None or (receiver := rank_of[message.target]) == rank:
                    continue
                place = (span.end, 0, int(message.phase is Phase.FORWARD), rank)
                sends[message] = place
                moments[rank].append((place, Send(message)))
                moments[receiver].append((place, Receive(message)))
    order = {message: number for number, message in enumerate(sorted(sends, key=sends.__getitem__))}
    return tuple(
        tuple(_released(schedule, order, sorted(of_rank, key=itemgetter(0)))) for of_rank in moments
    )


def _released(
    schedule: Schedule, order: Mapping[Message, int], moments: Iterable[_Moment]
) -> Iterator[Instruction]:
    """A rank's instructions, its releases among them."""
    sent: defaultdict[tuple[int, Phase], deque[Message]] = defaultdict(deque)  # by receiving rank
    rank_of, stages = schedule.rank_of, schedule.stages
    for _, moment in moments:
        match moment:
            case Send(message):
                others = sent[rank_of[message.target], message.phase]
                if message.phase is Phase.BACKWARD or schedule.is_forward_only:
                    yield from map(Release, others)
                    others.clear()
                others.append(message)
                yield moment
            case Receive():
                yield moment
            case step:
                for part in step.parts:
                    came = taken(part, stages)
                    if came is not None and came in order:
                        peer, number = rank_of[came.source], order[came]
                        for others in (sent[peer, Phase.FORWARD], sent[peer, Phase.BACKWARD]):
                            while others and order[others[0]] < number:  # was sent before
                                yield Release(others.popleft())
                    yield part
    for others in sent.values():
        yield from map(Release, others)
