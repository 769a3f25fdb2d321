"""Resident bytes of flat units, by state and tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import padded_flat
from ptrain.costs import Footprint, State
from ptrain.derivation.optimizer_state import (
    Elements,
    Kept,
    is_hidden,
    kept_tensors,
    needs_whole_tensors,
)
from ptrain.facts.model import ModelFacts
from ptrain.plan.step import FlatUnits, Plan
from ptrain.spec.axis import Axis
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.spec import Spec

Sizes = Counter[Tier]


def flat_footprints(
    spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts
) -> Iterator[Footprint]:
    """Theta, Omega and G of rank 0, and so of every rank: flat buffers are cut alike for all."""
    for state, sizes in (
        (State.PARAMETERS, _parameters(spec, plan, wrap, facts)),
        (State.OPTIMIZER, _optimizer(spec, plan, wrap, facts)),
        (State.GRADIENTS, _gradients(spec, plan, wrap, facts)),
    ):
        yield Footprint(
            state=state,
            rank=0,
            device_bytes=sizes[Tier.DEVICE],
            host_bytes=sizes[Tier.HOST],
            file_bytes=sizes[Tier.FILE],
        )


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


def _parameters(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Sizes:
    """Nothing where Theta is made of master copies, which are Omega's."""
    if wrap.materialized:
        return Sizes()
    numel = flat_elements(spec, wrap, facts).parameters
    return Sizes({wrap.parameters_tier: numel * plan.update.layout.parameters.itemsize})


def _optimizer(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Sizes:
    layout = plan.update.layout
    if needs_whole_tensors(spec.optimizer):
        size = _by_tensor(spec, layout, wrap, facts)
    else:
        held = flat_elements(spec, wrap, facts)
        state = kept_tensors(spec.optimizer, layout)
        size = sum(_bytes(each, held.updated, held.tensors) for each in state)
        if layout.master is not None:
            size += held.updated * layout.master.itemsize
    return Sizes({wrap.optimizer_tier: size})


def _by_tensor(spec: Spec, layout: Layout, wrap: FlatUnits, facts: ModelFacts) -> int:
    """Each tensor's state is cut by itself; a master copy that Theta is made of is the unit's."""
    ranks = ranks_over(spec, wrap.optimizer)
    size = 0
    for unit in facts.units:
        for tensor in unit.tensors:
            state = kept_tensors(spec.optimizer, layout, is_hidden=is_hidden(unit, tensor))
            if layout.master is not None and not wrap.materialized:
                state = (*state, Kept(dtype=layout.master))
            numel = padded_flat(tensor.numel, ranks) // ranks
            size += sum(_bytes(each, numel, 1) for each in state)
    if wrap.materialized:
        size += flat_elements(spec, wrap, facts).parameters * layout.updated.itemsize
    return size


def _bytes(held: Kept, numel: int, tensors: int) -> int:
    return (tensors if held.is_scalar else numel) * held.dtype.itemsize


def _gradients(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Sizes:
    """At the end of the last backward pass."""
    if wrap.consumed:
        return Sizes()
    layout = plan.update.layout
    held = flat_elements(spec, wrap, facts)
    sizes = Sizes()
    if wrap.gradients:
        sizes[wrap.gradients_tier] += held.gradients * layout.gradients.itemsize
        sizes[Tier.DEVICE] += held.gradients * layout.reduced.itemsize * layout.keeps_both
        return sizes
    adds_up = layout.keeps_both or wrap.gradients_tier is not Tier.DEVICE
    reduced_early = wrap.overlaps and wrap.gradients_tier is Tier.DEVICE
    numel = held.gradients // ranks_over(spec, wrap.updated if reduced_early else ())
    dtype = layout.gradients if adds_up else layout.reduced
    sizes[wrap.gradients_tier] += numel * dtype.itemsize
    sizes[Tier.DEVICE] += held.gradients * layout.reduced.itemsize * layout.keeps_both
    return sizes
