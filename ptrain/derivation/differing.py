"""Along which axes ranks differ in what they store."""

from __future__ import annotations

from ptrain.spec.axis import Axis
from ptrain.steps.step import Plan


def differing_axes(plan: Plan) -> tuple[Axis, ...]:
    """The axes along which ranks store different numbers of bytes, or, of flat units within tp,
    have other pieces of tensors in their shards, of each of which there is a norm."""
    return plan.wrap.differing_axes(within_tp=within_tp(plan))


def within_tp(plan: Plan) -> bool:
    """Return whether the norm is computed apart for operators that are cut and for others."""
    return plan.clip is not None and bool(plan.clip.operator_axes)
