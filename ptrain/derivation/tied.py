"""Gradients of tensors that the first and the last stage both have, summed over the two."""

from __future__ import annotations

from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.facts.stages import Stage

_ENDS = 2  # ranks: the first stage's and the last one's

Rows = tuple[Traffic, ...]


def tied_sums(ghost: Wrapping, stage: Stage) -> tuple[Rows, ...]:
    """Return the calls of a rank with this part of a stage for shared tensors: one for each, of its
    gradient as it is kept between reduction and update. There is a row of them for each shard where
    their slices differ in size, else one for all; `ghost` wraps one rank's part of tp."""
    plan, part = ghost.wrapped.plan, ghost.wrapped.facts
    step = plan.pipeline
    assert step is not None
    if not stage.shared or step.rank_of[0] == step.rank_of[-1]:
        return ((),)
    units = [unit for unit in part.units if {t.name for t in unit.trained} & {*stage.shared}]
    if not units:  # what is frozen has no gradient
        return ((),)
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    group, itemsize = Group((step.axis,), _ENDS), plan.update.layout.gradients.itemsize
    sums = tuple(
        tuple(calls.over(group, numel * itemsize) for numel in numels)
        for numels in zip(*map(ghost.kept_gradients, units), strict=True)
    )
    return sums if len(set(sums)) > 1 else sums[:1]
