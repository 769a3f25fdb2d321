"""Other products over the same mesh: what a search over placements goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ptrain.algebra.legality import check, executed
from ptrain.axes.data.rules import executed_tuples
from ptrain.costs import PLACED
from ptrain.spec.axis import DATA_AXES, Factor
from ptrain.spec.batch import GradientSync, SyncPolicy
from ptrain.spec.placement import R
from ptrain.spec.spec import Spec


def variants(spec: Spec) -> Iterator[Spec]:
    """Every legal spec that runs and differs from `spec` only in its tuples on the data axes, and
    in when gradients are reduced where the new tuples leave no choice."""
    for factors in product(*(tuple(_placements(factor)) for factor in spec.factors)):
        other = replace(spec, factors=factors, sync=_sync(spec, factors))
        if factors != spec.factors and not check(other) and not executed(other):
            yield other


def overrides(spec: Spec, other: Spec) -> tuple[str, ...]:
    """The dotlist that turns `spec` into `other`, one of its variants."""
    changed = tuple(
        f"placement.{after.axis}={{{', '.join(f'{s}: {after.placement[s]}' for s in PLACED)}}}"
        for before, after in zip(spec.factors, other.factors, strict=True)
        if before.placement != after.placement
    )
    if spec.sync == other.sync:
        return changed
    return (*changed, f"sync.gradients={other.sync.gradients}")


def _placements(factor: Factor) -> Iterator[Factor]:
    if factor.axis not in DATA_AXES:
        yield factor
        return
    for placement in executed_tuples():
        yield replace(factor, placement=placement)


def _sync(spec: Spec, factors: tuple[Factor, ...]) -> SyncPolicy:
    """Gradients that are R on every data axis can only be reduced after the last micro-batch."""
    data = [factor for factor in factors if factor.axis in DATA_AXES]
    if any(factor.placement.gradients != R for factor in data):
        return spec.sync
    return replace(spec.sync, gradients=GradientSync.LAST)
