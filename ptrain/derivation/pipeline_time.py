"""The time of a pipeline's step: what each pass takes on its rank, put into the schedule.

A rank's passes are in its order, each as soon as what it needs has come. Where ranks send with the
cores that compute, a message takes its sender's time; elsewhere it is under way beside that. Ranks
update when their passes are over, and where the norm of all gradients is needed first, when all
ranks' are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ptrain.axes.pipeline.instructions import given
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.simulate import ActionCosts, simulate
from ptrain.costs import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.clock import Clock
from ptrain.derivation.computing import PassScore, Timing
from ptrain.derivation.repeats import Representatives
from ptrain.facts.model import UnitFacts
from ptrain.facts.operators import ModelWork
from ptrain.facts.passes import Passes
from ptrain.facts.stages import Stage
from ptrain.spec.axis import Axis
from ptrain.timeline import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """What the time of a pipeline's step is made of: a clock, the work of a micro-batch by place
    along tp, the names of the model's blocks, the schedule, and a message's bytes. `meets`: no rank
    updates before all have come to the end of their passes."""

    clock: Clock
    works: Sequence[ModelWork]
    blocks: Sequence[str]
    schedule: Schedule
    message: int
    meets: bool

    def scores(
        self,
        stage: Stage,
        index: int,
        played: Representatives | None,
        units: Sequence[UnitFacts],
        passes: Passes,
    ) -> dict[Kind, PassScore]:
        """Return what is computed when in the passes of a stage, on the ranks at this place along
        tp."""
        timing = Timing(clock=self.clock, work=self.works[index % len(self.works)])
        kinds = _kinds(self.schedule, stage.index)
        items = {kind: items for kind, items in passes.items.items() if kind in kinds}
        return timing.of_stage(stage, self.schedule.stages, played, units, items, self.blocks)


def _kinds(schedule: Schedule, stage: int) -> set[Kind]:
    """Return the kinds of passes that a stage has. The first one's halves are the whole."""
    if stage == 0:
        return {Kind.FORWARD, Kind.BACKWARD}
    actions = (part for order in schedule.orders for step in order for part in step.parts)
    return {action.kind for action in actions if action.stage == stage}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Of a rank at one `place` along pp: the seconds of each of its actions, of all its passes, and
    its clock when the step is over."""

    place: int
    seconds: Mapping[Action, float]
    passes: float
    clock: Clock

    @property
    def update(self) -> float:
        """The seconds behind the passes."""
        return self.clock.seconds - self.passes


def pipeline_time(
    schedule: Schedule, ranks: Sequence[RankTime], timing: PipelineTiming
) -> StepTime:
    """Return the time of a step on the rank that has most to do, its idle time up to the end of the
    last one's step included; of ranks at one place along pp the slowest stands for all."""
    slowest: dict[int, RankTime] = {}
    for rank in ranks:
        other = slowest.setdefault(rank.place, rank)
        slowest[rank.place] = max(other, rank, key=lambda rank: rank.clock.seconds)
    message = timing.clock.message_seconds(Axis.PP, timing.message)
    overlaps = timing.clock.pace.overlaps
    sends = {} if overlaps else _sends(schedule, message)
    seconds = {
        action: taken + sends.get(action, 0.0)
        for rank in slowest.values()
        for action, taken in rank.seconds.items()
    }
    simulation = simulate(
        schedule, ActionCosts(seconds=seconds, communication=message if overlaps else 0.0)
    )
    ends = {
        place: simulation.makespan if timing.meets else spans[-1].end
        for place, spans in enumerate(simulation.timeline)
    }
    over = max(ends[rank.place] + rank.update for rank in slowest.values())
    busiest = max(slowest.values(), key=lambda rank: rank.clock.seconds)
    sent = _sent(schedule, busiest.place, sends)
    idle = over - busiest.clock.seconds - sum(row.seconds for row in sent)
    bubble = TimeRow(key=TimeKey(Spent.BUBBLE, Phase.BACKWARD), seconds=max(idle, 0.0))
    time = busiest.clock.step_time()
    return replace(time, rows=(*time.rows, *sent, bubble))


def _sends(schedule: Schedule, message: float) -> dict[Action, float]:
    """Return what each action's sender spends on its message."""
    sends: dict[Action, float] = {}
    for rank, order in enumerate(schedule.orders):
        for step in order:
            for action in step.parts:
                gift = given(action, schedule.stages)
                if gift is not None and schedule.rank_of[gift.target] != rank:
                    sends[action] = message
    return sends


def _sent(schedule: Schedule, place: int, sends: Mapping[Action, float]) -> list[TimeRow]:
    """Return what a rank spends on its messages, by phase."""
    sums: dict[Phase, float] = {}
    for step in schedule.orders[place]:
        for action in step.parts:
            if action in sends:
                phase = Phase.FORWARD if action.kind is Kind.FORWARD else Phase.BACKWARD
                sums[phase] = sums.get(phase, 0.0) + sends[action]
    axes = (Axis.PP.value,)
    return [
        TimeRow(
            key=TimeKey(Spent.COLLECTIVES, phase, axes, Collective.SEND),
            seconds=seconds,
            moving=seconds,
        )
        for phase, seconds in sums.items()
    ]
