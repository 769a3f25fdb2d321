"""The pipeline of a spec: the number of stages of a rank, and the layers of a stage.

To balance stages by time, a device only multiplies matrices, at one rate. A matrix of n elements
costs a token 2n operations forward and 4n backward (the gradients of its input and of itself). The
scores of attention cost 4TH forward and 8TH backward for T tokens of width H, as in Chowdhery et
al. 2022 (PaLM), appendix B, although a causal kernel may do half. Embedding look-ups, norms, other
memory-bound operators and communication are free. A tied head multiplies like a separate one. Only
the matrices are known of a model that is not built in, not the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from ptrain.axes.pipeline.schedule import PipelineShape
from ptrain.facts.parameters import elements_met
from ptrain.facts.stages import Layers, Stage, Tensor, balanced, cut, evenly
from ptrain.spec.axis import Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.pipeline import SplitBy
from ptrain.spec.spec import Spec

_OF_A_MATRIX, _OF_SCORES = 2 + 4, 4 + 8
_MATRICES = (2, 3)  # dimensions of a matrix, and of the matrices of all experts


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
            weights, ends = count_operations(spec, model)
            counts = balanced(weights, stages, ends)
        case SplitBy.LAYERS:
            counts = evenly(len(model.layers), stages)
        case tuple() as counts:
            pass
        case split:
            assert_never(split)
    return cut(model, counts)


def count_operations(spec: Spec, model: Layers) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Count the operations of one token: of each layer; before the first and after the last."""
    scores = 0
    if isinstance(spec.model, ModelShape):
        scores = _OF_SCORES * spec.batch.sequence * spec.model.hidden
    layers = tuple(_multiplying(spec, layer.tensors) + scores for layer in model.layers)
    tied = dict(model.tied)
    copies = [tensor for tensor in model.front if tensor.name in tied]
    return layers, (0, _multiplying(spec, (*copies, *model.behind)))


def _multiplying(spec: Spec, tensors: Iterable[Tensor]) -> int:
    shape = spec.model
    matrices = [tensor for tensor in tensors if len(tensor.shape) in _MATRICES]
    if not isinstance(shape, ModelShape):
        return sum(_OF_A_MATRIX * matrix.numel for matrix in matrices)
    return sum(_OF_A_MATRIX * elements_met(shape, matrix.name, matrix.numel) for matrix in matrices)
