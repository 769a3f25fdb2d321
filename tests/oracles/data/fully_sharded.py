"""FSDP2 in closed form, by unit, following torch/distributed/fsdp/_fully_shard.

A gather (`_fsdp_collectives.foreach_all_gather`) receives the unit into one buffer, from which
`foreach_all_gather_copy_out` makes the parameters: twice the unit. In forward that buffer lives
until the next unit's is there, or begun (`FSDPParamGroup.wait_for_unshard`), in backward it goes at
once, and the next gather is begun before (`_backward_prefetch`). A cast shard is a copy until it is
sent. A reduction (`foreach_reduce`) copies gradients into one padded input, then drops them (before
2.15 all but the last, which a loop's variable names), scatters it, and casts and adds the output to
G. The input lives until the next unit's reduction, what replicas all-reduced until the backward
pass is over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ptrain.axes.data.cost import (
    count_gathers,
    count_reductions,
    kept_ranks,
    local_rows,
    padded_rows,
)
from ptrain.axes.data.fsdp2 import shard_dim
from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import Layout
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FullyShard
from tests.oracles.data.chain import ChainUnit, NoClosedForm, Resident, UnitChain
from tests.oracles.data.optimizer import (
    COUNTER_BYTES,
    has_counter,
    num_moments,
)


@dataclass(frozen=True, slots=True, eq=False)
class ShardedUnit:
    """The sizes of a unit that `ranks` shard by rows of dim 0, with `replicas`."""

    unit: ChainUnit
    step: FullyShard
    layout: Layout
    ranks: int
    replicas: int = 1

    @property
    def padded(self) -> int:
        """Return the elements of a rank's shard with padding."""
        return sum(padded_rows(shape, self.ranks) for shape in self.unit.shapes)

    @property
    def tensors(self) -> list[int]:
        """Return the bytes of each gathered tensor."""
        itemsize = self.layout.parameters.itemsize
        return [padded_rows(s, self.ranks) * self.ranks * itemsize for s in self.unit.shapes]

    @property
    def whole(self) -> int:
        """Return the bytes of the gathered unit."""
        return sum(self.tensors)

    @property
    def stays(self) -> bool:
        """Return True if it stays gathered from forward to backward."""
        return not self.step.sync.after_forward(is_root=self.unit.is_root)

    @property
    def group(self) -> int:
        """Return the number of ranks that shard it between forward and backward."""
        return kept_ranks(self.step.sync, self.ranks, is_root=self.unit.is_root)

    @property
    def between(self) -> int:
        """Return the bytes of the larger shard that a smaller group keeps meanwhile."""
        return self.whole // self.group if 1 < self.group < self.ranks else 0

    @property
    def waits(self) -> int:
        """Return its bytes between its forward and its backward."""
        return self.whole if self.stays else self.between

    @property
    def narrowing(self) -> int:
        """Return the bytes while each tensor's shard for the smaller group is copied: with the
        remaining tensors and the finished shards."""
        if not self.between:
            return 0
        parts = [size // self.group for size in self.tensors]
        left = [self.whole, *(self.whole - size for size in accumulate(self.tensors))]
        return max(map(sum, zip(left, accumulate(parts), strict=False)))

    def copy(self, sharded: int) -> int:
        """Return the bytes of the cast shard that is sent: of the full shard, or of the smaller
        group's (`sharded`, if any)."""
        casts = self.step.materialized and self.layout.parameters is not self.layout.master
        return (sharded or self.whole // self.ranks) * casts

    @property
    def gradients(self) -> tuple[int, ...]:
        """Return the bytes of each of autograd's gradients."""
        return tuple(numel * self.layout.parameters.itemsize for numel in self.unit.numels)

    @property
    def casts(self) -> tuple[int, ...]:
        """Return the bytes of each gradient in the dtype of the reduction."""
        return tuple(numel * self.layout.reduced.itemsize for numel in self.unit.numels)

    @property
    def summed(self) -> int:
        """Return the bytes of unreduced gradients in the dtype of the reduction."""
        return sum(self.casts)

    @property
    def input(self) -> int:
        """Return the bytes of the reduction's input."""
        return self.padded * self.ranks * self.layout.reduced.itemsize

    @property
    def output(self) -> int:
        """Return the bytes of the reduction's output."""
        return self.padded * self.layout.reduced.itemsize

    @property
    def kept(self) -> int:
        """Return the bytes of the resident gradients."""
        return self.padded * self.layout.gradients.itemsize

    @property
    def last(self) -> int:
        """Return the elements of the tensor whose gradient is freed last."""
        return self.unit.numels[-1]


@dataclass(frozen=True)
class FullyShardedForm:
    """A plan of FSDP2 on a chain."""

    spec: Spec
    plan: Plan
    step: FullyShard
    chain: UnitChain

    @property
    def layout(self) -> Layout:
        return self.plan.update.layout

    @property
    def optimizer(self) -> OptimizerSpec:
        return self.spec.optimizer

    @cached_property
    def units(self) -> tuple[ShardedUnit, ...]:
        """Return the units with parameters in the order of wrapping, the root last."""
        return tuple(self._unit(unit) for unit in self.chain.units if unit.shapes)

    def _unit(self, unit: ChainUnit) -> ShardedUnit:
        step, experts = self.step, self.plan.experts
        if unit.is_apart and experts is not None:
            fewer = step.drop_axis(experts.axis)
            if not isinstance(fewer, FullyShard):
                raise NoClosedForm("experts that no axis shards are autograd's, and not FSDP2's")
            step = fewer
        ranks, replicas = (
            _ranks(self.spec, axes) for axes in (step.shard_axes, step.replicate_axes)
        )
        if any(shard_dim(shape, ranks, step.sync) for shape in unit.shapes):
            raise NoClosedForm("tensors that are not sharded by rows are copied once more")
        return ShardedUnit(unit, step, self.layout, ranks, replicas)

    def held(self, unit: ShardedUnit, index: int) -> list[int]:
        """Return the elements of each tensor of a unit on the ranks with shard `index`, without
        padding."""
        place = 0
        for axis, own in self._places(index).items():
            if axis in unit.step.shard_axes:
                place = place * self.spec.degree(axis) + own
        return [local_rows(shape, unit.ranks, place) for shape in unit.unit.shapes]

    def _places(self, index: int) -> dict[Axis, int]:
        """Return the coordinates of these ranks along the sharding axes, the outermost first."""
        places: dict[Axis, int] = {}
        for axis in reversed(self.step.shard_axes):
            index, places[axis] = divmod(index, self.spec.degree(axis))
        return dict(reversed(places.items()))

    def resident(self, index: int) -> Resident:
        """Return the bytes on the ranks with shard `index`. Parameters and gradients include
        padding; the optimizer updates the actual rows. A shard that is the master copy of
        materialized parameters counts as optimizer state."""
        layout, step = self.layout, self.step
        stored = sum(unit.padded for unit in self.units)
        held = sum(sum(self.held(unit, index)) for unit in self.units)
        omega = held * num_moments(self.optimizer) * layout.moments.itemsize
        omega += COUNTER_BYTES * len(self.chain.tensors) * has_counter(self.optimizer)
        theta = stored * layout.parameters.itemsize
        if layout.master is not None and not step.materialized:
            omega += held * layout.master.itemsize
        if layout.master is not None and step.materialized:
            theta, omega = 0, omega + stored * layout.master.itemsize
        return {
            State.PARAMETERS: Counter({Tier.DEVICE: theta}),
            State.OPTIMIZER: Counter({Tier.DEVICE: omega}),
            State.GRADIENTS: Counter({Tier.DEVICE: stored * layout.gradients.itemsize}),
        }

    def transient(self) -> int:
        """Return the bytes of units, or of a smaller group's shards, from forward to backward."""
        return sum(unit.waits for unit in self.units)

    def sent(self) -> Iterator[Traffic]:
        """Return the traffic: a gather if a pass finds a unit sharded (from all ranks in forward,
        in backward from the smaller group that kept it); a reduce-scatter after each micro-batch or
        the last; then an all-reduce of the shard over replicas."""
        num = self.plan.accumulate.micro_batches
        native = self.step.reduce_scatter is ReduceScatterVia.NATIVE
        via = None if native else self.step.reduce_scatter.value
        for unit in self.units:
            step = unit.step
            shards = Group(step.shard_axes, unit.ranks)
            times = count_gathers(step.sync, num, is_root=unit.unit.is_root)
            group = Group(step.shard_axes, unit.group) if unit.group > 1 else shards
            gather, theta = Collective.ALL_GATHER, State.PARAMETERS
            for phase, count, over in (
                (Phase.FORWARD, times.forward, shards),
                (Phase.BACKWARD, times.backward, group),
            ):
                if count:
                    yield Calls(gather, theta, phase, count).traffic(over, unit.whole)
            count = count_reductions(step.sync, num)
            scatter, all_reduce = Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
            state, phase = State.GRADIENTS, Phase.BACKWARD
            yield Calls(scatter, state, phase, count, via).traffic(shards, unit.input)
            if step.replicate_axes:
                replicas = Group(step.replicate_axes, unit.replicas)
                yield Calls(all_reduce, state, phase, count).traffic(replicas, unit.output)


def _ranks(spec: Spec, axes: Iterable[Axis]) -> int:
    return math.prod(spec.degree(axis) for axis in axes)
