"""The instructions of a rank in a step: computation, receives, sends, and waits for sends.

This list is executed, and predictions are derived from the same list.

Receives and sends are in one order of the full pipeline: the order of a step in which a forward
takes one unit of time, a backward two and a message none. Every rank has its part of this order, so
both ends reach a message after the same earlier messages. No two ranks can wait for each other,
even if a backend holds a send until it is received, or transfers one message at a time between two
ranks (NCCL does both). A receive allocates its buffer when the sender sends.

A sent tensor is freed

- before the pass that takes a later message of the receiver: that message proves that the send is
  over;
- otherwise before the next message of its kind to the same rank, if nothing else holds the tensor.
  In training, a stage's backward pass holds its output, with or without the send.
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
    """A tensor of one micro-batch that crosses a stage boundary.

    It is the output of stage `source` for the next stage (forward), or the gradient of its input
    for the previous one (backward).
    """

    phase: Phase
    source: int
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that takes the message."""
        return self.source + (1 if self.phase is Phase.FORWARD else -1)


@dataclass(frozen=True, slots=True)
class Receive:
    """Allocate a buffer and post its receive; the pass that takes the message waits for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Post the send; the tensor is held until `Release`."""

    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until the message is sent, and drop its tensor."""

    message: Message


Instruction = Action | Receive | Send | Release


@lru_cache(maxsize=16)  # most variants that a command tries have the same schedule
def training_instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of a training step by rank.

    It takes O(n log n) for n actions. A single rank sends nothing.

    Raises:
        BrokenSchedule: The schedule is not the work of a step.
    """
    if schedule.ranks == 1:
        return (tuple(part for step in schedule.orders[0] for part in step.parts),)
    return _ordered_instructions(schedule)


def evaluation_instructions(
    rank_of: tuple[int, ...], microbatches: int
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions by rank of forward passes only, one micro-batch after the other."""
    return _ordered_instructions(forward_only(rank_of, microbatches))


def input_message(action: Action, stages: int) -> Message | None:
    """Return the message that a pass takes from another stage, None if it takes none."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage > 0:
            return Message(Phase.FORWARD, stage - 1, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage < stages - 1:
            return Message(Phase.BACKWARD, stage + 1, microbatch)
        case _:
            return None


def output_message(action: Action, stages: int) -> Message | None:
    """Return the message that a pass makes for another stage, None if it makes none."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage < stages - 1:
            return Message(Phase.FORWARD, stage, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage > 0:
            return Message(Phase.BACKWARD, stage, microbatch)
        case _:
            return None


# A position in the order of the full pipeline. At equal times, messages come before the passes that
# begin, and gradients before outputs: a rank that takes an output has released the gradient that it
# sent.
_Position = tuple[float, int, int, int]
_Moment = tuple[_Position, Step | Receive | Send]


def _ordered_instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of each rank in the common order."""
    moments: list[list[_Moment]] = [[] for _ in schedule.orders]
    sends: dict[Message, _Position] = {}
    rank_of, stages = schedule.rank_of, schedule.stages
    for rank, spans in enumerate(simulate(schedule).timeline):
        for number, span in enumerate(spans):
            moments[rank].append(((span.start, 1, rank, number), span.step))
            for part in span.step.parts:
                message = output_message(part, stages)
                if message is None or (receiver := rank_of[message.target]) == rank:
                    continue
                # One position for both ends: the sender posts its send and the receiver its receive
                # at the same point of the common order.
                place = (span.end, 0, int(message.phase is Phase.FORWARD), rank)
                sends[message] = place
                moments[rank].append((place, Send(message)))
                moments[receiver].append((place, Receive(message)))
    order = {message: number for number, message in enumerate(sorted(sends, key=sends.__getitem__))}
    return tuple(
        tuple(_with_releases(schedule, order, sorted(of_rank, key=itemgetter(0))))
        for of_rank in moments
    )


def _with_releases(
    schedule: Schedule, order: Mapping[Message, int], moments: Iterable[_Moment]
) -> Iterator[Instruction]:
    """Yield a rank's instructions with its releases."""
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
                    came = input_message(part, stages)
                    if came is not None and came in order:
                        peer, number = rank_of[came.source], order[came]
                        for others in (sent[peer, Phase.FORWARD], sent[peer, Phase.BACKWARD]):
                            # sent before the taken message
                            while others and order[others[0]] < number:
                                yield Release(others.popleft())
                    yield part
    # The last messages of a step have no later message that would prove their arrival.
    for others in sent.values():
        yield from map(Release, others)
