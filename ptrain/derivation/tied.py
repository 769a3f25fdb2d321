"""Gradients of tensors that the first and the last stage both have, summed over the two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import local_rows
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.flat_rows import flat_buffers
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts
from ptrain.facts.stages import Stage
from ptrain.spec.spec import Spec
from ptrain.steps.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate

_ENDS = 2  # ranks: the first stage's and the last one's

Rows = tuple[Traffic, ...]


def tied_sums(spec: Spec, plan: Plan, part: ModelFacts, stage: Stage) -> tuple[Rows, ...]:
    """What a rank with this part of a stage sends for it: one call for each shared tensor, of its
    gradient as it is kept between reduction and update. Of each shard where their slices differ in
    size, else one for all; `part` is one rank's of tp."""
    step = plan.pipeline
    assert step is not None
    if not stage.shared or step.rank_of[0] == step.rank_of[-1]:
        return ((),)
    units = [unit for unit in part.units if {t.name for t in unit.tensors} & {*stage.shared}]
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    group, itemsize = Group((step.axis,), _ENDS), plan.update.layout.gradients.itemsize
    found = tuple(
        tuple(calls.over(group, numel * itemsize) for numel in numels)
        for numels in zip(*(_kept(spec, plan, part, unit) for unit in units), strict=True)
    )
    return found if len(set(found)) > 1 else found[:1]


def _kept(spec: Spec, plan: Plan, part: ModelFacts, unit: UnitFacts) -> Iterator[int]:
    """Elements of a unit's gradients on each shard of it; one number where all have as many."""
    match plan.wrap:
        case LocalGradients() | Replicate():
            yield unit.numel
        case FullyShard() as wrap:
            ranks = ranks_over(spec, wrap.shard_axes)
            for index in range(ranks):
                yield sum(_rows_of(each, ranks, index) for each in unit.tensors)
        case FlatUnits() as wrap:
            buffers = flat_buffers(spec, wrap, _alone(part, unit)).elements()
            kept = (*wrap.updated, *wrap.gathered_gradients)
            yield sum(buffers) // ranks_over(spec, kept)
        case wrap:
            assert_never(wrap)


def _rows_of(tensor: TensorFacts, ranks: int, index: int) -> int:
    return local_rows(tensor.shape, ranks, index)


def _alone(part: ModelFacts, unit: UnitFacts) -> ModelFacts:
    return ModelFacts(units=(unit,), buffers=part.buffers)
