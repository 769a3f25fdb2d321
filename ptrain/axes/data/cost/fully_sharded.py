"""FSDP2 in closed form, by unit, with what is known of torch/distributed/fsdp/_fully_shard.

A gather (`_fsdp_collectives.foreach_all_gather`) receives the unit into one buffer, from which
`foreach_all_gather_copy_out` makes the parameters: twice the unit. In forward that buffer lives
until the next unit's is there (`FSDPParamGroup.wait_for_unshard`), in backward it goes at once, and
the next gather is begun before (`_backward_prefetch`). A cast shard is a copy until it is sent.
A reduction (`foreach_reduce`) copies gradients into one padded input, then drops them (all but the
last, which a loop's variable names), scatters it, and casts and adds the output to G. The input
lives until the next unit's reduction, what replicas all-reduced until the backward pass is over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ptrain.axes.data.cost.chain import Chain, Unit
from ptrain.axes.data.cost.flat import MicroBatch, Resident, micro_batches
from ptrain.axes.data.cost.optimizer import (
    COUNTER_BYTES,
    has_counter,
    is_by_tensor,
    norm,
    num_casts,
    num_moments,
    orthogonalization,
)
from ptrain.axes.data.costs import gathers, kept_ranks, local_rows, padded_rows, reductions
from ptrain.axes.ring import Calls, Group
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.plan.step import FullyShard, Plan
from ptrain.spec.axis import Axis
from ptrain.spec.batch import GradientSync, ReduceScatterVia
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec, Spec


@dataclass(frozen=True, slots=True, eq=False)
class ShardedUnit:
    """Sizes of one unit that `ranks` shard by rows of dim 0."""

    unit: Unit
    step: FullyShard
    layout: Layout
    ranks: int

    @property
    def padded(self) -> int:
        """Elements of a rank's shard, with its padding."""
        return sum(padded_rows(shape, self.ranks) for shape in self.unit.shapes)

    @property
    def tensors(self) -> list[int]:
        """Bytes of each gathered tensor."""
        itemsize = self.layout.parameters.itemsize
        return [padded_rows(s, self.ranks) * self.ranks * itemsize for s in self.unit.shapes]

    @property
    def whole(self) -> int:
        """Bytes of the gathered unit."""
        return sum(self.tensors)

    @property
    def stays(self) -> bool:
        """Whether it stays gathered from forward to backward."""
        return not self.step.sync.after_forward(is_root=self.unit.is_root)

    @property
    def group(self) -> int:
        """Over how many ranks it is spread from forward to backward."""
        return kept_ranks(self.step.sync, self.ranks, is_root=self.unit.is_root)

    @property
    def between(self) -> int:
        """Bytes of the larger shard that a smaller group keeps of it meanwhile."""
        return self.whole // self.group if 1 < self.group < self.ranks else 0

    @property
    def waits(self) -> int:
        """Bytes of it between its forward and its backward."""
        return self.whole if self.stays else self.between

    @property
    def narrowing(self) -> int:
        """Bytes while each tensor's part is copied out of it for the smaller group: beside the
        tensors that are left and the parts that are there."""
        if not self.between:
            return 0
        parts = [size // self.group for size in self.tensors]
        left = [self.whole, *(self.whole - size for size in accumulate(self.tensors))]
        return max(map(sum, zip(left, accumulate(parts), strict=False)))

    def copy(self, sharded: int) -> int:
        """Bytes of the cast shard that is sent, where it is cast: of all, or of the smaller group's
        (`sharded`, if any)."""
        casts = self.step.materialized and self.layout.parameters is not self.layout.master
        return (sharded or self.whole // self.ranks) * casts

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of each of autograd's gradients."""
        return tuple(numel * self.layout.parameters.itemsize for numel in self.unit.numels)

    @property
    def summed(self) -> int:
        """Bytes of gradients that wait unreduced, in the dtype of the reduction."""
        return self.unit.numel * self.layout.reduced.itemsize

    @property
    def input(self) -> int:
        """Bytes of the reduction's input."""
        return self.padded * self.ranks * self.layout.reduced.itemsize

    @property
    def output(self) -> int:
        """Bytes of its output."""
        return self.padded * self.layout.reduced.itemsize

    @property
    def kept(self) -> int:
        """Bytes of G."""
        return self.padded * self.layout.gradients.itemsize

    @property
    def last(self) -> int:
        """Elements of the tensor whose gradient outlives the others."""
        return self.unit.numels[-1]


@dataclass(frozen=True)
class FullySharded:
    """A plan of FSDP2 on a chain."""

    spec: Spec
    plan: Plan
    step: FullyShard
    chain: Chain

    @property
    def layout(self) -> Layout:
        return self.plan.update.layout

    @property
    def optimizer(self) -> OptimizerSpec:
        return self.spec.optimizer

    @property
    def ranks(self) -> int:
        """Over which a unit is cut."""
        return _ranks(self.spec, self.step.shard_axes)

    @cached_property
    def units(self) -> tuple[ShardedUnit, ...]:
        """Those that have parameters, in the order of wrapping, the root last."""
        used = (unit for unit in self.chain.units if unit.shapes)
        return tuple(ShardedUnit(unit, self.step, self.layout, self.ranks) for unit in used)

    def resident(self, index: int) -> Resident:
        """Bytes on the ranks with shard `index`. Parameters and gradients have padding, what the
        optimizer updates are the rows that are there. A shard that is M's master copy counts as
        Omega's."""
        layout, step = self.layout, self.step
        stored = sum(unit.padded for unit in self.units)
        held = sum(local_rows(shape, self.ranks, index) for shape in self.chain.tensors)
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
        """Bytes of units, or of a smaller group's shards of them, from forward to backward."""
        return sum(unit.waits for unit in self.units)

    def sent(self) -> Iterator[Traffic]:
        """A gather where a pass finds a unit sharded: from all in forward, in backward from the
        smaller group that kept it, if one did; a reduce-scatter after each micro-batch, or the
        last; and then an all-reduce of the shard over replicas."""
        step, layout, num = self.step, self.layout, self.plan.accumulate.micro_batches
        shards = Group(step.shard_axes, self.ranks)
        native = step.reduce_scatter is ReduceScatterVia.NATIVE
        via = None if native else step.reduce_scatter.value
        for unit in self.units:
            times = gathers(step.sync, num, is_root=unit.unit.is_root)
            group = Group(step.shard_axes, unit.group) if unit.group > 1 else shards
            gather, theta = Collective.ALL_GATHER, State.PARAMETERS
            for phase, count, over in (
                (Phase.FORWARD, times.forward, shards),
                (Phase.BACKWARD, times.backward, group),
            ):
                if count:
                    yield Calls(gather, theta, phase, count).over(over, unit.whole)
            count = reductions(step.sync, num)
            scatter, all_reduce = Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
            state, phase = State.GRADIENTS, Phase.BACKWARD
            yield Calls(scatter, state, phase, count, via).over(shards, unit.input)
            if step.replicate_axes:
                replicas = Group(step.replicate_axes, _ranks(self.spec, step.replicate_axes))
                yield Calls(all_reduce, state, phase, count).over(replicas, unit.output)

    def peaks(self, index: int) -> dict[Phase, int]:
        """Bytes above what lives always on the ranks with shard `index`, by phase."""
        if self.plan.pipeline is not None:
            raise NoClosedForm("pipeline: micro-batches in flight lie between a unit's passes")
        kinds = [kind for kind, _ in micro_batches(self.plan.accumulate.micro_batches)]
        passes = [_Pass(self, kind) for kind in kinds]
        return {
            Phase.FORWARD: max(max(each.forward()) for each in passes),
            Phase.BACKWARD: max(max(each.backward()) for each in passes),
            Phase.UPDATE: max(self._update(index)),
        }

    def _update(self, index: int) -> Iterator[int]:
        """The norm of all; then each unit's casts of its rows, and of its matrices the largest's
        orthogonalization."""
        base = sum(unit.kept for unit in self.units)
        at_once, stays = norm(self.spec, self.plan, self.chain, len(self.chain.tensors))
        yield base + at_once
        for unit in self.chain.units:
            casts = update_casts(
                self.optimizer,
                self.layout,
                unit,
                [local_rows(shape, self.ranks, index) for shape in unit.shapes],
            )
            yield base + stays + casts


def update_casts(
    optimizer: OptimizerSpec, layout: Layout, unit: Unit, numels: Sequence[int]
) -> int:
    """Bytes of what the update of a unit's tensors in place casts, of `numels` elements each."""
    casts = sum(
        numel * num_casts(optimizer, layout, is_hidden=unit.is_hidden(shape))
        for numel, shape in zip(numels, unit.shapes, strict=True)
    )
    matrices = [shape for shape in unit.shapes if unit.is_hidden(shape)]
    if not is_by_tensor(optimizer):
        matrices = []
    largest = max((orthogonalization(shape, layout) for shape in matrices), default=0)
    return casts * layout.updated.itemsize + largest


def _ranks(spec: Spec, axes: Iterable[Axis]) -> int:
    return math.prod(spec.degree(axis) for axis in axes)


def _wholes(units: Iterable[ShardedUnit]) -> int:
    return sum(unit.whole for unit in units)


@dataclass(frozen=True)
class _Pass:
    """A forward and a backward pass over the units of a chain."""

    sharded: FullySharded
    kind: MicroBatch

    @property
    def step(self) -> FullyShard:
        return self.sharded.step

    @property
    def layout(self) -> Layout:
        return self.sharded.layout

    @property
    def inwards(self) -> list[ShardedUnit]:
        """In the order of a forward pass: the root first."""
        return sorted(self.sharded.units, key=lambda unit: not unit.unit.is_root)

    @property
    def releases(self) -> bool:
        """Whether backward gives gathered units back."""
        return self.kind.is_last or self.step.sync.reshard_after_backward

    @property
    def reduces(self) -> bool:
        return self.kind.is_last or self.step.sync.gradients is GradientSync.EVERY

    @property
    def _waits_unreduced(self) -> bool:
        """Whether gradients of micro-batches before wait for their reduction."""
        return self.step.sync.gradients is GradientSync.LAST and not self.kind.is_first

    @property
    def _is_cast(self) -> bool:
        return self.layout.reduced is not self.layout.parameters

    # ---- forward

    def forward(self) -> Iterator[int]:
        """Turn by turn: the gather is begun, and copied out beside the buffer of the one before;
        then those ahead are begun; at the end a smaller group's parts are copied."""
        order, step = self.inwards, self.step
        ahead = (step.prefetch or 0) if step.overlaps else 0
        base = sum(self.before(unit) for unit in order)
        yield base
        is_whole = not self.kind.is_first and not step.sync.reshard_after_backward
        if is_whole:  # as the backward pass before left them
            yield base + _wholes(order)
        for place, unit in enumerate(order):
            buffers = [other.whole * step.overlaps for other in order[max(0, place - 1) : place]]
            held = base + sum(o.whole if o.unit.is_root else o.waits for o in order[:place])
            if is_whole:
                if not unit.unit.is_root:
                    yield held + unit.narrowing + _wholes(order[place + 1 :])
                continue
            begun = _wholes(order[place + 1 : place + ahead]) if place else 0
            own_copy = unit.copy(0) if place == 0 or not ahead else 0
            yield held + sum(buffers) + begun + unit.whole + own_copy
            yield held + sum(buffers) + begun + 2 * unit.whole
            held += unit.whole * step.overlaps
            following = order[place + 1 : place + 1 + ahead]
            yield from _beginning(
                held + unit.whole, [(o, 0) for o in following], ahead if place else 0
            )
            if not unit.unit.is_root:
                yield held + _wholes(following) + unit.narrowing
        for root in order[:1]:
            inner, buffer = order[1:], order[-1].whole * step.overlaps * (not is_whole)
            if root.unit.is_root:
                yield base + sum(unit.waits for unit in inner) + buffer + root.narrowing

    # ---- backward

    def before(self, unit: ShardedUnit) -> int:
        """Bytes of the unit's gradients of micro-batches before: G, or, unreduced, autograd's own
        or their sum in the dtype of the reduction."""
        if self.kind.is_first:
            return 0
        if not self._waits_unreduced:
            return unit.kept
        return unit.summed if self._is_cast else sum(unit.gradients)

    def arrived(self, unit: ShardedUnit, tensors: Iterable[int]) -> int:
        """Bytes when these of its gradients are complete: they stand beside what is there, but for
        those that autograd adds to its own of before."""
        if self._waits_unreduced and not self._is_cast:
            return self.before(unit)
        return self.before(unit) + sum(unit.gradients[index] for index in tensors)

    def _arriving(self, unit: ShardedUnit) -> int:
        """Bytes of a gradient of its own that autograd is about to add to one of before."""
        adds = self._waits_unreduced and not self._is_cast and self.sharded.chain.is_fresh
        return max(unit.gradients) * adds

    def rest(self, unit: ShardedUnit) -> int:
        """Bytes when it is done: G, and what replicas all-reduced where G is another tensor."""
        if not self.reduces:
            return unit.summed if self._is_cast else sum(unit.gradients)
        is_other = self._casts_after or not self._is_new
        return unit.kept + unit.output * (is_other and bool(self.step.replicate_axes))

    @property
    def _casts_after(self) -> bool:
        return self.layout.reduced is not self.layout.gradients

    @property
    def _is_new(self) -> bool:
        """Whether nothing is reduced yet."""
        return self.kind.is_first or self.step.sync.gradients is GradientSync.LAST

    def backward(self) -> Iterator[int]:
        """Turn by turn, the root's gather first and its reduction last."""
        order = self.inwards[::-1]
        roots = [unit for unit in order if unit.unit.is_root]
        order = [*roots, *(unit for unit in order if not unit.unit.is_root)]
        blocks = order[len(roots) :]
        head = self.sharded.chain.head
        gradients = sum(self.before(unit) for unit in order)
        yield gradients + sum(unit.waits for unit in order)
        for place, unit in enumerate(order):
            done = [other for other in order[:place] if not other.unit.is_root]
            level = sum(self.before(other) for other in order[place + 1 :])
            level += sum(map(self.rest, done))
            level += sum(other.input for other in done[-1:]) * self.reduces
            level += sum(self.arrived(other, head) for other in roots[:place])
            level += _wholes(roots[:place]) + (0 if self.releases else _wholes(done))
            yield from self._gathering(level + self.before(unit), order, place)
            following = self._ahead(order, place)
            waiting = sum(other.waits for other in order[place + 1 :])
            level += waiting + _wholes(following)
            if unit.unit.is_root:
                yield level + unit.whole + self.arrived(unit, head) + self._arriving(unit)
            else:
                yield from self._turn(unit, level, sum(o.input for o in done[-1:]))
        held = 0 if self.releases else _wholes(blocks)
        for root in roots:
            before = sum(unit.input for unit in blocks[-1:])
            level = held + sum(map(self.rest, blocks)) + before * self.reduces
            yield from self._turn(root, level, before)

    def _ahead(self, order: Sequence[ShardedUnit], place: int) -> list[ShardedUnit]:
        """Those that are begun in a turn or before it: torch's own choice is the next."""
        prefetch = 1 if self.step.prefetch is None else self.step.prefetch
        ahead = prefetch if self.step.overlaps else 0
        return [unit for unit in order[place + 1 : place + 1 + ahead] if not unit.stays]

    def _gathering(self, level: int, order: Sequence[ShardedUnit], place: int) -> Iterator[int]:
        """The unit's own gather, beside those begun before, then those ahead of it; a smaller
        group's shard stays until the unit is copied out."""
        unit, waiting = order[place], sum(other.waits for other in order[place + 1 :])
        level += waiting
        begun = self._ahead(order, place - 1) if place else []
        beside = _wholes(other for other in begun if other is not unit)
        if unit.stays:
            yield level + unit.whole + beside
        else:
            own_copy = 0 if unit in begun else unit.copy(unit.between)
            yield level + unit.between + beside + unit.whole + own_copy
            yield level + unit.between + beside + 2 * unit.whole
        following = [(other, other.between) for other in self._ahead(order, place)]
        known = sum(other in begun for other, _ in following)
        yield from _beginning(level + unit.whole, following, known + 1 if known else 0)

    def _turn(self, unit: ShardedUnit, level: int, flying: int) -> Iterator[int]:
        """Its gradients arrive, and it is done. `level` are all others and, if this pass reduces,
        the input of the reduction before (`flying`)."""
        everything = range(len(unit.gradients))
        arrived = self.arrived(unit, everything)
        yield level + unit.whole + arrived + self._arriving(unit)
        level += 0 if self.releases else unit.whole
        if not self.reduces:
            if self._is_cast and self.kind.is_first:
                yield level + _converting(unit, self.layout)
            return
        level -= flying
        kept = 0 if self._is_new else unit.kept
        is_summed = self._waits_unreduced and self._is_cast
        gradients = unit.summed if is_summed else sum(unit.gradients)
        dtype = self.layout.reduced if is_summed else self.layout.parameters
        last = unit.last * dtype.itemsize
        exchange = unit.input * (self.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL)
        yield level + kept + gradients + unit.input
        yield level + kept + last + unit.input + unit.output + exchange
        yield level + kept + last + unit.input + unit.output + unit.kept * self._casts_after


def _beginning(
    level: int, following: Sequence[tuple[ShardedUnit, int]], known: int
) -> Iterator[int]:
    """Gathers begun one after the other, each of a cast copy that goes when it is sent; of the
    first `known` - 1 that was done in an earlier turn."""
    for place, (unit, sharded) in enumerate(following):
        is_new = place >= known - 1
        before = _wholes(other for other, _ in following[:place])
        yield level + before + unit.whole + unit.copy(sharded) * is_new


def _converting(unit: ShardedUnit, layout: Layout) -> int:
    """Bytes at most while gradients become copies in the dtype of the reduction, one by one."""
    copies = [numel * layout.reduced.itemsize for numel in unit.unit.numels]
    left = [
        sum(unit.gradients),
        *(sum(unit.gradients) - size for size in accumulate(unit.gradients)),
    ]
    return max(map(sum, zip(left, accumulate(copies), strict=False)))
