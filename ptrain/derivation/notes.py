"""Explains differences between the columns `exact` and `paper`: a sentence for each effect that no
theorem covers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ptrain.axes.data.cost import count_reductions
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.axes.pipeline.stage_facts import stage_gathers
from ptrain.axes.tensor.cost import cut_dims
from ptrain.cost import Collective, Phase, Traffic
from ptrain.derivation.ghosts.table import wrapping
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.paper import itemsizes
from ptrain.facts.model import ModelFacts
from ptrain.facts.stages import Stage, is_within
from ptrain.optimizers.update import moment_names, rule_of
from ptrain.spec.dials import GradientSync
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.units import format_bytes


def notes(
    ghost: Wrapping, facts: ModelFacts, traffic: Iterable[Traffic], schedule: Schedule
) -> Iterator[str]:
    """Yield the sentences for a spec.

    Args:
        ghost: The wrapping of the full model or of a rank's part of it.
        facts: The full model.
        traffic: The traffic of the `exact` column.
        schedule: The pipeline schedule.
    """
    spec, plan = ghost.wrapped.spec, ghost.wrapped.plan
    if plan.pipeline is not None:
        yield from _stage_notes(plan, facts, schedule)
        return
    is_whole = ghost.wrapped.facts is facts
    yield from (ghost if is_whole else wrapping(spec, plan, facts)).notes()
    yield from _replicated_notes(plan, facts, sum(itemsizes(spec).values()))
    yield from _moment_notes(spec, plan, facts)
    yield from _copy_notes(traffic)


def _replicated_notes(plan: Plan, facts: ModelFacts, per_element: int) -> Iterator[str]:
    """Yield a note on parameters that tp replicates, although Theorem 1 divides all of |Θ|, |Ω| and
    |G|."""
    if (step := plan.tensor) is None:
        return
    cut = cut_dims(step, ((tensor.name, tensor.shape) for tensor in facts.tensors))
    apart = plan.experts.modules if plan.experts and plan.experts.folded else ()
    own = (tensor for tensor in facts.tensors if not is_within(tensor.name, apart))
    whole = sum(tensor.numel for tensor in own if tensor.name not in cut)
    if whole:
        yield (
            f"{whole:,} of {facts.numel:,} parameters belong to no sharded operator and are "
            f"replicated over {step.axis}: {format_bytes(whole * per_element)} of Θ, Ω and G "
            "before data-parallel sharding, of which the theorem counts one shard"
        )


def _moment_notes(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Yield a note if the optimizer keeps fewer moments for some tensors than the theorems' |Ω|
    counts."""
    if spec.optimizer.properties.is_elementwise:
        return
    layout = plan.update.layout
    usual, fewer = (
        len(moment_names(rule_of(spec.optimizer, hidden), spec.optimizer))
        for hidden in (False, True)
    )
    hidden = sum(
        tensor.numel for unit in facts.units for tensor in unit.tensors if unit.is_hidden(tensor)
    )
    if hidden:
        size = hidden * (usual - fewer) * layout.moments.itemsize
        yield (
            f"{spec.optimizer.name} stores {fewer} moment per element of block matrices "
            f"({hidden:,} of {facts.numel:,} elements), but |Ω| of the theorems has {usual} "
            f"per element: {format_bytes(size)} less in total"
        )


_COPIES = {
    Collective.HOST_TO_DEVICE: "to the device",
    Collective.DEVICE_TO_HOST: "to the host",
    Collective.FILE_READ: "read from files",
    Collective.FILE_WRITE: "written to files",
}


def _copy_notes(traffic: Iterable[Traffic]) -> Iterator[str]:
    """Yield a note on copies between memory tiers."""
    totals: dict[str, int] = {}
    for row in traffic:
        if row.key.collective in _COPIES and row.key.phase is not Phase.SETUP:
            words = _COPIES[row.key.collective]
            totals[words] = totals.get(words, 0) + row.payload_bytes
    if totals:
        copies = ", ".join(f"{format_bytes(size)} {words}" for words, size in totals.items())
        yield f"copies between memory tiers, which no theorem counts: {copies} per step and rank"


# Effects of a pipeline that no theorem covers.


def _stage_notes(plan: Plan, facts: ModelFacts, schedule: Schedule) -> Iterator[str]:
    stages = plan.stages
    yield from _unequal_notes(facts, stages, schedule)
    yield from _tied_notes(facts, stages)
    yield from _gather_notes(plan, schedule)
    yield from _reduction_notes(plan, stages, schedule)


def _unequal_notes(facts: ModelFacts, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Yield a note on unequal stages. Theorem 1 divides by pp, but a rank has full layers, and the
    first and last stages have more than layers."""
    held = [
        sum(stages[index].numel for index in schedule.stages_of(r)) for r in range(schedule.ranks)
    ]
    if len(set(held)) > 1:
        more = max(held) * schedule.ranks / facts.numel - 1
        yield (
            f"the ranks of pp have {' '.join(f'{numel:,}' for numel in held)} parameters: "
            f"the largest has {more:.1%} more than the equal shares of the theorem"
        )


def _tied_notes(facts: ModelFacts, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a note for each tensor that the first and the last stage share."""
    for name in stages[0].shared:
        tensor = next(tensor for tensor in facts.tensors if tensor.name == name)
        where = f"{name} is on the first and the last stage, {tensor.numel:,} parameters twice"
        summed = ", and the two sum its gradients"
        yield where if tensor.is_frozen else f"{where}{summed}"


def _gather_notes(plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Yield a note on how often a data axis all-gathers a unit, if it is not once."""
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
        counts = " or ".join(
            f"{ahead} times in forward and {back} times in backward" for ahead, back in times
        )
        yield (
            f"a step has {schedule.microbatches} micro-batches; with this `sync`, a unit is "
            f"all-gathered {counts}; with reshard_after_forward and reshard_after_backward "
            "both false, once"
        )


def _reduction_notes(plan: Plan, stages: Sequence[Stage], schedule: Schedule) -> Iterator[str]:
    """Yield a note on the cost of sharded gradients on a data axis. Theorem 2 has one reduction."""
    if (sync := plan.wrap.policy) is None or not plan.wrap.reduced_by_unit:
        return
    num = count_reductions(sync, schedule.microbatches)
    if sync.gradients is GradientSync.EVERY and num > 1:
        yield (
            f"gradients are reduced after each of {num} micro-batches, {num}r|G| of the "
            "stage; with sync.gradients=last, they are reduced once, and until then every "
            "rank holds the full gradients of its stages"
        )
    elif num != schedule.microbatches:
        itemsize = plan.update.layout.reduced.itemsize
        most = max(
            sum(stages[index].numel for index in schedule.stages_of(rank))
            for rank in range(schedule.ranks)
        )
        yield (
            "with sync.gradients=last, gradients are R until the last micro-batch is "
            "reduced: a rank holds the full sum for its stages, up to "
            f"{format_bytes(most * itemsize)}"
        )
