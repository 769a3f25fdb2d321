"""What a step is timed with: the pace of a cluster's devices, and the work of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.cost import StepTime
from ptrain.derivation.clock import Clock, LaneSpan
from ptrain.derivation.computing import Timing, block_names
from ptrain.derivation.interconnect import Network
from ptrain.derivation.work import model_work, why_unknown
from ptrain.facts.model import ModelFacts, ModelWork
from ptrain.rates.measured import lacking, pace_of, pace_while_others_wait
from ptrain.rates.pace import Pace, UnknownRate, operators_seconds
from ptrain.spec.placement import Axis
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

if TYPE_CHECKING:
    from ptrain.derivation.pipeline_time import PipelineTiming

_NOBODY = (
    "waiting ranks are assumed to leave their cores idle: the cluster has no rates for "
    "fewer active ranks"
)


class Machine(NamedTuple):
    """The `pace` of a rank, and the `work` of a micro-batch of the whole model by its place along
    tp. `plays_all`: every block by itself, whatever stands for it else. `fewer` is the pace while
    so many ranks of the job compute at once and the others wait, if it is known. `spans` is filled
    with what the step does when."""

    pace: Pace
    work: Callable[[int], ModelWork]
    plays_all: bool = False
    fewer: Callable[[int], Pace | None] = lambda ranks: None
    spans: list[LaneSpan] | None = None

    def of_part(self, spec: Spec, plan: Plan, index: int) -> Timing:
        """Return what times the ranks at a place along tp."""
        clock = self._clock(spec, plan)
        clock.spans = self.spans if index == 0 else None
        return Timing(clock=clock, work=self.work(index), plays_all=self.plays_all)

    def of_pipeline(
        self, spec: Spec, plan: Plan, facts: ModelFacts, schedule: Schedule
    ) -> PipelineTiming:
        """Return what times the ranks of a pipeline."""
        from ptrain.derivation import pipeline, pipeline_time

        work = cache(self.work)  # of the few places along tp that are played
        speed, assumed = (None, ()) if self.pace.overlaps else self._sharing(spec, work(0))
        return pipeline_time.PipelineTiming(
            spec=spec,
            clock=self._clock(spec, plan),
            work=work,
            blocks=block_names(facts.blocks, work(0)),
            schedule=schedule,
            message=pipeline.message_bytes(spec, plan, chain_of(spec, facts)),
            speed=speed,
            assumed=assumed,
            spans=self.spans,
        )

    def _sharing(
        self, spec: Spec, work: ModelWork
    ) -> tuple[Callable[[int], float], tuple[str, ...]]:
        """Return how much faster ranks are while those of so many places along pp compute alone,
        and what is assumed where that is not known. Between numbers of ranks that are known what
        all do together is a straight line."""
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
            number = max(busy * ranks // places, known[0])  # fewer are no faster, for all we know
            above = next(other for other in known if other >= number)
            below = max((other for other in known if other <= number), default=above)
            part = (number - below) / (above - below) if above > below else 0.0
            return (together[below] + part * (together[above] - together[below])) / number

        return speed, ()

    def _clock(self, spec: Spec, plan: Plan) -> Clock:
        return Clock(self.pace, Network(spec), plan.tensor.axis if plan.tensor else None)


def _layer_seconds(pace: Pace, work: ModelWork) -> float:
    """Return what a layer's operators take, the first one's for all."""
    layer = work.layers[0]
    forward = operators_seconds(pace, layer.forward, Hook.FORWARD_OPERATOR)
    return forward + operators_seconds(pace, layer.backward, Hook.BACKWARD_OPERATOR)


def machine_of(spec: Spec, plan: Plan, facts: ModelFacts) -> Machine:
    """Return that of a spec's cluster. Raises UnknownRate with what is missing."""
    if (pace := pace_of(spec.cluster, spec.world_size)) is None:
        raise UnknownRate(lacking(spec.cluster, spec.world_size))
    if why := why_unknown(spec, plan, facts):
        raise UnknownRate(why)
    work = partial(_work, spec, plan, facts)
    fewer = partial(pace_while_others_wait, spec.cluster, spec.world_size)
    return Machine(pace=pace, work=work, fewer=fewer)


def _work(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> ModelWork:
    work = model_work(spec, plan, facts, index)
    assert work is not None, "nobody says why it is not known"
    return work


def slowest(times: Iterable[StepTime | None]) -> StepTime | None:
    """Return the longest; None where one is not known."""
    known = list(times)
    steps = [time for time in known if time is not None]
    return max(steps, key=lambda time: time.seconds) if len(steps) == len(known) else None
