"""Resident bytes of flat units."""

from __future__ import annotations

from collections import Counter

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import padded_flat
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.optimizer_state import Elements
from ptrain.plan.step import FlatUnits
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec


def flat_elements(spec: Spec, wrap: FlatUnits, facts: ModelFacts) -> Elements:
    """One padded buffer per unit, cut alike for all ranks."""
    buffers = flat_buffers(spec, wrap, facts)
    total = sum(times * padded for padded, times in buffers.items())
    return Elements(
        parameters=total // ranks_over(spec, wrap.parameters),
        gradients=total // ranks_over(spec, wrap.gradients),
        updated=total // ranks_over(spec, wrap.optimizer),
        tensors=sum(buffers.values()),
    )


def flat_buffers(spec: Spec, wrap: FlatUnits, facts: ModelFacts) -> Counter[int]:
    """Elements of the units' flat buffers, padded for all the axes that cut any state."""
    ranks = ranks_over(spec, cut_axes(wrap))
    return Counter(padded_flat(unit.numel, ranks) for unit in facts.units if unit.numel)


def cut_axes(wrap: FlatUnits) -> tuple[Axis, ...]:
    """The axes along which any state is a shard, in mesh order."""
    cut = {*wrap.parameters, *wrap.optimizer, *wrap.gradients}
    return tuple(axis for axis in wrap.axes if axis in cut)
