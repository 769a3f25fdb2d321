"""What a rank of ep has of a model: of a layer's experts some, of all else everything."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ptrain.facts.model import ModelFacts, TensorFacts
from ptrain.steps.experts import ExpertParallel


@lru_cache(maxsize=64)
def with_own_experts(facts: ModelFacts, step: ExpertParallel, ranks: int) -> ModelFacts:
    """Return the facts with the experts that one rank has, which is as many as any other: of their
    tensors an expert stands at every place of the first dimension."""

    def own(tensor: TensorFacts) -> TensorFacts:
        experts, *rest = tensor.shape
        assert experts % ranks == 0, "a rule: ranks have as many"
        return replace(tensor, shape=(experts // ranks, *rest), cut_over=step.axes)

    units = tuple(
        replace(unit, tensors=tuple(map(own, unit.tensors))) if step.has(unit.modules) else unit
        for unit in facts.units
    )
    return replace(facts, units=units)
