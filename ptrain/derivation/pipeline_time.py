"""The time of a step: what each pass takes on its rank, put into the schedule.

A rank's passes are in its order, each as soon as what it needs has come. Where ranks send with the
cores that compute, a message takes its sender's time, and who waits leaves its cores to the others;
elsewhere a message is under way beside what is computed, and a host issues its passes while its
device waits for other ranks. All ranks agree on the loss before any of
them updates, so that updates begin when the last rank's passes are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from ptrain.axes.pipeline.instructions import given
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.simulate import ActionCosts, Simulation, simulate, simulate_sharing
from ptrain.cost import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.clock import Clock, LaneSpan, with_launches, with_stragglers
from ptrain.derivation.computing import PassScore, score, work_of_stage
from ptrain.derivation.layers import Representatives
from ptrain.facts.model import ModelWork, Passes, UnitFacts
from ptrain.facts.stages import Stage
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind


class StepTiming(NamedTuple):
    """What a step's time is made of: a clock, the work of a micro-batch by place along tp, the
    names of the model's blocks, the schedule, and a message's bytes. `speed`: how much faster ranks
    are of so many places alone, where they share cores; `assumed` is what is said of that.
    `plays_all`: every block by itself, whatever stands for it else."""

    spec: Spec
    clock: Clock
    work: Callable[[int], ModelWork]
    blocks: Sequence[str]
    schedule: Schedule
    message: int = 0
    speed: Callable[[int], float] | None = None
    assumed: tuple[str, ...] = ()
    spans: list[LaneSpan] | None = None
    plays_all: bool = False

    def clock_of(self, index: int) -> Clock:
        """Return the clock of a rank at this place along tp. Without a pipeline that of the first
        notes its lanes."""
        clock = self.clock.another()
        clock.spans = self.spans if index == 0 and self.schedule.ranks == 1 else None
        return clock

    def simulated(self, seconds: Mapping[Action, float]) -> Simulation:
        """Return when the actions start and end that take so long."""
        overlaps = self.clock.pace.overlaps
        costs = ActionCosts(seconds=seconds, communication=self._message if overlaps else 0.0)
        if self.speed is None:
            return simulate(self.schedule, costs)
        return simulate_sharing(self.schedule, costs, self.speed)

    @property
    def _message(self) -> float:
        return self.clock.message_seconds(Axis.PP, self.message)

    def sends(self, tails: Mapping[Action, float]) -> dict[Action, float]:
        """Return what each action's sender spends on its message, so long after its last
        collective: nothing, where messages move beside what is computed."""
        pace, rank_of = self.clock.pace, self.schedule.rank_of
        if pace.overlaps:
            return {}
        message = self._message
        return {
            action: message + pace.late_seconds(tail)
            for action, tail in tails.items()
            if (gift := given(action, self.schedule.stages)) is not None
            and rank_of[gift.target] != rank_of[action.stage]
        }

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
        kinds = _kinds(self.schedule, stage.index)
        items = {kind: items for kind, items in passes.items.items() if kind in kinds}
        ends = stage.index == 0, stage.index == self.schedule.stages - 1
        work, moved = self.work(index), passes.moved
        layers = work_of_stage(self.spec, work, self.blocks, stage, units, ends, played, moved)
        return {kind: score(self.clock, kind, own, layers) for kind, own in items.items()}


def _kinds(schedule: Schedule, stage: int) -> set[Kind]:
    """Return the kinds of passes that a stage has. The first one's halves are the whole."""
    if stage == 0:
        return {Kind.FORWARD, Kind.BACKWARD}
    actions = (part for order in schedule.orders for step in order for part in step.parts)
    return {action.kind for action in actions if action.stage == stage}


class RankTime(NamedTuple):
    """Of a rank at one `place` along pp: the seconds of each of its actions, of these the `tails`
    since the last collective, those of all its passes, those of reductions that are still `late`
    behind its passes, and its clock when the step is over."""

    place: int
    seconds: Mapping[Action, float]
    tails: Mapping[Action, float]
    passes: float
    late: float
    clock: Clock

    @property
    def update(self) -> float:
        """The seconds behind the passes and their reductions."""
        return self.clock.seconds - self.passes - self.late


def step_time(schedule: Schedule, ranks: Sequence[RankTime], timing: StepTiming) -> StepTime:
    """Return the time of a step on the rank that has most to do, its idle time up to the end of the
    last one's step included; of ranks at one place along pp the slowest stands for all."""
    if schedule.ranks == 1:
        return max((rank.clock.step_time() for rank in ranks), key=attrgetter("seconds"))
    slowest = _slowest(ranks)
    tails = {action: tail for rank in slowest.values() for action, tail in rank.tails.items()}
    sends = timing.sends(tails)
    seconds = {
        action: taken + sends.get(action, 0.0)
        for rank in slowest.values()
        for action, taken in rank.seconds.items()
    }
    simulation = timing.simulated(seconds)
    reduced = max(simulation.timeline[place][-1].end + rank.late for place, rank in slowest.items())
    if timing.spans is not None:
        timing.spans.extend(_spans(simulation, slowest.values(), reduced))
    over = reduced + max(rank.update for rank in slowest.values())
    busiest = max(slowest.values(), key=lambda rank: rank.clock.seconds)
    rows = [*busiest.clock.rows(), *_sent(busiest.seconds, sends)]
    alone = sum(seconds[action] for action in busiest.seconds)
    factor = simulation.busy[busiest.place] / alone if alone else 1.0
    rows = [row if row.key.phase is Phase.UPDATE else _scaled(row, factor) for row in rows]
    idle = max(over - sum(row.seconds for row in rows), 0.0)
    bubble = TimeRow(key=TimeKey(Spent.BUBBLE, Phase.BACKWARD, (Axis.PP.value,)), seconds=idle)
    launches = max(rank.clock.launches for rank in slowest.values())
    assumed = (*timing.assumed, *busiest.clock.assumed)
    slowest_rows = with_launches((*rows, bubble), launches)
    return StepTime(rows=with_stragglers(slowest_rows, timing.clock.network), assumed=assumed)


def _slowest(ranks: Iterable[RankTime]) -> dict[int, RankTime]:
    """Return by place along pp the rank that has most to do."""
    slowest: dict[int, RankTime] = {}
    for rank in ranks:
        other = slowest.setdefault(rank.place, rank)
        slowest[rank.place] = max(other, rank, key=lambda rank: rank.clock.seconds)
    return slowest


Gaps = Mapping[Action, float]


def idle_gaps(ranks: Iterable[RankTime], timing: StepTiming) -> dict[int, Gaps]:
    """Return by place along pp how long a rank waits for others before each of its actions."""
    slowest = _slowest(ranks)
    seconds = {a: taken for rank in slowest.values() for a, taken in rank.seconds.items()}
    gaps: dict[int, Gaps] = {}
    for place, spans in enumerate(timing.simulated(seconds).timeline):
        ends = (0.0, *(span.end for span in spans))
        pairs = zip(spans, ends, strict=False)
        gaps[place] = {span.step.parts[0]: span.start - end for span, end in pairs}
    return gaps


def _spans(simulation: Simulation, ranks: Iterable[RankTime], end: float) -> Iterator[LaneSpan]:
    """Yield what each rank does when, each on a lane of its own; updates begin at the `end` of all
    passes and their reductions."""
    for place, spans in enumerate(simulation.timeline):
        for span in spans:
            is_forward = span.step.parts[0].kind is Kind.FORWARD
            phase = Phase.FORWARD if is_forward else Phase.BACKWARD
            yield LaneSpan(place, TimeKey(Spent.COMPUTE, phase), span.start, span.end)
    for rank in ranks:
        yield LaneSpan(rank.place, TimeKey(Spent.UPDATE, Phase.UPDATE), end, end + rank.update)


def _scaled(row: TimeRow, factor: float) -> TimeRow:
    """As long as it is where others leave their cores to the rank."""
    return replace(row, seconds=factor * row.seconds, moving=factor * row.moving)


def _sent(actions: Iterable[Action], sends: Mapping[Action, float]) -> Iterator[TimeRow]:
    """Yield what a rank with these actions spends on its messages, by phase."""
    sums: dict[Phase, float] = {}
    for action in actions:
        if action in sends:
            phase = Phase.FORWARD if action.kind is Kind.FORWARD else Phase.BACKWARD
            sums[phase] = sums.get(phase, 0.0) + sends[action]
    for phase, seconds in sums.items():
        key = TimeKey(Spent.COLLECTIVES, phase, (Axis.PP.value,), Collective.SEND)
        yield TimeRow(key=key, seconds=seconds, moving=seconds)
