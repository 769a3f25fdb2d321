"""The inputs of step timing: the pace of a cluster's devices, and the work of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.derivation.clock import Clock, LaneSpan
from ptrain.derivation.computing import block_names
from ptrain.derivation.interconnect import Network
from ptrain.derivation.pipeline import message_bytes
from ptrain.derivation.pipeline_time import StepTiming
from ptrain.derivation.work import model_work, why_unknown
from ptrain.facts.model import ModelFacts, ModelWork
from ptrain.rates.measured import missing_rates_reason, pace_of, pace_while_others_wait
from ptrain.rates.pace import Pace, UnknownRate, operators_seconds
from ptrain.spec.placement import Axis
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

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
        """Return the timing of a step."""
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
            part = (number - below) / (above - below) if above > below else 0.0
            return (together[below] + part * (together[above] - together[below])) / number

        return speed, ()


def _layer_seconds(pace: Pace, work: ModelWork) -> float:
    """Return the seconds of the operators of the first layer, which represents all."""
    layer = work.layers[0]
    forward = operators_seconds(pace, layer.forward, Hook.FORWARD_OPERATOR)
    return forward + operators_seconds(pace, layer.backward, Hook.BACKWARD_OPERATOR)


def machine_of(spec: Spec, plan: Plan, facts: ModelFacts) -> Machine:
    """Return the machine of a spec's cluster. Raises UnknownRate with the missing rate."""
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
