"""Gradients of tensors that the first and the last stage both have, summed over the two."""

from __future__ import annotations

from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.ghosts.table import wrapping
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Stage
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

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
    kept_gradients = wrapping(spec, plan, part).kept_gradients
    sums = tuple(
        tuple(calls.over(group, numel * itemsize) for numel in numels)
        for numels in zip(*map(kept_gradients, units), strict=True)
    )
    return sums if len(set(sums)) > 1 else sums[:1]
