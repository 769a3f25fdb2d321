"""Along which axes ranks differ in what they store."""

from __future__ import annotations

from ptrain.spec.axis import Axis
from ptrain.steps.step import FlatUnits, FullyShard, Plan, Replicate


def differing_axes(plan: Plan) -> tuple[Axis, ...]:
    """The axes along which ranks store different numbers of bytes, or, of flat units within tp,
    have other pieces of tensors in their shards, of each of which there is a norm."""
    match plan.wrap:
        case FullyShard(shard_axes=axes):
            return axes
        case Replicate(zero_redundancy=True, axes=axes):
            return axes
        case FlatUnits(updated=axes, gathered_gradients=gathered) if within_tp(plan):
            return (*axes, *gathered)
        case _:
            return ()


def within_tp(plan: Plan) -> bool:
    """Whether the norm is told apart by operators that are cut and others."""
    return plan.clip is not None and bool(plan.clip.operator_axes)
