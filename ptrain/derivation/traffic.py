"""Traffic of one steady step, call by call: the `exact` column of Theorem 2.

Theorem 2 as printed forgets that a rank which updates a part of what it stores must gather the
rest; here every collective that the plan's wrap issues is counted, with its padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import (
    bucket_caps,
    bucket_sizes,
    gathers,
    padded_rows,
    reductions,
)
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic, add_traffic
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.memory import flat_buffers
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate
from ptrain.spec.axis import Axis
from ptrain.spec.batch import ReduceScatterVia, SyncPolicy
from ptrain.spec.spec import Spec

_INDEX_BYTES = 4  # DDP broadcasts bucket indices as int32


def sent(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[Traffic, ...]:
    """What every rank sends: once (setup) and in each step."""
    match plan.wrap:
        case LocalGradients():
            rows: Iterator[Traffic] = iter(())
        case Replicate():
            rows = _replicated(spec, plan, plan.wrap, facts)
        case FullyShard():
            rows = _fully_sharded(spec, plan, plan.wrap, facts)
        case FlatUnits():
            rows = _flat(spec, plan, plan.wrap, facts)
        case _:
            assert_never(plan.wrap)
    return add_traffic((*rows, *_norm(spec, plan)))


def group_over(spec: Spec, axes: Sequence[Axis]) -> Group:
    """The group along `axes`."""
    return Group(tuple(axes), ranks_over(spec, axes))


def buckets(plan: Plan, wrap: Replicate, facts: ModelFacts) -> list[int]:
    """Bytes of the gradient buckets, in the order in which they are reduced."""
    itemsize = plan.update.layout.gradients.itemsize
    numel = {tensor.name: tensor.numel for tensor in facts.tensors}
    return bucket_sizes(
        (numel[name] * itemsize for name in facts.gradient_order),
        bucket_caps(wrap.bucket_bytes),
    )


def _replicated(spec: Spec, plan: Plan, wrap: Replicate, facts: ModelFacts) -> Iterator[Traffic]:
    group = group_over(spec, wrap.axes)
    sizes = buckets(plan, wrap, facts)
    for size, times in Counter(sizes).items():
        calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, times)
        yield calls.over(group, size)
    rebuild = Calls(Collective.BROADCAST, State.OTHER, Phase.SETUP)
    yield rebuild.over(group, _INDEX_BYTES * (len(facts.tensors) + 1))
    yield rebuild.over(group, _INDEX_BYTES * len(sizes))


def _fully_sharded(
    spec: Spec, plan: Plan, wrap: FullyShard, facts: ModelFacts
) -> Iterator[Traffic]:
    layout, num_micro = plan.update.layout, plan.accumulate.micro_batches
    shards, replicas = group_over(spec, wrap.shard_axes), group_over(spec, wrap.replicate_axes)
    for padded, times in shard_sizes(facts, shards.ranks).items():
        gathered = shards.ranks * padded * layout.parameters.itemsize
        yield from _gathers(wrap.sync, num_micro, times, shards, gathered)
        reduced = padded * layout.gradients.itemsize
        num = times * reductions(wrap.sync, num_micro)
        yield _reduce_scatter(wrap.reduce_scatter, Phase.BACKWARD, num).over(
            shards, shards.ranks * reduced
        )
        if wrap.replicate_axes:
            calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.BACKWARD, num)
            yield calls.over(replicas, reduced)


def shard_sizes(facts: ModelFacts, ranks: int) -> Counter[int]:
    """Elements of one rank's padded shard -> number of units that have it."""
    sizes: Counter[int] = Counter()
    units = Counter(tuple(tensor.shape for tensor in unit.tensors) for unit in facts.units)
    for shapes, times in units.items():
        if shapes:
            sizes[sum(padded_rows(shape, ranks) for shape in shapes)] += times
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatUnits:
    """`times` units whose flat buffers have equal sizes, in bytes of parameters and gradients."""

    spec: Spec
    wrap: FlatUnits
    times: int
    parameters: int
    gradients: int

    def group(self, axes: Iterable[Axis]) -> Group:
        """The group over `axes`, in mesh order."""
        wanted = set(axes)
        return group_over(self.spec, [axis for axis in self.wrap.axes if axis in wanted])

    def gradient_shard(self, *cuts: tuple[Axis, ...]) -> int:
        """Bytes of a gradient that is a shard along all of `cuts`."""
        return self.gradients // self.group(chain(*cuts)).ranks

    def parameter_shard(self, *cuts: tuple[Axis, ...]) -> int:
        """Bytes of a parameter that is a shard along all of `cuts`."""
        return self.parameters // self.group(chain(*cuts)).ranks


def _flat(spec: Spec, plan: Plan, wrap: FlatUnits, facts: ModelFacts) -> Iterator[Traffic]:
    layout = plan.update.layout
    for padded, times in flat_buffers(spec, wrap, facts).items():
        units = _FlatUnits(
            spec=spec,
            wrap=wrap,
            times=times,
            parameters=padded * layout.parameters.itemsize,
            gradients=padded * layout.gradients.itemsize,
        )
        yield from _flat_passes(units, plan.accumulate.micro_batches)
        yield from _flat_reduction(units)
        yield from _flat_update(units, updates_in_place=layout.master is None)


def _flat_passes(units: _FlatUnits, num_micro: int) -> Iterator[Traffic]:
    """Forward and backward: gather Theta for use, reduce G to the shards in which it is kept."""
    wrap = units.wrap
    if wrap.parameters:
        group = units.group(wrap.parameters)
        yield from _gathers(wrap.sync, num_micro, units.times, group, units.parameters)
    if wrap.gradients:
        times = units.times * reductions(wrap.sync, num_micro)
        calls = _reduce_scatter(wrap.reduce_scatter, Phase.BACKWARD, times)
        yield calls.over(units.group(wrap.gradients), units.gradients)


def _flat_reduction(units: _FlatUnits) -> Iterator[Traffic]:
    """From G's layout to Omega's: reduce what is partial, then gather what is needed whole."""
    wrap, times = units.wrap, units.times
    kept, updated = wrap.gradients, wrap.optimizer
    if narrower := _without(updated, kept):
        calls = _reduce_scatter(wrap.reduce_scatter, Phase.UPDATE, times)
        yield calls.over(units.group(narrower), units.gradient_shard(kept))
    if partial := _without(wrap.axes, (*updated, *kept)):
        calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE, times)
        yield calls.over(units.group(partial), units.gradient_shard(kept, updated))
    if wider := _without(kept, updated):
        calls = Calls(Collective.ALL_GATHER, State.GRADIENTS, Phase.UPDATE, times)
        yield calls.over(units.group(wider), units.gradient_shard(updated))


def _flat_update(units: _FlatUnits, *, updates_in_place: bool) -> Iterator[Traffic]:
    """Gather what the update reads of Theta (a master copy needs nothing), and what it wrote."""
    wrap = units.wrap
    stored, updated = wrap.parameters, wrap.optimizer
    calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, Phase.UPDATE, units.times)
    if updates_in_place and (read := _without(stored, updated)):
        shared = tuple(axis for axis in stored if axis in updated)
        yield calls.over(units.group(read), units.parameter_shard(shared))
    if written := _without(updated, stored):
        yield calls.over(units.group(written), units.parameter_shard(stored))


def _gathers(
    sync: SyncPolicy, num_micro: int, units: int, group: Group, payload: int
) -> Iterator[Traffic]:
    times = gathers(sync, num_micro)
    for phase, num in ((Phase.FORWARD, times.forward), (Phase.BACKWARD, times.backward)):
        if num:
            calls = Calls(Collective.ALL_GATHER, State.PARAMETERS, phase, units * num)
            yield calls.over(group, payload)


def _reduce_scatter(via: ReduceScatterVia, phase: Phase, times: int) -> Calls:
    substitute = None if via is ReduceScatterVia.NATIVE else via.value
    return Calls(Collective.REDUCE_SCATTER, State.GRADIENTS, phase, times, substitute)


def _norm(spec: Spec, plan: Plan) -> Iterator[Traffic]:
    """Clipping: the square of the norm, one scalar of at least fp32 per axis."""
    if plan.clip is not None:
        scalar = max(4, plan.update.layout.gradients.itemsize)
        for axis in plan.clip.axes:
            calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
            yield calls.over(group_over(spec, (axis,)), scalar)


def _without(axes: Iterable[Axis], others: Iterable[Axis]) -> tuple[Axis, ...]:
    taken = set(others)
    return tuple(axis for axis in axes if axis not in taken)
