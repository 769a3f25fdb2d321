"""Simulate a schedule's step times, and prove that it is the work of a step.

The proof checks that every micro-batch runs forward and backward once on every stage, in full or in
two halves, weight half after input half, and that no rank waits forever. Only the times depend on
costs.

A rank runs its steps in order, each as soon as its inputs have arrived. An output is available when
its step ends, on another rank `communication` later. Sending takes no time of a rank, and links are
never busy. A pair starts when both its actions can.
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
    """The durations of steps, and the time of a message between ranks (`communication`)."""

    @property
    def communication(self) -> float: ...

    def has_all_steps(self, schedule: Schedule) -> bool:
        """Return True if there is a duration for each step of a schedule."""
        ...

    def duration(self, step: Step) -> float:
        """Return the duration of a step."""
        ...


class ActionCosts(NamedTuple):
    """Durations by action; the actions of a pair run one after the other."""

    seconds: Mapping[Action, float]
    communication: float = 0

    def has_all_steps(self, schedule: Schedule) -> bool:
        parts = (step.parts for step in chain.from_iterable(schedule.orders))
        return all(map(self.seconds.__contains__, chain.from_iterable(parts)))

    def duration(self, step: Step) -> float:
        if isinstance(step, Action):
            return self.seconds[step]
        return sum(self.seconds[part] for part in step.parts)


class Costs(NamedTuple):
    """Durations by stage and kind of pass.

    Attributes:
        stages: The costs of each stage.
        communication: Time of one message between ranks.
        overlap: Time that a pair saves compared with its actions one after the other.
    """

    stages: tuple[StageCost, ...]
    communication: float = 0
    overlap: float = 0

    def has_all_steps(self, schedule: Schedule) -> bool:
        return len(self.stages) == schedule.stages

    def duration(self, step: Step) -> float:
        seconds = sum(self.stages[part.stage].duration(part.kind) for part in step.parts)
        return seconds - self.overlap if isinstance(step, Pair) else seconds


def equal_stages(schedule: Schedule, cost: StageCost | None = None) -> Costs:
    """Return equal costs for all stages, without communication or overlap.

    Args:
        schedule: The schedule, for its number of stages.
        cost: The cost of each stage. Default: one unit per forward, input and weight half.
    """
    return Costs(stages=(cost or StageCost(),) * schedule.stages)


class Span(NamedTuple):
    """A step with its start and end."""

    step: Step
    start: float
    end: float


class Simulation(NamedTuple):
    """The simulated times: `timeline` has the ordered spans of each rank."""

    timeline: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max((spans[-1].end for spans in self.timeline if spans), default=0)

    @property
    def busy_times(self) -> tuple[float, ...]:
        """The computation time of each rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.timeline)

    @property
    def idle_times(self) -> tuple[float, ...]:
        """The waiting time of each rank, including before its first and after its last step."""
        return tuple(self.makespan - busy for busy in self.busy_times)

    @property
    def bubble_fraction(self) -> float:
        """The mean idle time over the makespan: (p-1)/(m+p-1) for GPipe."""
        return sum(self.idle_times) / (len(self.timeline) * self.makespan)

    @property
    def bubble_ratio(self) -> float:
        """The idle time over the ideal time without waits: (p-1)/m for GPipe.

        A fraction f is a ratio r = f/(1-f). With unequal ranks, the ideal time is the mean
        computation time.
        """
        return sum(self.idle_times) / sum(self.busy_times)


def simulate(schedule: Schedule, costs: Durations | None = None) -> Simulation:
    """Simulate a schedule in O(actions).

    Args:
        schedule: The schedule of one step.
        costs: The durations of the passes and messages. Default: one unit per forward, input and
            weight half, and messages that take no time.

    Returns:
        The timeline of each rank, in the unit of the costs.

    Raises:
        BrokenSchedule: The schedule is not the work of a step, or ends in a deadlock; with rank,
            action and reason.
    """
    return _Simulation(schedule, costs or equal_stages(schedule)).to_the_end()


class _Progress:
    """The steps that each rank has ended, as `spans`."""

    def __init__(self, schedule: Schedule, costs: Durations) -> None:
        assert costs.has_all_steps(schedule), "costs for other stages than those of the schedule"
        self.schedule, self.costs = schedule, costs
        self.work = step_work(schedule)
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]

    def next_step(self, rank: int) -> Step | None:
        """Return the next step of a rank, None at its end."""
        done, order = len(self.spans[rank]), self.schedule.orders[rank]
        return order[done] if done < len(order) else None

    def simulation(self) -> Simulation:
        """Return the times of all steps."""
        return Simulation(timeline=tuple(tuple(spans) for spans in self.spans))


class _Simulation(_Progress):
    """The progress of each rank, and the ranks that wait for each action."""

    def __init__(self, schedule: Schedule, costs: Durations) -> None:
        super().__init__(schedule, costs)
        self.rank_of, self.communication = schedule.rank_of, costs.communication
        self.ended: dict[Action, float] = {}
        self.waiting: defaultdict[Action, list[int]] = defaultdict(list)

    def to_the_end(self) -> Simulation:
        """Run all ranks, and return the times."""
        # A work list: each rank runs until an input is missing, and is woken by the action that
        # makes it. Every action is visited once, in any order of ranks, because times depend on
        # inputs only.
        able = list(range(self.schedule.ranks))
        while able:
            able += self._run_rank(able.pop())
        if stuck := [rank for rank in range(self.schedule.ranks) if self.next_step(rank)]:
            raise self._deadlock_error(stuck[0])
        return self.simulation()

    def _run_rank(self, rank: int) -> list[int]:
        """Run a rank until an input is missing; return the ranks that its results wake."""
        woken: list[int] = []
        spans, order = self.spans[rank], self.schedule.orders[rank]
        needs_of, seconds_of, waiting = self.work.inputs, self.costs.duration, self.waiting
        while len(spans) < len(order):
            step = order[len(spans)]
            start = spans[-1].end if spans else 0
            for need in needs_of(step):
                if (arrival := self._arrival_time(need, rank)) is None:
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

    def _arrival_time(self, need: Action, rank: int) -> float | None:
        """Return the time at which an input arrives on a rank, None if not computed yet."""
        end = self.ended.get(need)
        if end is None or self.rank_of[need.stage] == rank:
            return end
        return end + self.communication

    def _deadlock_error(self, rank: int) -> BrokenSchedule:
        """Return the error with the cycle of waiting ranks."""
        step, at = self.next_step(rank), rank
        chain: list[str] = []
        seen: set[int] = set()
        while at not in seen:
            seen.add(at)
            waiting = self.next_step(at)
            assert waiting, "a rank that has ended keeps nobody waiting"
            # a rank that lacks nothing would have run
            need = next(need for need in self.work.inputs(waiting) if need not in self.ended)
            owner = self.schedule.rank_of[need.stage]
            chain.append(f"rank {at} waits at {waiting} for {need} of rank {owner}")
            at = owner
        return BrokenSchedule(rank, step, f"deadlock: {', '.join(chain)}")


# Simulation on shared cores: a waiting rank leaves its core to others. Durations are known for all
# ranks busy. With fewer busy ranks, each is faster by a factor from the machine's rates, so a step
# has seconds of work left, and more than one is done per second.


_DONE = 1e-12  # seconds of work below which a step is done (rounding)


def simulate_sharing(
    schedule: Schedule, costs: Durations, speed: Callable[[int], float]
) -> Simulation:
    """Simulate a schedule on cores that its ranks share.

    It takes O(steps x ranks), and expects a schedule that `simulate` has accepted. Costs must
    include the time of sends.

    Args:
        schedule: The schedule.
        costs: Durations if all ranks are busy.
        speed: Returns the speed of each rank, relative to all ranks busy, by the number of busy
            ranks.
    """
    assert not costs.communication, "what is sent takes its sender's time"
    return _SharedCoreSimulation(schedule, costs, speed).to_the_end()


class _SharedCoreSimulation(_Progress):
    """The progress of each rank: `left` are the seconds that its current step still needs."""

    def __init__(self, schedule: Schedule, costs: Durations, speed: Callable[[int], float]) -> None:
        super().__init__(schedule, costs)
        self.speed = speed
        self.left: dict[int, float] = {}
        self.begun: dict[int, float] = {}
        self.ended: set[Action] = set()
        self.now = 0.0

    def to_the_end(self) -> Simulation:
        """Run all ranks, and return the times."""
        while self._start_steps():
            factor = self.speed(len(self.left))
            least = min(self.left.values())
            self.now += least / factor
            # A copy, because ended steps are removed.
            for rank in [*self.left]:
                self.left[rank] -= least
                if self.left[rank] <= _DONE:
                    self._end_step(rank)
        return self.simulation()

    def _start_steps(self) -> bool:
        """Start all steps that can start; return True if any rank is busy."""
        for rank in range(self.schedule.ranks):
            step = None if rank in self.left else self.next_step(rank)
            if step is not None and all(need in self.ended for need in self.work.inputs(step)):
                self.left[rank], self.begun[rank] = self.costs.duration(step), self.now
        return bool(self.left)

    def _end_step(self, rank: int) -> None:
        """End the current step of a rank."""
        step = self.next_step(rank)
        assert step is not None, "what is busy does something"
        self.spans[rank].append(Span(step=step, start=self.begun[rank], end=self.now))
        del self.left[rank], self.begun[rank]
        self.ended.update(step.parts)


@lru_cache(maxsize=4)  # a schedule is simulated with equal costs, and then with a spec's
def step_work(schedule: Schedule) -> StepWork:
    """Return the actions of a schedule, cached.

    Raises:
        BrokenSchedule: The schedule is not the work of a step.
    """
    return StepWork(schedule)


class StepWork:
    """The actions of a schedule, each exactly once, and their inputs."""

    def __init__(self, schedule: Schedule) -> None:
        """Collect and check the actions.

        Raises:
            BrokenSchedule: The schedule is not the work of a step.
        """
        self._schedule, self._last = schedule, schedule.stages - 1
        self._actions: set[Action] = set()
        for rank, order in enumerate(schedule.orders):
            for step in order:
                for part in step.parts:
                    self._add_action(part, rank)
        for stage in range(schedule.stages):
            for microbatch in range(schedule.microbatches):
                self._require_all(stage, microbatch)

    def inputs(self, step: Step) -> tuple[Action, ...]:
        """Return the actions whose results a step takes, on any rank."""
        if isinstance(step, Action):
            return self._action_needs(step)
        return tuple([need for part in step.parts for need in self._action_needs(part)])

    def _action_needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results an action takes."""
        kind, stage, microbatch = action
        match kind:
            case Kind.FORWARD:
                return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
            case Kind.BACKWARD | Kind.INPUT:
                forward = Action(Kind.FORWARD, stage, microbatch)
                if stage == self._last:
                    return (forward,)
                whole = Action(Kind.BACKWARD, stage + 1, microbatch)
                # The next stage may run full backward passes or halves. Its input half already has
                # the gradient.
                is_whole = whole in self._actions
                return (forward, whole if is_whole else Action(Kind.INPUT, stage + 1, microbatch))
            case Kind.WEIGHT:
                return (Action(Kind.INPUT, stage, microbatch),)
            case other:
                assert_never(other)

    def _add_action(self, action: Action, rank: int) -> None:
        """Check an action and add it."""
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
        """Require one forward and one backward, full or in both halves."""
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


WIDTH = 160  # characters of a wide terminal
MEANINGS = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward of the inputs",
    Kind.WEIGHT: "W backward of the weights",
}
_IDLE, _LONGER, _LEFT_OUT = ".", "-", "…"


def draw_schedule(schedule: Schedule, width: int = WIDTH) -> str:
    """Return the schedule as text, with F = I = W = 1 and B = 2.

    Args:
        schedule: The schedule of one step.
        width: The longest line, in characters. Longer lines lose columns in the middle, the same on
            every line; a line has at least its first and its last column.
    """
    simulation = simulate(schedule)
    columns = round(simulation.makespan)
    has_stages = schedule.stages > schedule.ranks
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, heads)) + 2
    cell = 1 + max(
        len(_action_label(part, has_stages))
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    room = max(3, (width - margin + 1) // cell)
    lines = [_draw_cells(spans, columns, cell, has_stages) for spans in simulation.timeline]
    first, last = room // 2, (room - 1) // 2  # and one for the sign
    left_out = max(0, columns - first - last) if columns > room else 0
    if left_out:
        sign = _LEFT_OUT.ljust(cell)
        lines = [[*cells[:first], sign, *cells[columns - last :]] for cells in lines]
    drawn = [
        f"{head:<{margin}}{''.join(cells)}".rstrip()
        for head, cells in zip(heads, lines, strict=True)
    ]
    return "\n".join((*drawn, _draw_legend(schedule, has_stages, left_out)))


def bubble_text(simulation: Simulation) -> str:
    """Describe the bubble by both conventions of the literature."""
    return (
        f"{simulation.bubble_fraction:.1%} of the step, {simulation.bubble_ratio:.1%} of the "
        "ideal time, for equal stages and backward = 2 x forward"
    )


def _draw_cells(spans: Sequence[Span], columns: int, cell: int, has_stages: bool) -> list[str]:
    """Return the columns of a rank, `cell` characters each."""
    cells = [_IDLE.ljust(cell)] * columns
    for span in spans:
        start, length = round(span.start), round(span.end - span.start)
        label = "&".join(_action_label(part, has_stages) for part in span.step.parts)
        filler = _LONGER if length > 1 else " "
        text = label.ljust(length * cell - 1, filler) + " "
        cells[start : start + length] = [
            text[at : at + cell] for at in range(0, length * cell, cell)
        ]
    return cells


def _action_label(action: Action, has_stages: bool) -> str:
    """Return the text of an action; with one stage per rank, the line gives the stage."""
    return str(action) if has_stages else f"{action.kind}{action.microbatch}"


def _draw_legend(schedule: Schedule, has_stages: bool, left_out: int) -> str:
    """Return the legend of the kinds and signs that a drawing uses."""
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
