"""When a rank receives, computes and sends, and how long what crosses a boundary is held for it:
the order of a schedule with its communication, as torch's runtimes execute it.

A receive's buffer is made when it is posted. What is sent is held until its send is waited for:
the runtime of several stages a rank waits at the end of the step, that of gpipe too; 1f1b waits
with the next exchange and keeps its variables, each until it means the next micro-batch's tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ptrain.axes.pipeline.schedule import Action, Schedule, Step
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind


class Role(StrEnum):
    """What a tensor at a boundary is to its stage, for one micro-batch."""

    INPUT = "input"
    OUTPUT = "output"
    INPUT_GRADIENT = "gradient of the input"
    OUTPUT_GRADIENT = "gradient of the output"


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor at a stage's boundary."""

    role: Role
    stage: int
    microbatch: int


class Verb(StrEnum):
    RECEIVE = "receive"  # a buffer is made, and waited for
    HOLD = "hold"  # for a send, or by a variable
    DROP = "drop"
    REPLACE = "replace"  # dropped when the pass that comes next has an output of its own


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something done with a tensor at a boundary."""

    verb: Verb
    tensor: Held


@dataclass(frozen=True, slots=True)
class End:
    """torch's schedule returns: losses, and whatever is held still, go."""


Turn = Action | Exchange | End


def turns(name: ScheduleName, schedule: Schedule, rank: int) -> Iterator[Turn]:
    """Everything that one rank does in a step, in order."""
    if name is ScheduleName.NAIVE:
        for microbatch in range(schedule.microbatches):
            yield from _all_forward(schedule, rank, [microbatch])
            yield End()
        return
    yield from _together(name, schedule, rank)
    yield End()


def _together(name: ScheduleName, schedule: Schedule, rank: int) -> Iterator[Turn]:
    """Of all micro-batches."""
    match name:
        case ScheduleName.GPIPE:
            yield from _all_forward(schedule, rank, range(schedule.microbatches))
        case ScheduleName.ONE_F_ONE_B:
            yield from _alternating(schedule, rank)
        case _:
            for moment in with_communication(schedule)[rank]:
                if isinstance(moment, Transfer):
                    yield Exchange(*_at_boundary(moment))
                else:
                    yield from moment.parts


def _at_boundary(transfer: Transfer) -> tuple[Verb, Held]:
    is_forward = transfer.kind is Kind.FORWARD
    if transfer.is_send:
        role = Role.OUTPUT if is_forward else Role.INPUT_GRADIENT
        return Verb.HOLD, Held(role, transfer.stage, transfer.microbatch)
    role = Role.INPUT if is_forward else Role.OUTPUT_GRADIENT
    return Verb.RECEIVE, Held(role, transfer.stage, transfer.microbatch)


class _Line:
    """One rank of a pipeline of one stage a rank: its stage takes from the one before and gives to
    the one after."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.stage = rank
        self.is_first, self.is_last = rank == 0, rank == schedule.stages - 1
        self.held: dict[Role, Held] = {}

    def receive(self, role: Role, microbatch: int) -> Iterator[Exchange]:
        """Nothing from outside of the model."""
        is_end = self.is_first if role is Role.INPUT else self.is_last
        if not is_end:
            yield Exchange(Verb.RECEIVE, Held(role, self.stage, microbatch))

    def send(self, role: Role, microbatch: int) -> Iterator[Exchange]:
        is_end = self.is_last if role is Role.OUTPUT else self.is_first
        if not is_end:
            yield Exchange(Verb.HOLD, Held(role, self.stage, microbatch))

    def name(self, role: Role, microbatch: int) -> Iterator[Exchange]:
        """A variable means this tensor now, and no longer the one before."""
        tensor = Held(role, self.stage, microbatch)
        yield Exchange(Verb.HOLD, tensor)
        if role in self.held:
            yield Exchange(Verb.DROP, self.held[role])
        self.held[role] = tensor

    def compute(self, kind: Kind, microbatch: int) -> Action:
        return Action(kind, self.stage, microbatch)


def _all_forward(schedule: Schedule, rank: int, microbatches: Sequence[int]) -> Iterator[Turn]:
    """ScheduleGPipe's: its lists of sends live until it returns."""
    line = _Line(schedule, rank)
    for kind, taken, given in (
        (Kind.FORWARD, Role.INPUT, Role.OUTPUT),
        (Kind.BACKWARD, Role.OUTPUT_GRADIENT, Role.INPUT_GRADIENT),
    ):
        for microbatch in microbatches:
            yield from line.receive(taken, microbatch)
            yield line.compute(kind, microbatch)
            yield from line.send(given, microbatch)


def _alternating(schedule: Schedule, rank: int) -> Iterator[Turn]:
    """Schedule1F1B's: `output`, `bwd_recvs` and `bwd_sends` name the last of their kind; only of
    the last stage's output nothing else is known by then. `send_work` is the last send of the
    warm-up, of which the last output is not, until no forward is left."""
    line = _Line(schedule, rank)
    warm_up = min(schedule.microbatches, schedule.stages - rank)
    waiting = Held(Role.OUTPUT, rank, warm_up - 2)
    forwards = 0
    for step in schedule.orders[rank]:
        for part in step.parts:
            if part.kind is Kind.FORWARD:
                forwards += 1
                yield from line.receive(Role.INPUT, part.microbatch)
                output = Held(Role.OUTPUT, rank, part.microbatch)
                if line.is_last and forwards > 1:
                    yield Exchange(Verb.REPLACE, replace(output, microbatch=output.microbatch - 1))
                yield part
                if line.is_last:
                    yield Exchange(Verb.HOLD, output)
                if part.microbatch == waiting.microbatch:
                    yield Exchange(Verb.HOLD, waiting)
                continue
            if not line.is_last:
                yield from line.receive(Role.OUTPUT_GRADIENT, part.microbatch)
                yield from line.name(Role.OUTPUT_GRADIENT, part.microbatch)
            yield part
            if not line.is_first:
                yield from line.name(Role.INPUT_GRADIENT, part.microbatch)
            if forwards == schedule.microbatches and waiting.microbatch >= 0:
                yield Exchange(Verb.DROP, waiting)
                waiting = Held(Role.OUTPUT, rank, -1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send of what a stage has computed forward or backward, or the receive of it at another
    stage."""

    is_send: bool
    kind: Kind
    stage: int
    microbatch: int


Moment = Step | Transfer


def with_communication(schedule: Schedule) -> tuple[tuple[Moment, ...], ...]:
    """The order of each rank with its sends and receives: a send stands behind what it sends, and
    at that moment the receive is put at the end of what the other rank has to do so far, whose turn
    it is in between. So the steps of all ranks are gone through together, one a rank at a time;
    what a rank only does for FSDP2 in torch's own way takes a turn, too."""
    return _Together(schedule).run()


class _Together:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.left = [list(_with_idle_turns(schedule, rank))[::-1] for rank in range(schedule.ranks)]
        self.moments: list[list[Moment]] = [[] for _ in self.left]
        self.done: list[set[Action | Transfer]] = [set() for _ in self.left]

    def run(self) -> tuple[tuple[Moment, ...], ...]:
        while any(self.left):
            moved = [self._turn(rank) for rank, left in enumerate(self.left) if left]
            assert any(moved), "a schedule that is proved does not wait for ever"
        return tuple(map(tuple, self.moments))

    def _turn(self, rank: int) -> bool:
        step = self.left[rank][-1]
        if step is not None:
            if not all(self._is_ready(part, rank) for part in step.parts):
                return False
            self.moments[rank].append(step)
            for part in step.parts:
                self._finish(part, rank)
        self.left[rank].pop()
        return True

    def _is_ready(self, part: Action, rank: int) -> bool:
        """What it takes is received, or made on the rank itself."""
        is_forward = part.kind is Kind.FORWARD
        source = part.stage + (-1 if is_forward else 1)
        if part.kind is Kind.WEIGHT or not 0 <= source < self.schedule.stages:
            return True
        kind = Kind.FORWARD if is_forward else Kind.BACKWARD
        made = (Kind.FORWARD,) if is_forward else (Kind.BACKWARD, Kind.INPUT)
        return Transfer(False, kind, part.stage, part.microbatch) in self.done[rank] or any(
            Action(each, source, part.microbatch) in self.done[rank] for each in made
        )

    def _finish(self, part: Action, rank: int) -> None:
        self.done[rank].add(part)
        is_forward = part.kind is Kind.FORWARD
        target = part.stage + (1 if is_forward else -1)
        if part.kind is Kind.WEIGHT or not 0 <= target < self.schedule.stages:
            return
        other = self.schedule.rank_of[target]
        if other == rank:
            return
        kind = Kind.FORWARD if is_forward else Kind.BACKWARD
        received = Transfer(False, kind, target, part.microbatch)
        self.moments[rank].append(Transfer(True, kind, part.stage, part.microbatch))
        self.moments[other].append(received)
        self.done[other].add(received)


_AHEAD = 3  # stages that torch's runtime would keep gathered under FSDP2


def _with_idle_turns(schedule: Schedule, rank: int) -> Iterator[Step | None]:
    """A rank's steps, and None for what torch puts between them: a turn for each stage that comes
    to the next three or leaves them, and one for each stage behind its last backward."""
    order = schedule.orders[rank]
    kept: set[int] = set()
    backwards = dict.fromkeys(schedule.stages_of(rank), 0)
    for place, step in enumerate(order):
        following = _next_stages(order[place:])
        yield from [None] * len(kept ^ following)
        kept = following
        yield step
        for part in step.parts:
            backwards[part.stage] += part.kind in (Kind.BACKWARD, Kind.WEIGHT)
            is_over = backwards[part.stage] == schedule.microbatches
            if is_over and part.kind is not Kind.FORWARD and part.kind is not Kind.INPUT:
                yield None


def _next_stages(steps: tuple[Step, ...]) -> set[int]:
    found: set[int] = set()
    for step in steps:
        found |= {part.stage for part in step.parts}
        if len(found) >= _AHEAD:
            break
    return found
