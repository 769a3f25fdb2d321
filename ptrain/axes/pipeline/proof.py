"""What a schedule must do, whatever its costs: on every stage each micro-batch once forward and
once backward, whole or in its two halves; and what an action needs before it.

That nobody waits for ever depends on no cost either, and comes out where the schedule is run
(`simulate`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import assert_never

from ptrain.axes.pipeline.schedule import Action, Schedule, Step
from ptrain.errors import BrokenSchedule
from ptrain.timeline import Kind


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
