"""What a pipeline has and no theorem counts: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ptrain.axes.data.cost import reductions
from ptrain.axes.pipeline.gathers import stage_gathers
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Stage
from ptrain.spec.dials import GradientSync
from ptrain.steps.step import Plan
from ptrain.units import format_bytes


def pipeline_notes(plan: Plan, facts: ModelFacts, schedule: Schedule) -> Iterator[str]:
    """A sentence for each thing that the stages of a model have and no theorem counts."""
    stages = plan.stages
    yield from _unequal(facts, stages, schedule)
    yield from _tied(facts, stages)
    yield from _gathered(plan, schedule)
    yield from _reduced(plan, stages, schedule)


def _unequal(facts: ModelFacts, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Theorem 1 divides by pp; a rank has whole layers, and the ends more than layers."""
    held = [
        sum(stages[index].numel for index in schedule.stages_of(r)) for r in range(schedule.ranks)
    ]
    if len(set(held)) > 1:
        most = max(held)
        more = most * schedule.ranks / facts.numel - 1
        yield (
            f"the ranks of pp have {' '.join(f'{numel:,}' for numel in held)} parameters: the "
            f"fullest {more:.1%} more than the equal parts of the theorem"
        )


def _tied(facts: ModelFacts, stages: Sequence[Stage]) -> Iterator[str]:
    for name in stages[0].shared:
        tensor = next(tensor for tensor in facts.tensors if tensor.name == name)
        where = f"{name} is on the first stage and on the last, {tensor.numel:,} parameters twice"
        summed = ", and its gradients are summed over the two"
        yield where if tensor.is_frozen else f"{where}{summed}"


def _gathered(plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Say how often a data axis gathers parameters by unit, where that is not once."""
    sync = plan.wrap.policy
    if sync is None or not plan.wrap.gathered_by_unit:
        return
    times = {
        (gathers.forward, gathers.backward)
        for gathers in (
            stage_gathers(schedule, stage, sync, is_root=is_root)
            for stage, is_root in product(range(schedule.stages), (False, True))
        )
    }
    if times != {(1, 0)}:
        counts = " or ".join(f"{ahead} times forward, {back} backward" for ahead, back in times)
        yield (
            f"{schedule.microbatches} micro-batches make a step, and by `sync` a unit is gathered "
            f"{counts}; with both reshard_after_forward and reshard_after_backward false, once"
        )


def _reduced(plan: Plan, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Say what slices of gradients on a data axis cost: Theorem 2 has one reduction."""
    sync = plan.wrap.policy
    if sync is None or not plan.wrap.reduced_by_unit:
        return
    num = reductions(sync, schedule.microbatches)
    if sync.gradients is GradientSync.EVERY and num > 1:
        yield (
            f"gradients are slices after each of {num} micro-batches: a reduction of each, "
            f"{num}r|G| of the stage; with sync.gradients: last, one, and until then every rank "
            "holds the whole gradients of its stages"
        )
    elif num != schedule.microbatches:
        itemsize = plan.update.layout.reduced.itemsize
        most = max(
            sum(stages[index].numel for index in schedule.stages_of(rank))
            for rank in range(schedule.ranks)
        )
        yield (
            "sync.gradients: last makes gradients R until the last micro-batch is reduced: a rank "
            f"holds the whole sum of its stages' own, up to {format_bytes(most * itemsize)}"
        )
