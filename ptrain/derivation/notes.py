"""Why `exact` is not `paper`: one sentence for each thing that runs and that no theorem counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import gathers, reductions
from ptrain.axes.tensor.costs import cut_dims
from ptrain.costs import Collective, Phase, Traffic
from ptrain.derivation.flat_rows import flat_buffers
from ptrain.derivation.memory import elements
from ptrain.derivation.optimizer_state import is_hidden, kept_tensors, needs_whole_tensors
from ptrain.derivation.paper import itemsizes
from ptrain.facts.model import ModelFacts
from ptrain.spec.axis import Axis
from ptrain.spec.batch import GradientSync, Reshard, SyncPolicy
from ptrain.spec.spec import Spec
from ptrain.steps.step import FlatUnits, FullyShard, Plan, Replicate
from ptrain.units import format_bytes


def notes(spec: Spec, plan: Plan, facts: ModelFacts, traffic: Iterable[Traffic]) -> Iterator[str]:
    """`traffic` is the `exact` column's."""
    wrap = plan.wrap
    match wrap:
        case Replicate():
            yield from _spread_update(wrap)
        case FullyShard():
            yield from _accumulation(plan, facts, wrap.shard_axes, wrap.shard_axes)
            yield from _smaller_groups(spec, wrap)
            yield from _kept_root(plan, facts, wrap.sync)
            yield from _cut_by_rows(spec, plan, facts, wrap)
        case FlatUnits():
            yield from _accumulation(plan, facts, wrap.parameters, wrap.gradients)
            yield from _kept_root(plan, facts, wrap.sync)
            yield from _update(wrap)
            yield from _padded(spec, facts, wrap)
    yield from _whole_beside_slices(plan, facts, sum(itemsizes(spec).values()))
    yield from _fewer_moments(spec, plan, facts)
    yield from _copies(traffic)


def _whole_beside_slices(plan: Plan, facts: ModelFacts, per_element: int) -> Iterator[str]:
    """What tp leaves whole, where Theorem 1 divides all of |Θ|, |Ω| and |G|."""
    step = plan.tensor
    if step is None:
        return
    cut = cut_dims(step, ((tensor.name, tensor.shape) for tensor in facts.tensors))
    whole = sum(tensor.numel for tensor in facts.tensors if tensor.name not in cut)
    if whole:
        yield (
            f"{whole:,} of {facts.numel:,} parameters belong to no operator that is cut, and every "
            f"rank of {step.axis} has them whole: {format_bytes(whole * per_element)} of Θ, Ω and "
            "G before the data axes divide them, of which the theorem counts a slice"
        )


def _fewer_moments(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Where an optimizer keeps less of some tensors than the theorems' |Ω| has of each element."""
    if not needs_whole_tensors(spec.optimizer):
        return
    layout = plan.update.layout
    usual, fewer = (
        sum(not kept.is_scalar for kept in kept_tensors(spec.optimizer, layout, is_hidden=hidden))
        for hidden in (False, True)
    )
    hidden = sum(
        tensor.numel for unit in facts.units for tensor in unit.tensors if is_hidden(unit, tensor)
    )
    if hidden:
        size = hidden * (usual - fewer) * layout.moments.itemsize
        yield (
            f"{spec.optimizer.name} keeps {fewer} moment of each matrix of the blocks, "
            f"{hidden:,} of {facts.numel:,} elements, and the theorems' |Ω| counts {usual} of "
            f"every element: {format_bytes(size)} less in all"
        )


def _spread_update(wrap: Replicate) -> Iterator[str]:
    if wrap.zero_redundancy:
        axes = " and ".join(wrap.axes)
        yield (
            "torch's ZeroRedundancyOptimizer leaves the gradients to DistributedDataParallel, "
            "which sums them whole on every rank, 2r|G|, and its owners broadcast what they "
            f"updated, r|Θ|: 3 units on {axes}. The same tuple on dp_shard reduces to shards and "
            "gathers the updated ones: 2 units"
        )


def _accumulation(
    plan: Plan, facts: ModelFacts, gathered: tuple[Axis, ...], reduced: tuple[Axis, ...]
) -> Iterator[str]:
    """The factor per kind of call, where a step's micro-batches repeat what Theorem 2 has once."""
    num_micro = plan.accumulate.micro_batches
    if num_micro == 1 or not isinstance(plan.wrap, FlatUnits | FullyShard):
        return
    sync = plan.wrap.sync
    times = gathers(sync, num_micro)
    factors = []
    if gathered:
        factors += [f"all_gather forward {times.forward}×", f"backward {times.backward}×"]
    if reduced:
        factors.append(f"reduction of gradients {reductions(sync, num_micro)}×")
    if factors:
        yield (
            f"{num_micro} micro-batches make a step, and the paper's step has one; by `sync` a "
            f"unit moves: {', '.join(factors)}"
        )
    if reduced and sync.gradients is GradientSync.LAST:
        size = facts.numel * plan.update.layout.reduced.itemsize
        yield (
            "sync.gradients: last makes gradients R until the last micro-batch is reduced: each "
            f"rank holds the unsharded sum of its own, {format_bytes(size)}, however many ranks "
            "there are"
        )


def _smaller_groups(spec: Spec, wrap: FullyShard) -> Iterator[str]:
    shards = wrap.sync.after_forward(is_root=False)
    if not isinstance(shards, bool):
        yield (
            f"between its forward and its backward a unit is kept in {shards} shards instead of "
            f"{ranks_over(spec, wrap.shard_axes)}: backward gathers it over {shards} ranks and "
            f"sends {shards - 1}/{shards} of it"
        )


def _kept_root(plan: Plan, facts: ModelFacts, sync: SyncPolicy) -> Iterator[str]:
    if sync.reshard_after_forward is Reshard.NON_ROOT:
        times = gathers(sync, plan.accumulate.micro_batches, is_root=True)
        root = sum(unit.numel for unit in facts.units if unit.is_root)
        yield (
            f"the root, {root:,} of {facts.numel:,} parameters, stays gathered between its forward "
            f"and its backward: it comes {times.forward}× forward, {times.backward}× backward"
        )


def _cut_by_rows(spec: Spec, plan: Plan, facts: ModelFacts, wrap: FullyShard) -> Iterator[str]:
    ranks = ranks_over(spec, wrap.shard_axes)
    padded = ranks * elements(spec, plan, facts, 0).parameters
    if padded > facts.numel:
        yield (
            f"each tensor is cut by rows, ceil(d0 / {ranks}) on every rank: "
            f"{padded / facts.numel - 1:.2%} more than the model has"
        )


def _update(wrap: FlatUnits) -> Iterator[str]:
    axes = [axis for axis in wrap.updated if axis not in wrap.parameters]
    if axes:
        yield (
            f"parameters are whole and the optimizer is a shard on {', '.join(axes)}: each rank "
            "updates its part, so the updated parameters must be gathered, r|Θ| that Theorem 2 "
            "as printed leaves out"
        )
    if wrap.consumed:
        yield (
            "gradients are M: a unit is reduced and updated as soon as its gradients are "
            "complete, so that no more than one unit's live at once"
        )
    late = [axis for axis in wrap.updated if axis not in wrap.gradients]
    if late and not wrap.consumed:
        yield (
            f"gradients are R and the optimizer is a shard on {', '.join(late)}: a reduce-scatter "
            "before the update replaces the all-reduce, r|G| instead of 2r|G|; gradients keep "
            "their full size, and only the rank's own part of them holds the sum"
        )
    whole = [axis for axis in wrap.optimizer if axis not in wrap.updated]
    if whole:
        yield (
            f"optimizer state is gathered over {', '.join(whole)} for the update, r|Ω| unit by "
            "unit, and every rank there computes the same whole update"
        )
    wider = [axis for axis in wrap.gradients if axis not in wrap.updated]
    if wider:
        yield (
            f"gradients are shards on {', '.join(wider)} and the update takes them whole there: "
            "they are gathered for it, r|G|"
        )


def _padded(spec: Spec, facts: ModelFacts, wrap: FlatUnits) -> Iterator[str]:
    padded = sum(size * times for size, times in flat_buffers(spec, wrap, facts).items())
    if more := padded - facts.numel:
        elements_more = f"{more} element{'' if more == 1 else 's'} more"
        yield f"flat units are padded: {elements_more} than the model has"


_COPIES = {
    Collective.HOST_TO_DEVICE: "to the device",
    Collective.DEVICE_TO_HOST: "to the host",
    Collective.FILE_READ: "read from files",
    Collective.FILE_WRITE: "written to files",
}


def _copies(traffic: Iterable[Traffic]) -> Iterator[str]:
    totals: dict[str, int] = {}
    for row in traffic:
        if row.key.collective in _COPIES and row.key.phase is not Phase.SETUP:
            words = _COPIES[row.key.collective]
            totals[words] = totals.get(words, 0) + row.payload_bytes
    if totals:
        told = ", ".join(f"{format_bytes(size)} {words}" for words, size in totals.items())
        yield f"a rank copies between its tiers, which no theorem counts: {told} in a step"
