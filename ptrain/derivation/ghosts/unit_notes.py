"""Notes on what is gathered and reduced by unit, whoever does it."""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.data.cost import gathers, reductions
from ptrain.derivation.ghosts.wrapping import Wrapped
from ptrain.spec.dials import GradientSync, Reshard
from ptrain.units import format_bytes


def accumulation(wrapped: Wrapped) -> Iterator[str]:
    """Yield the factor per kind of call, where a step's micro-batches repeat what Theorem 2 has
    once."""
    plan, step = wrapped.plan, wrapped.plan.wrap
    num_micro, sync = plan.accumulate.micro_batches, step.policy
    if num_micro == 1 or sync is None:
        return
    times = gathers(sync, num_micro)
    factors = []
    if step.gathered_by_unit:
        factors += [f"all_gather forward {times.forward}×", f"backward {times.backward}×"]
    if step.reduced_by_unit:
        factors.append(f"reduction of gradients {reductions(sync, num_micro)}×")
    if factors:
        yield (
            f"{num_micro} micro-batches make a step, and the paper's step has one; by `sync` a "
            f"unit moves: {', '.join(factors)}"
        )
    if step.reduced_by_unit and sync.gradients is GradientSync.LAST:
        size = wrapped.facts.trained_numel * plan.update.layout.reduced.itemsize
        yield (
            "sync.gradients: last makes gradients R until the last micro-batch is reduced: each "
            f"rank holds the unsharded sum of its own, {format_bytes(size)}, however many ranks "
            "there are"
        )


def kept_root(wrapped: Wrapped) -> Iterator[str]:
    """Yield how often a root comes that stays gathered."""
    sync = wrapped.plan.wrap.policy
    if sync is not None and sync.reshard_after_forward is Reshard.NON_ROOT:
        times = gathers(sync, wrapped.plan.accumulate.micro_batches, is_root=True)
        root = sum(unit.numel for unit in wrapped.facts.units if unit.is_root)
        yield (
            f"the root, {root:,} of {wrapped.facts.numel:,} parameters, stays gathered between "
            f"its forward and its backward: it comes {times.forward}× forward, "
            f"{times.backward}× backward"
        )
