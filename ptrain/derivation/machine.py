"""The time of a step: its inputs (the pace of a cluster's devices and the work of the model), and
the time of each pass on its rank, put into the schedule.

A rank executes its passes in order, each as soon as its inputs have arrived. If ranks communicate
with the cores that compute, a message takes its sender's time, and waiting ranks leave their cores
to the others. Otherwise messages overlap compute, and a host issues passes while its device waits.
All ranks agree on the loss before any of them updates, so updates begin when the last rank's passes
are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.simulate import ActionCosts, Simulation, simulate, simulate_sharing
from ptrain.axes.pipeline.stage_facts import chain_of, output_message
from ptrain.cost import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.clock import Clock, LaneSpan, with_launches, with_stragglers
from ptrain.derivation.computing import PassScore, block_names, score_pass, work_of_stage
from ptrain.derivation.interconnect import Network
from ptrain.derivation.layers import Representatives
from ptrain.derivation.pipeline import message_bytes
from ptrain.derivation.work import model_work, why_unknown
from ptrain.facts.model import ModelFacts, ModelWork, Passes, UnitFacts
from ptrain.facts.stages import Stage
from ptrain.rates.measured import missing_rates_reason, pace_of, pace_while_others_wait
from ptrain.rates.pace import Pace, UnknownRate, operators_seconds
from ptrain.spec.cluster import Hook
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Kind


class StepTiming(NamedTuple):
    """The inputs of a step's time.

    Attributes:
        spec: The spec.
        clock: A clock, copied for each rank.
        work: The work of a micro-batch, by place along tp.
        blocks: The names of the model's blocks.
        schedule: The pipeline schedule.
        message: Bytes of a message between stages.
        speed: The speed-up of ranks while this number of places computes and they share cores. None
            without shared cores.
        assumed: Sentences about assumptions of `speed`.
        spans: A list to fill with activity. None records nothing.
        plays_all: True to simulate every block, even if another block could represent it.
    """

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
        """Return the clock of a rank at this place along the cutting axes.

        Without a pipeline, the clock of the first place records spans.

        Args:
            index: The place along the cutting axes, from 0.
        """
        clock = self.clock.for_other_rank()
        clock.spans = self.spans if index == 0 and self.schedule.ranks == 1 else None
        return clock

    def simulated(self, seconds: Mapping[Action, float]) -> Simulation:
        """Return the start and end of actions that take these seconds.

        Args:
            seconds: Duration of each action of the schedule.
        """
        overlaps = self.clock.pace.overlaps
        # On a CPU the sender's cores copy the message. Its time is part of the action already
        # (`sends`).
        costs = ActionCosts(seconds=seconds, communication=self._message if overlaps else 0.0)
        if self.speed is None:
            return simulate(self.schedule, costs)
        return simulate_sharing(self.schedule, costs, self.speed)

    @property
    def _message(self) -> float:
        """The transit seconds of a message between stages."""
        return self.clock.message_seconds(Axis.PP, self.message)

    def sends(self, tails: Mapping[Action, float]) -> dict[Action, float]:
        """Return the seconds that each action's sender spends on its message.

        Args:
            tails: Seconds from the last collective to the end of each action.

        Returns:
            Seconds by action. Empty if messages overlap compute.
        """
        pace, rank_of = self.clock.pace, self.schedule.rank_of
        if pace.overlaps:
            return {}
        message = self._message
        return {
            action: message + pace.late_seconds(tail)
            for action, tail in tails.items()
            if (gift := output_message(action, self.schedule.stages)) is not None
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
        """Return the compute of each kind of pass of a stage, on the ranks at one place.

        Args:
            stage: The stage.
            index: The place along the cutting axes, from 0.
            played: The units that represent equal ones. None if each unit is simulated.
            units: The units that are simulated.
            passes: The timelines of the stage, and the (tier, bytes) that a forward pass moves.

        Returns:
            The compute by kind. Kinds that the schedule does not run are left out.
        """
        kinds = _pass_kinds(self.schedule, stage.index)
        items = {kind: items for kind, items in passes.items.items() if kind in kinds}
        ends = stage.index == 0, stage.index == self.schedule.stages - 1
        work, moved = self.work(index), passes.moved
        layers = work_of_stage(self.spec, work, self.blocks, stage, units, ends, played, moved)
        return {kind: score_pass(self.clock, kind, own, layers) for kind, own in items.items()}


def _pass_kinds(schedule: Schedule, stage: int) -> set[Kind]:
    """Return the kinds of passes of a stage. The first stage's backward is never in halves."""
    if stage == 0:
        return {Kind.FORWARD, Kind.BACKWARD}
    actions = (part for order in schedule.orders for step in order for part in step.parts)
    return {action.kind for action in actions if action.stage == stage}


class RankTime(NamedTuple):
    """The time of a rank.

    Attributes:
        place: The place along pp.
        seconds: Seconds of each action.
        tails: Seconds from the last collective to the end of each action.
        passes: Seconds of all passes.
        late: Seconds of reductions after the passes.
        clock: The clock at the end of the step.
    """

    place: int
    seconds: Mapping[Action, float]
    tails: Mapping[Action, float]
    passes: float
    late: float
    clock: Clock

    @property
    def update(self) -> float:
        """The seconds after the passes and their reductions."""
        return self.clock.seconds - self.passes - self.late


def step_time(schedule: Schedule, ranks: Sequence[RankTime], timing: StepTiming) -> StepTime:
    """Return the time of a step on the busiest rank, including its idle time until the last rank
    ends.

    The slowest rank at a place along pp represents all ranks at that place.

    Args:
        schedule: The pipeline schedule. It has one rank without pp.
        ranks: The simulated ranks. The slowest rank at a place along pp represents all ranks at
            that place.
        timing: The timing of the step. Its `spans`, if any, are extended.
    """
    if schedule.ranks == 1:
        return max((rank.clock.step_time() for rank in ranks), key=attrgetter("seconds"))
    slowest = _slowest_ranks(ranks)
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
        timing.spans.extend(_lane_spans(simulation, slowest.values(), reduced))
    # All ranks agree on the loss (`train.finite`) before any updates, so updates begin together.
    over = reduced + max(rank.update for rank in slowest.values())
    busiest = max(slowest.values(), key=lambda rank: rank.clock.seconds)
    rows = [*busiest.clock.time_rows(), *_message_rows(busiest.seconds, sends)]
    alone = sum(seconds[action] for action in busiest.seconds)
    factor = simulation.busy_times[busiest.place] / alone if alone else 1.0
    # The factor has the time that its core's neighbours leave idle: `simulate_sharing` makes passes
    # shorter than if all ranks computed.
    rows = [  # the rank uses the cores of waiting ranks, except in the update
        row
        if row.key.phase is Phase.UPDATE
        else replace(row, seconds=factor * row.seconds, moving=factor * row.moving)
        for row in rows
    ]
    idle = max(over - sum(row.seconds for row in rows), 0.0)
    bubble = TimeRow(key=TimeKey(Spent.BUBBLE, Phase.BACKWARD, (Axis.PP.value,)), seconds=idle)
    launches = max(rank.clock.launches for rank in slowest.values())
    assumed = (*timing.assumed, *busiest.clock.assumptions)
    slowest_rows = with_launches((*rows, bubble), launches)
    return StepTime(rows=with_stragglers(slowest_rows, timing.clock.network), assumed=assumed)


def _slowest_ranks(ranks: Iterable[RankTime]) -> dict[int, RankTime]:
    """Return the slowest rank at each place along pp."""
    slowest: dict[int, RankTime] = {}
    for rank in ranks:
        other = slowest.setdefault(rank.place, rank)
        slowest[rank.place] = max(other, rank, key=lambda rank: rank.clock.seconds)
    return slowest


Gaps = Mapping[Action, float]


def idle_gaps(ranks: Iterable[RankTime], timing: StepTiming) -> dict[int, Gaps]:
    """Return the seconds that a rank waits before each action, by place along pp.

    Args:
        ranks: The simulated ranks. The slowest rank at a place along pp represents the place.
        timing: The timing of the step.
    """
    slowest = _slowest_ranks(ranks)
    seconds = {a: taken for rank in slowest.values() for a, taken in rank.seconds.items()}
    gaps: dict[int, Gaps] = {}
    for place, spans in enumerate(timing.simulated(seconds).timeline):
        ends = (0.0, *(span.end for span in spans))
        pairs = zip(spans, ends, strict=False)
        gaps[place] = {span.step.parts[0]: span.start - end for span, end in pairs}
    return gaps


def _lane_spans(
    simulation: Simulation, ranks: Iterable[RankTime], end: float
) -> Iterator[LaneSpan]:
    """Yield the activity of each rank on a separate lane.

    Updates begin at `end`, when all passes and their reductions are done.
    """
    for place, spans in enumerate(simulation.timeline):
        for span in spans:
            is_forward = span.step.parts[0].kind is Kind.FORWARD
            phase = Phase.FORWARD if is_forward else Phase.BACKWARD
            yield LaneSpan(place, TimeKey(Spent.COMPUTE, phase), span.start, span.end)
    for rank in ranks:
        yield LaneSpan(rank.place, TimeKey(Spent.UPDATE, Phase.UPDATE), end, end + rank.update)


def _message_rows(actions: Iterable[Action], sends: Mapping[Action, float]) -> Iterator[TimeRow]:
    """Yield the time that a rank with these actions spends on messages, by phase."""
    sums: dict[Phase, float] = {}
    for action in actions:
        if action in sends:
            phase = Phase.FORWARD if action.kind is Kind.FORWARD else Phase.BACKWARD
            sums[phase] = sums.get(phase, 0.0) + sends[action]
    for phase, seconds in sums.items():
        key = TimeKey(Spent.COLLECTIVES, phase, (Axis.PP.value,), Collective.SEND)
        yield TimeRow(key=key, seconds=seconds, moving=seconds)


_NOBODY = (
    "waiting ranks are assumed to leave their cores idle: the cluster has no rates for "
    "fewer active ranks"
)


class Machine(NamedTuple):
    """The pace of the ranks and the work of the model.

    Attributes:
        pace: The pace of a rank.
        work: The work of a micro-batch of the full model, by place along tp.
        plays_all: True to simulate every block, even if another block could represent it.
        fewer: The pace while this number of ranks computes and the others wait. None if unknown.
        spans: A list to fill with the activity of the step. None records nothing.
    """

    pace: Pace
    work: Callable[[int], ModelWork]
    plays_all: bool = False
    fewer: Callable[[int], Pace | None] = lambda ranks: None
    spans: list[LaneSpan] | None = None

    def of_step(self, spec: Spec, plan: Plan, facts: ModelFacts, schedule: Schedule) -> StepTiming:
        """Return the timing of a step.

        Args:
            spec: A resolved spec.
            plan: The plan of the spec.
            facts: The facts of the full model.
            schedule: The pipeline schedule. It has one rank without pp, and then no messages are
                timed.
        """
        work = cache(self.work)  # few places along tp are simulated
        timing = StepTiming(
            spec=spec,
            clock=Clock(self.pace, Network(spec), plan.tensor.axis if plan.tensor else None),
            work=work,
            blocks=block_names(facts.blocks, work(0)),
            schedule=schedule,
            spans=self.spans,
            plays_all=self.plays_all and schedule.ranks == 1,
        )
        if schedule.ranks == 1:
            return timing
        speed, assumed = (
            (None, ()) if self.pace.overlaps else self._speed_while_sharing(spec, work(0))
        )
        message = message_bytes(spec, plan, chain_of(spec, facts))
        return timing._replace(message=message, speed=speed, assumed=assumed)

    def _speed_while_sharing(
        self, spec: Spec, work: ModelWork
    ) -> tuple[Callable[[int], float], tuple[str, ...]]:
        """Return the speed-up of ranks while only some places along pp compute, and the assumptions
        made.

        The total throughput is interpolated linearly between measured numbers of active ranks.
        """
        ranks, places = spec.world_size, spec.degree(Axis.PP)
        together = {ranks: float(ranks)}
        whole = _layer_seconds(self.pace, work)
        for number in range(1, ranks):
            if (pace := self.fewer(number)) is not None:
                together[number] = number * whole / _layer_seconds(pace, work)
        known = sorted(together)
        if len(known) == 1:
            return lambda busy: 1.0, (_NOBODY,)

        def speed(busy: int) -> float:
            number = max(busy * ranks // places, known[0])  # fewer ranks are assumed to be as fast
            above = next(other for other in known if other >= number)
            below = max((other for other in known if other <= number), default=above)
            # Between measured numbers, ranks share caches and memory bandwidth gradually. A
            # straight line adds no constant to the measurements.
            part = (number - below) / (above - below) if above > below else 0.0
            return (together[below] + part * (together[above] - together[below])) / number

        return speed, ()


def _layer_seconds(pace: Pace, work: ModelWork) -> float:
    """Return the seconds of the operators of the first layer, which represents all."""
    # Only the ratio of two paces is used, which layers of one model share.
    layer = work.layers[0]
    forward = operators_seconds(pace, layer.forward, Hook.FORWARD_OPERATOR)
    return forward + operators_seconds(pace, layer.backward, Hook.BACKWARD_OPERATOR)


def machine_of(spec: Spec, plan: Plan, facts: ModelFacts) -> Machine:
    """Return the machine of a spec's cluster.

    Args:
        spec: A resolved spec with a cluster.
        plan: The plan of the spec.
        facts: The facts of the full model.

    Raises:
        UnknownRate: A rate of the cluster is missing, or the model's operators are unknown.
    """
    if (pace := pace_of(spec.cluster, spec.world_size)) is None:
        raise UnknownRate(missing_rates_reason(spec.cluster, spec.world_size))
    if why := why_unknown(spec, plan, facts):
        raise UnknownRate(why)
    work = partial(_require_work, spec, plan, facts)
    fewer = partial(pace_while_others_wait, spec.cluster, spec.world_size)
    return Machine(pace=pace, work=work, fewer=fewer)


def _require_work(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> ModelWork:
    work = model_work(spec, plan, facts, index)
    assert work is not None, "nobody says why it is not known"
    return work
