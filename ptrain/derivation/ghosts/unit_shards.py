"""Over which ranks FSDP2 shards a unit: over the plan's, and experts over the fewer of them that
have the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.axes.data.cost import local_rows, padded_rows
from ptrain.facts.model import UnitFacts
from ptrain.rooms.room import Shape
from ptrain.spec.axis import Axis, without
from ptrain.spec.layout import place_of, ranks_over
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan


@dataclass(frozen=True, slots=True)
class UnitShards:
    """A unit's `ranks` over `axes`, of which each has rows of every tensor, and `replicas` around
    them. Without axes nothing wraps the unit, and it is one shard."""

    axes: tuple[Axis, ...]
    replicas: tuple[Axis, ...]
    ranks: int

    @property
    def is_wrapped(self) -> bool:
        """Whether FSDP2 knows of the unit."""
        return bool(self.axes)

    def padded(self, shape: Shape) -> int:
        """Return the elements of one rank's part of a tensor, padding included."""
        return padded_rows(shape, self.ranks)

    def part(self, shape: Shape, index: int) -> Shape:
        """Return what the rank with this shard really has of a tensor."""
        return (local_rows(shape[:1], self.ranks, index), *shape[1:])


def shards_of(spec: Spec, plan: Plan, unit: UnitFacts) -> UnitShards:
    """Return how a unit is sharded."""
    step = plan.wrap_of(unit.modules)
    axes = step.row_axes
    return UnitShards(axes, without(step.summed_axes, axes), ranks_over(spec, axes))


def index_over(spec: Spec, plan: Plan, shards: UnitShards, shard: int) -> int:
    """Return which shard of a unit the rank has whose place among all that are sharded over is
    `shard`."""
    if shards.axes == plan.wrap.row_axes:
        return shard
    places = place_of(spec, plan.wrap.row_axes, shard)
    index = 0
    for factor in spec.factors:
        if factor.axis in shards.axes:
            index = index * factor.degree + places[factor.axis]
    return index
