"""When a schedule's steps start and end, and the proof that it is one: every micro-batch forward
and backward once on every stage, whole or in its two halves, weights after inputs, and no rank that
waits for ever. Only the last depends on costs, and comes out when the schedule is run.

A rank does its steps in its order, each as soon as what it needs has come. What a step makes is
there when it ends, on another rank `communication` later; sending takes no rank's time, and links
are never busy. A pair starts when both its halves can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol, assert_never

from ptrain.axes.pipeline.schedule import Action, Pair, Schedule, StageCost, Step
from ptrain.errors import BrokenSchedule
from ptrain.timeline import Kind


class Durations(Protocol):
    """How long each step takes, and what is sent between ranks (`communication`, of each
    message)."""

    @property
    def communication(self) -> float: ...

    def covers(self, schedule: Schedule) -> bool:
        """Return whether they are those of a schedule."""
        ...

    def of(self, step: Step) -> float:
        """Return how long a step takes."""
        ...


class ActionCosts(NamedTuple):
    """What each action takes by itself; a pair is one after the other."""

    seconds: Mapping[Action, float]
    communication: float = 0

    def covers(self, schedule: Schedule) -> bool:
        parts = (step.parts for step in chain.from_iterable(schedule.orders))
        return all(map(self.seconds.__contains__, chain.from_iterable(parts)))

    def of(self, step: Step) -> float:
        if isinstance(step, Action):
            return self.seconds[step]
        return sum(self.seconds[part] for part in step.parts)


class Costs(NamedTuple):
    """`communication` is per micro-batch and boundary between ranks; `hidden` is what a pair takes
    less than its halves one after the other."""

    stages: tuple[StageCost, ...]
    communication: float = 0
    hidden: float = 0

    def covers(self, schedule: Schedule) -> bool:
        return len(self.stages) == schedule.stages

    def of(self, step: Step) -> float:
        seconds = sum(self.stages[part.stage].of(part.kind) for part in step.parts)
        return seconds - self.hidden if isinstance(step, Pair) else seconds


def equal_stages(schedule: Schedule, cost: StageCost | None = None) -> Costs:
    """Every stage costs the same: one unit each forward, input and weight, if nothing is said."""
    return Costs(stages=(cost or StageCost(),) * schedule.stages)


class Span(NamedTuple):
    """A step, and from when to when it runs."""

    step: Step
    start: float
    end: float


class Simulation(NamedTuple):
    """`timeline` holds the spans of each rank, in order."""

    timeline: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first step's start to the last one's end."""
        return max((spans[-1].end for spans in self.timeline if spans), default=0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.timeline)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits, before its first step and after its last one included."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time as a part of the makespan, mean of the ranks: (p-1)/(m+p-1) of GPipe."""
        return sum(self.idle) / (len(self.timeline) * self.makespan)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over the ideal time, in which nobody waits: (p-1)/m of GPipe. A fraction f is
        a ratio r = f/(1-f). Unequal ranks: over the mean of what they compute."""
        return sum(self.idle) / sum(self.busy)


def simulate(schedule: Schedule, costs: Durations | None = None) -> Simulation:
    """Raises BrokenSchedule with the rank, the action and what is wrong. O(actions)."""
    costs = costs or equal_stages(schedule)
    assert costs.covers(schedule), "costs for other stages than those of the schedule"
    return _Simulation(schedule, costs).to_the_end()


class _Simulation:
    """How far each rank is, and who waits for what."""

    def __init__(self, schedule: Schedule, costs: Durations) -> None:
        self.schedule = schedule
        self.costs, self.communication = costs, costs.communication
        self.rank_of = schedule.rank_of
        self.work = step_work(schedule)
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.ended: dict[Action, float] = {}
        self.waiting: defaultdict[Action, list[int]] = defaultdict(list)

    def to_the_end(self) -> Simulation:
        able = list(range(self.schedule.ranks))
        while able:
            able += self._advance(able.pop())
        if stuck := [rank for rank in range(self.schedule.ranks) if self._next(rank)]:
            raise self._deadlock(stuck[0])
        return Simulation(timeline=tuple(tuple(spans) for spans in self.spans))

    def _advance(self, rank: int) -> list[int]:
        """A rank's steps until one lacks something; returns the ranks that waited for what came
        out."""
        woken: list[int] = []
        spans, order = self.spans[rank], self.schedule.orders[rank]
        needs_of, seconds_of, waiting = self.work.needs, self.costs.of, self.waiting
        while len(spans) < len(order):
            step = order[len(spans)]
            start = spans[-1].end if spans else 0
            for need in needs_of(step):
                if (arrival := self._arrival(need, rank)) is None:
                    waiting[need].append(rank)
                    return woken
                start = max(arrival, start)
            end = start + seconds_of(step)
            spans.append(Span(step, start, end))
            for part in step.parts:
                self.ended[part] = end
                if part in waiting:
                    woken += waiting.pop(part)
        return woken

    def _next(self, rank: int) -> Step | None:
        done, order = len(self.spans[rank]), self.schedule.orders[rank]
        return order[done] if done < len(order) else None

    def _lacking(self, needs: tuple[Action, ...]) -> Action | None:
        return next((need for need in needs if need not in self.ended), None)

    def _arrival(self, need: Action, rank: int) -> float | None:
        """When it is there; None where it has not begun."""
        end = self.ended.get(need)
        if end is None or self.rank_of[need.stage] == rank:
            return end
        return end + self.communication

    def _deadlock(self, rank: int) -> BrokenSchedule:
        """Follows who waits for whom from one rank until it closes."""
        step, at = self._next(rank), rank
        chain: list[str] = []
        seen: set[int] = set()
        while at not in seen:
            seen.add(at)
            waiting = self._next(at)
            assert waiting, "a rank that has ended keeps nobody waiting"
            need = self._lacking(self.work.needs(waiting))
            assert need, "a rank that lacks nothing goes on"
            owner = self.schedule.rank_of[need.stage]
            chain.append(f"rank {at} waits at {waiting} for {need} of rank {owner}")
            at = owner
        return BrokenSchedule(rank, step, f"deadlock: {', '.join(chain)}")


# A schedule on cores that its ranks share: who waits leaves them to the others.
#
# What a step takes is known for the case that all ranks are busy. While fewer are, each is faster,
# by a factor that a machine's rates say. So a step has a number of seconds to do, of which more is
# done in a second while others wait.


_NOTHING = 1e-12  # of a step's seconds: done


def simulate_sharing(
    schedule: Schedule, costs: Durations, speed: Callable[[int], float]
) -> Simulation:
    """Return when the steps start and end of a schedule that is one, of which `simulate` convinces.
    `speed` says by how many ranks are busy how much faster each is than with all of them; what is
    sent takes its sender's time. O(steps x ranks)."""
    assert costs.covers(schedule), "costs for other stages than those of the schedule"
    assert not costs.communication, "what is sent takes its sender's time"
    return _Sharing(schedule, costs, speed).to_the_end()


class _Sharing:
    """How far each rank is; `left` of the seconds of what it does now, since `begun`."""

    def __init__(self, schedule: Schedule, costs: Durations, speed: Callable[[int], float]) -> None:
        self.schedule, self.costs, self.speed = schedule, costs, speed
        self.needs = step_work(schedule).needs
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.left: dict[int, float] = {}
        self.begun: dict[int, float] = {}
        self.ended: set[Action] = set()
        self.now = 0.0

    def to_the_end(self) -> Simulation:
        while self._begin():
            factor = self.speed(len(self.left))
            least = min(self.left.values())
            self.now += least / factor
            for rank in [*self.left]:
                self.left[rank] -= least
                if self.left[rank] <= _NOTHING:
                    self._end(rank)
        return Simulation(timeline=tuple(tuple(spans) for spans in self.spans))

    def _begin(self) -> bool:
        """Every rank that can begins; returns whether any is busy."""
        for rank in range(self.schedule.ranks):
            step = None if rank in self.left else self._next(rank)
            if step is not None and all(need in self.ended for need in self.needs(step)):
                self.left[rank], self.begun[rank] = self.costs.of(step), self.now
        return bool(self.left)

    def _next(self, rank: int) -> Step | None:
        done, order = len(self.spans[rank]), self.schedule.orders[rank]
        return order[done] if done < len(order) else None

    def _end(self, rank: int) -> None:
        step = self._next(rank)
        assert step is not None, "what is busy does something"
        self.spans[rank].append(Span(step=step, start=self.begun[rank], end=self.now))
        del self.left[rank], self.begun[rank]
        self.ended.update(step.parts)


@lru_cache(maxsize=4)  # a schedule is run with equal costs, and soon after with those of a spec
def step_work(schedule: Schedule) -> StepWork:
    """Return all that a schedule does. Raises BrokenSchedule where it is not a step's work."""
    return StepWork(schedule)


class StepWork:
    """All that a schedule does, once. Raises BrokenSchedule where it is not a step's work."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._last = schedule, schedule.stages - 1
        self._actions: set[Action] = set()
        for rank, order in enumerate(schedule.orders):
            for step in order:
                for part in step.parts:
                    self._add(part, rank)
        for stage in range(schedule.stages):
            for microbatch in range(schedule.microbatches):
                self._require_all(stage, microbatch)

    def needs(self, step: Step) -> tuple[Action, ...]:
        """The actions whose results it takes, those of its own rank included."""
        if isinstance(step, Action):
            return self._needs(step)
        return tuple([need for part in step.parts for need in self._needs(part)])

    def _needs(self, action: Action) -> tuple[Action, ...]:
        kind, stage, microbatch = action
        match kind:
            case Kind.FORWARD:
                return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
            case Kind.BACKWARD | Kind.INPUT:
                forward = Action(Kind.FORWARD, stage, microbatch)
                if stage == self._last:
                    return (forward,)
                whole = Action(Kind.BACKWARD, stage + 1, microbatch)
                is_whole = whole in self._actions
                return (forward, whole if is_whole else Action(Kind.INPUT, stage + 1, microbatch))
            case Kind.WEIGHT:
                return (Action(Kind.INPUT, stage, microbatch),)
            case other:
                assert_never(other)

    def _add(self, action: Action, rank: int) -> None:
        schedule = self._schedule
        if not 0 <= action.stage < schedule.stages:
            reason = f"there are {schedule.stages} stages, counted from 0"
        elif schedule.rank_of[action.stage] != rank:
            reason = f"stage {action.stage} belongs to rank {schedule.rank_of[action.stage]}"
        elif not 0 <= action.microbatch < schedule.microbatches:
            reason = f"there are {schedule.microbatches} micro-batches, counted from 0"
        elif action in self._actions:
            reason = "twice"
        else:
            self._actions.add(action)
            return
        raise BrokenSchedule(rank, action, reason)

    def _require_all(self, stage: int, microbatch: int) -> None:
        """One forward, and one backward: whole, or both halves."""
        there = {kind: Action(kind, stage, microbatch) in self._actions for kind in Kind}
        rank, is_split = self._schedule.rank_of[stage], there[Kind.INPUT] or there[Kind.WEIGHT]
        if self._schedule.is_forward_only:
            assert there == dict.fromkeys(Kind, False) | {Kind.FORWARD: True}, "forward passes"
            return
        if there[Kind.BACKWARD] and is_split:
            action = Action(Kind.BACKWARD, stage, microbatch)
            raise BrokenSchedule(rank, action, "full pass and a second half")
        backward = (Kind.INPUT, Kind.WEIGHT) if is_split else (Kind.BACKWARD,)
        for kind in (Kind.FORWARD, *backward):
            if not there[kind]:
                raise BrokenSchedule(rank, Action(kind, stage, microbatch), "missing")


WIDTH = 160  # characters, what a wide terminal shows
MEANINGS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward of the inputs",
    Kind.WEIGHT: "W backward of the weights",
}
_IDLE, _LONGER, _LEFT_OUT = ".", "-", "…"


def draw(schedule: Schedule, width: int = WIDTH) -> str:
    """Return the schedule as text, with F = I = W = 1 and B = 2. What does not fit in `width`
    characters is left out in the middle, the same columns on every line; a line has at least its
    first and its last column."""
    simulation = simulate(schedule)
    columns = round(simulation.makespan)
    has_stages = schedule.stages > schedule.ranks
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, heads)) + 2
    cell = 1 + max(
        len(_label(part, has_stages))
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    room = max(3, (width - margin + 1) // cell)
    lines = [_cells(spans, columns, cell, has_stages) for spans in simulation.timeline]
    first, last = room // 2, (room - 1) // 2  # and one for the sign
    left_out = max(0, columns - first - last) if columns > room else 0
    if left_out:
        sign = _LEFT_OUT.ljust(cell)
        lines = [[*cells[:first], sign, *cells[columns - last :]] for cells in lines]
    drawn = [
        f"{head:<{margin}}{''.join(cells)}".rstrip()
        for head, cells in zip(heads, lines, strict=True)
    ]
    return "\n".join((*drawn, _legend(schedule, has_stages, left_out)))


def bubble_text(simulation: Simulation) -> str:
    """Both conventions of the literature, of a schedule with the simulator's equal stages."""
    return (
        f"{simulation.bubble_fraction:.1%} of the step, {simulation.bubble_ratio:.1%} of the "
        "ideal time, for equal stages and backward = 2 x forward"
    )


def _cells(spans: Sequence[Span], columns: int, cell: int, has_stages: bool) -> list[str]:
    """A rank's columns, `cell` characters each."""
    cells = [_IDLE.ljust(cell)] * columns
    for span in spans:
        start, length = round(span.start), round(span.end - span.start)
        label = "&".join(_label(part, has_stages) for part in span.step.parts)
        filler = _LONGER if length > 1 else " "
        text = label.ljust(length * cell - 1, filler) + " "
        cells[start : start + length] = [
            text[at : at + cell] for at in range(0, length * cell, cell)
        ]
    return cells


def _label(action: Action, has_stages: bool) -> str:
    """With one stage a rank, the line says which."""
    return str(action) if has_stages else f"{action.kind}{action.microbatch}"


def _legend(schedule: Schedule, has_stages: bool, left_out: int) -> str:
    steps = [step for order in schedule.orders for step in order]
    kinds = {part.kind for step in steps for part in step.parts}
    parts = [meaning for kind, meaning in MEANINGS.items() if kind in kinds]
    parts.append("stage first, then micro-batch" if has_stages else "each with its micro-batch")
    if any(isinstance(step, Pair) for step in steps):
        parts.append("& side by side")
    parts.append(f"{_IDLE} idle")
    if left_out:
        parts.append(f"{_LEFT_OUT} {left_out} columns")
    return " · ".join(parts)
