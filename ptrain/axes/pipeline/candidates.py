"""What the pipeline axis offers to a search: as many stages as there are layers for, every
schedule, and where one takes any number of stages a rank, two and four too."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.candidates import AxisChoice, AxisSpace, divisors
from ptrain.axes.pipeline.catalogue import takes_any_stages
from ptrain.spec.axis import Axis, Factor
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import Placement, R, S
from ptrain.spec.spec import Spec

_PLACEMENT = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_MORE_STAGES = (2, 4)  # a rank


def _sizes(spec: Spec, devices: int) -> Iterator[int]:
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    yield from (degree for degree in divisors(devices) if degree <= layers)


def _choices(spec: Spec, ranks: int) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice(changes=(("pipeline", PipelineSpec()),))
        return
    factor = Factor(axis=Axis.PP, degree=ranks, placement=_PLACEMENT)
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    for schedule in ScheduleName:
        for pipeline in _with_stages(schedule, ranks):
            if pipeline.stages_over(ranks) <= layers:
                yield AxisChoice(factors=(factor,), changes=(("pipeline", pipeline),))


def _with_stages(schedule: ScheduleName, ranks: int) -> Iterator[PipelineSpec]:
    """The schedule as it is by itself, and with more stages a rank than that."""
    plain = PipelineSpec(schedule=schedule)
    yield plain
    if takes_any_stages(schedule):
        for number in _MORE_STAGES:
            if number * ranks > plain.stages_over(ranks):
                yield PipelineSpec(schedule=schedule, stages=number * ranks)


SPACE = AxisSpace(axes=(Axis.PP,), sizes=_sizes, choices=_choices)
