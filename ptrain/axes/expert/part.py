"""What a rank of ep has of a model: of a layer's experts some, of all else everything."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.steps.experts import ExpertParallel


@lru_cache(maxsize=64)
def with_own_experts(facts: ModelFacts, step: ExpertParallel, ranks: int) -> ModelFacts:
    """Return the facts with the experts that one rank has, which is as many as any other: of their
    tensors an expert stands at every place of the first dimension."""
    units = tuple(_own(unit, ranks) if step.has(unit.modules) else unit for unit in facts.units)
    return replace(facts, units=units)


def _own(unit: UnitFacts, ranks: int) -> UnitFacts:
    return replace(unit, tensors=tuple(_slice(tensor, ranks) for tensor in unit.tensors))


def _slice(tensor: TensorFacts, ranks: int) -> TensorFacts:
    experts, *rest = tensor.shape
    assert experts % ranks == 0, "ep divides the experts (axes.expert.rules)"
    return replace(tensor, shape=(experts // ranks, *rest), is_cut=True)
