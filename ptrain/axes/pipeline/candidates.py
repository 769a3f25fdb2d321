"""What the pipeline axis offers to a search: as many stages as there are layers for, every
schedule, and where one takes any number of stages a rank, two and four too."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.candidates import AxisChoice, AxisSpace, Written, divisors
from ptrain.axes.pipeline.catalogue import takes_any_stages
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import PipelineSpec, ScheduleName
from ptrain.spec.placement import Axis, Factor, Placement, R, S
from ptrain.spec.spec import Spec

_PLACEMENT = Placement(parameters=S, optimizer=S, gradients=S, activations=R)
_MORE_STAGES = (2, 4)  # a rank


def _sizes(spec: Spec, devices: int, written: Written) -> Iterator[int]:
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    yield from (degree for degree in divisors(devices) if degree <= layers)


def _choices(spec: Spec, ranks: int, written: Written) -> Iterator[AxisChoice]:
    if ranks == 1:
        yield AxisChoice(changes=(("pipeline", PipelineSpec()),))
        return
    layers = spec.model.layers if isinstance(spec.model, ModelShape) else 1
    offered = (
        ((_PLACEMENT,), (("pipeline", pipeline),))
        for schedule in ScheduleName
        for pipeline in _with_stages(schedule, ranks)
    )
    for (placement,), changes in written.held((Axis.PP,), offered):
        stages = dict(changes)["pipeline"].stages_over(ranks)
        if stages <= layers and stages % ranks == 0:
            factor = Factor(axis=Axis.PP, degree=ranks, placement=placement)
            yield AxisChoice(factors=(factor,), changes=changes)


def _with_stages(schedule: ScheduleName, ranks: int) -> Iterator[PipelineSpec]:
    """The schedule as it is by itself, and with more stages a rank than that."""
    plain = PipelineSpec(schedule=schedule)
    yield plain
    if takes_any_stages(schedule):
        yield from (
            PipelineSpec(schedule=schedule, stages=number * ranks)
            for number in _MORE_STAGES
            if number * ranks > plain.stages_over(ranks)
        )


SPACE = AxisSpace(axes=(Axis.PP,), sizes=_sizes, choices=_choices, tuples={Axis.PP: (_PLACEMENT,)})
