"""Which pipeline a spec asks for: how many stages a rank has, and which layers a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ptrain.axes.pipeline.schedule import PipelineShape
from ptrain.axes.pipeline.times import times
from ptrain.facts.stages import Layers, Stage, balanced, cut, evenly
from ptrain.spec.axis import Axis
from ptrain.spec.pipeline import SplitBy
from ptrain.spec.spec import Spec


def pipeline_of(spec: Spec) -> PipelineShape | None:
    """Ranks, stages on each and micro-batches of a step; None without pp, or where the ranks do
    not divide the stages."""
    ranks = spec.degree(Axis.PP)
    stages = spec.pipeline.stages_over(ranks)
    if ranks == 1 or stages < ranks or stages % ranks:
        return None
    return PipelineShape(
        ranks=ranks, stages_per_rank=stages // ranks, microbatches=spec.batch.accumulate
    )


def stages_text(stages: Sequence[int]) -> str:
    """`stage 1`, `stages 0 and 3`."""
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def stages_of(spec: Spec, model: Layers) -> tuple[Stage, ...]:
    """The stages as `pipeline.split` says, first to last. Raises SpecError where the model has not
    as many layers."""
    stages = spec.pipeline.stages_over(spec.degree(Axis.PP))
    match spec.pipeline.split:
        case SplitBy.PARAMETERS:
            counts = balanced(model.weights, stages, model.ends)
        case SplitBy.TIME:
            weights, ends = times(spec, model)
            counts = balanced(weights, stages, ends)
        case SplitBy.LAYERS:
            counts = evenly(len(model.layers), stages)
        case tuple() as counts:
            pass
        case split:
            assert_never(split)
    return cut(model, counts)
