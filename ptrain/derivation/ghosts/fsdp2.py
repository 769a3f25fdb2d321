"""Simulates FSDP2 (`torch.distributed.fsdp.fully_shard`): allocations and traffic, in its order.

torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py` has the order, `_fsdp_collectives.py`
the operations. A reduction's input lives until the next unit's reduction begins, which waits for
it. `axes.data.fsdp2` has the differences between torch versions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import compress, groupby
from typing import NamedTuple

from ptrain.axes.data.cost import kept_ranks, local_rows, padded_rows
from ptrain.axes.data.fsdp2 import fsdp2_behavior, fully_shard_order, shard_dim
from ptrain.cost import Collective, State
from ptrain.derivation.clock import Arrival
from ptrain.derivation.ghosts import wrapping
from ptrain.derivation.ghosts.in_place import InPlace, InPlaceUpdate, Local, Shapes
from ptrain.derivation.tape import Scene
from ptrain.facts.model import TensorFacts, UnitFacts
from ptrain.runtime.interface import Shape
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.dials import GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.placement import Axis, exclude_axes
from ptrain.spec.spec import Spec, place_of, ranks_over
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FullyShard
from ptrain.timeline import Complete, Kind, Mark, boundaries
from ptrain.units import row_major


class UnitShards(NamedTuple):
    """The shards of a unit over `ranks` ranks of `axes`, and their `replicas` over other axes.
    Without axes the unit is not wrapped, and is one shard."""

    axes: tuple[Axis, ...]
    replicas: tuple[Axis, ...]
    ranks: int
    sync: SyncPolicy

    @property
    def is_wrapped(self) -> bool:
        """True if FSDP2 wraps the unit."""
        return bool(self.axes)

    def shard_dim(self, shape: Shape) -> int:
        """Return the dimension along which a tensor is sharded."""
        return shard_dim(shape, self.ranks, self.sync)

    def padded_elements(self, shape: Shape) -> int:
        """Return the elements of one rank's part of a tensor, including padding."""
        if self.shard_dim(shape):
            return math.prod(shape) // self.ranks
        return padded_rows(shape, self.ranks)

    def local_shape(self, shape: Shape, index: int) -> Shape:
        """Return the shape of the rank's part of a tensor, without padding.

        Args:
            shape: The full shape.
            index: The shard's place over `axes`, from 0.
        """
        if dim := self.shard_dim(shape):
            return (*shape[:dim], shape[dim] // self.ranks, *shape[dim + 1 :])
        return (local_rows(shape[:1], self.ranks, index), *shape[1:])


def shards_of(spec: Spec, plan: Plan, unit: UnitFacts) -> UnitShards:
    """Return the ranks and replicas over which a unit is sharded."""
    step = plan.wrap_of(unit.modules)
    axes = step.row_axes
    sync = step.policy or SyncPolicy()
    return UnitShards(axes, exclude_axes(step.summed_axes, axes), ranks_over(spec, axes), sync)


def index_over(spec: Spec, plan: Plan, shards: UnitShards, shard: int) -> int:
    """Return a rank's shard of a unit.

    Args:
        spec: A resolved spec.
        plan: The plan of the spec.
        shards: The sharding of the unit.
        shard: The rank's place along all axes of the plan's wrap, from 0.
    """
    if shards.axes == plan.wrap.row_axes:
        return shard
    places = place_of(spec, plan.wrap.row_axes, shard)
    return row_major((places[f.axis], f.degree) for f in spec.factors if f.axis in shards.axes)


# FSDP2's gathers: a unit's parameters from shards to full tensors and back (checked in torch 2.13).
# A gather allocates a buffer and then a tensor per parameter. In forward the buffer lives until the
# next unit is gathered. In backward it is freed at once, and the next unit's gather starts before
# this unit's backward. On an accelerator the host runs ahead of the device, so a gather starts when
# the all-gather stream allows it. In forward this stream waits for the parameters of the unit
# before the one in use (at the root: for all compute so far), in backward for those of the unit in
# use (`wait_for_unshard`).


class Gathers:
    """The parameters of the units: sharded, being gathered, gathered, or kept in the larger shards
    of smaller groups between forward and backward."""

    def __init__(
        self,
        scene: Scene,
        step: FullyShard,
        shards: Sequence[UnitShards],
        padded: Sequence[Sequence[int]],
        moved: Sequence[Sequence[bool]],
        itemsizes: Sequence[Sequence[int]],
    ) -> None:
        """Prepare the units.

        Args:
            scene: The scene.
            step: How FSDP2 wraps the model.
            shards: How each unit is sharded.
            padded: By unit, the padded elements of one rank's part of each tensor.
            moved: By unit, True for each tensor that is not sharded by rows.
            itemsizes: By unit, the bytes of an element of each tensor; 1 if it is quantized.
        """
        self.tape, self.step, self.times = scene.tape, step, scene.times
        self.holds_buffer = fsdp2_behavior().holds_buffer
        layout = scene.plan.update.layout
        self.shards = shards
        self.kept_ranks = [kept_ranks(step.sync, own.ranks) for own in shards]
        self.stays = [  # gathered from forward to backward
            not step.sync.after_forward(is_root=unit.stays_by_default) for unit in scene.units
        ]
        self.tensors = [
            [size * own.ranks * itemsize for size, itemsize in zip(*pair, strict=True)]
            for own, *pair in zip(shards, padded, itemsizes, strict=True)
        ]
        self.whole = [sum(sizes) for sizes in self.tensors]
        cast = [[itemsize > 1 for itemsize in of_unit] for of_unit in itemsizes]
        self.cast = [sum(compress(*pair)) for pair in zip(self.tensors, cast, strict=True)]
        self.moved = [sum(compress(*pair)) for pair in zip(self.tensors, moved, strict=True)]
        # a cast shard is copied into the gather's buffer once it is complete
        self.casts = step.materialized and layout.parameters is not layout.master
        self.shard = [size // own.ranks for size, own in zip(self.whole, shards, strict=True)]
        units = range(len(padded))
        self.is_gathered = [False for _ in units]
        self.is_pending = [False for _ in units]
        self.between = [0 for _ in units]
        self.buffer = 0  # bytes of the last gather's buffer in forward
        self.arrivals: list[Arrival | None] = [None for _ in units]
        self.since: float | None = None  # earliest start of the next gather on its stream
        self.there: float | None = None  # when the last gather's parameters were available
        self.root, self.dtype = len(padded) - 1, layout.parameters
        self.forward, self.backward = self._prefetch_order(scene)

    def _prefetch_order(self, scene: Scene) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the units that each unit prefetches in forward and in backward."""
        # By default, `_backward_prefetch` takes the previous entry of `post_forward_order`, which
        # is the order of LEAVE, not of ENTER. Forward prefetches none.
        used = [unit for unit in scene.order(Mark.ENTER) if self.whole[unit]]
        left = [unit for unit in scene.order(Mark.LEAVE) if self.whole[unit]][::-1]
        own = self.step.prefetch if self.step.overlaps else 0
        forward, backward = own or 0, 1 if own is None else own
        return (
            {unit: used[i + 1 : i + 1 + forward] for i, unit in enumerate(used)},
            {unit: left[i + 1 : i + 1 + backward] for i, unit in enumerate(left)},
        )

    def enter(self, unit: int) -> None:
        """Begin a unit's forward pass: gather it, and prefetch others."""
        if unit == self.root:
            self.since = self.there = self._now()
        if not self.whole[unit]:
            return
        self._start_gather(unit)
        if self.is_pending[unit]:
            self._receive(unit)
            self.since, self.there = self.there, self._now()
        for other in self.forward[unit]:
            self._start_gather(other)

    def _receive(self, unit: int) -> None:
        """Copy the parameters out of the gather's buffer.

        The buffer lives until the copy of the next one begins or ends, or is freed at once without
        overlap.
        """
        if not self.holds_buffer:
            self.end_forward()
        self._copy_out(unit)
        kept = self.whole[unit] if self.step.overlaps else 0
        self.tape.add(kept - self.buffer - self.whole[unit])
        self.buffer = kept

    def leave(self, unit: int) -> None:
        """End a unit's forward pass: free it, or keep its part in a smaller group."""
        if self.is_gathered[unit] and not self.stays[unit]:
            if 1 < self.kept_ranks[unit] < self.shards[unit].ranks:
                self._keep_part(unit)
            else:
                self.reshard(unit)

    def end_forward(self) -> None:
        """Free the buffer of the last gather."""
        self.tape.add(-self.buffer)
        self.buffer = 0

    def before_backward(self, unit: int) -> None:
        """Begin a unit's backward pass: gather it, and prefetch others."""
        if not self.whole[unit]:
            return
        self._start_gather(unit)
        if self.is_pending[unit]:
            self._copy_out(unit)
            self.tape.add(-self.whole[unit])
            self.since = self.there = self._now()
        for other in self.backward[unit]:
            self._start_gather(other)

    def gather_ahead(self, unit: int) -> None:
        """Prefetch a unit for another one."""
        self._start_gather(unit)

    def end_backward(self) -> None:
        """Free units that were prefetched but not used, because they received no gradient."""
        for unit, is_pending in enumerate(self.is_pending):
            if is_pending:
                arrival, self.arrivals[unit] = self.arrivals[unit], None
                if arrival is not None:
                    arrival.wait()
                self.is_pending[unit] = False
                self.tape.add(-self.whole[unit])

    def reshard(self, unit: int) -> None:
        """Free the gathered parameters of a unit."""
        if self.is_gathered[unit]:
            self.is_gathered[unit] = False
            self.tape.add(-self.whole[unit])

    def _start_gather(self, unit: int) -> None:
        """Issue a unit's gather. If shards are cast, the cast copy is freed as soon as the gather
        is issued."""
        if self.is_gathered[unit] or self.is_pending[unit]:
            return
        self.is_pending[unit] = True
        between, whole = self.between[unit], self.whole[unit]
        # `_get_param_all_gather_inputs` casts all shards into one tensor, which lives until they
        # are copied into the buffer. Shards without a cast are copied directly.
        shards = self.shards[unit]
        ranks = self.kept_ranks[unit] if between else shards.ranks
        copied = self.cast[unit] // ranks if self.casts else 0
        self.tape.add(copied + whole)
        self.tape.hook(Hook.FSDP2_GATHER)
        self.tape.computed_beside(OperatorKind.COPY, self.dtype, 2 * (between or self.shard[unit]))
        self.arrivals[unit] = self.tape.record_collective(
            Collective.ALL_GATHER,
            shards.axes,
            State.PARAMETERS,
            whole,
            "",
            ranks=ranks,
            is_awaited=False,
            since=self.since if self.step.overlaps else None,
        )
        self.tape.add(-copied)

    def _now(self) -> float | None:
        return self.tape.clock.now if self.tape.clock is not None else None

    def _copy_out(self, unit: int) -> None:
        arrival, self.arrivals[unit] = self.arrivals[unit], None
        if arrival is not None:
            arrival.wait()
        # Shards along another dimension than rows are copied once more, into the tensor's order.
        moved = self.moved[unit]
        self.tape.record_operator(OperatorKind.COPY, self.dtype, 2 * (self.whole[unit] + moved))
        self.tape.add(self.whole[unit] + moved)
        # The shard between the passes is freed last (`to_unsharded`).
        self.tape.add(-moved)
        self.tape.add(-self.between[unit])
        self.between[unit] = 0
        self.is_pending[unit], self.is_gathered[unit] = False, True

    def _keep_part(self, unit: int) -> None:
        """Keep a part of each tensor, which is copied before the tensor is freed."""
        self.is_gathered[unit] = False
        # `to_sharded_post_forward` clones and frees one parameter after the other.
        for size in self.tensors[unit]:
            self.tape.add(size // self.kept_ranks[unit])
            self.tape.add(-size)
        self.between[unit] = self.whole[unit] // self.kept_ranks[unit]

    def gathered_bytes(self) -> int:
        """Return the bytes of units that are gathered or kept by a smaller group."""
        there = zip(self.whole, self.is_gathered, self.between, self.times, strict=True)
        return sum(times * (size * is_there + between) for size, is_there, between, times in there)


class FullySharded(InPlaceUpdate):
    """The wrap of FSDP2: gathers of units, and the reduction of their gradients to shards."""

    def __init__(self, scene: Scene, step: FullyShard, wrapping: InPlace) -> None:
        self.scene, self.tape, self.step, self.wrapping = scene, scene.tape, step, wrapping
        self.unwrapped = Local(scene, wrapping)
        self.shards = [shards_of(scene.spec, scene.plan, unit) for unit in scene.units]
        self.listed = [_list_tensors(unit) for unit in scene.units]
        padded = _padded_sizes(self.listed, self.shards)
        trained = [[t for t in tensors if not t.is_frozen] for tensors in self.listed]
        moved = [
            [own.shard_dim(tensor.shape) > 0 for tensor in tensors if own.is_wrapped]
            for tensors, own in zip(self.listed, self.shards, strict=True)
        ]
        layout = scene.plan.update.layout
        self.e_parameters, self.e_reduced = layout.parameters.itemsize, layout.reduced.itemsize
        itemsizes = [
            [1 if tensor.num_quantized else self.e_parameters for tensor in tensors[: len(sizes)]]
            for tensors, sizes in zip(self.listed, padded, strict=True)
        ]
        self.gathers = Gathers(scene, step, self.shards, padded, moved, itemsizes)
        self.moved = [
            [tensor for tensor in compress(*pair) if not tensor.is_frozen]
            for pair in zip(self.listed, moved, strict=True)
        ]
        self.casts_before = layout.reduced is not layout.parameters
        self.casts_after = layout.reduced is not layout.gradients
        self.habits = fsdp2_behavior()
        totals = [sum(sizes) for sizes in _padded_sizes(trained, self.shards)]
        self.reduced = [size * layout.reduced.itemsize for size in totals]
        self.kept = [size * layout.gradients.itemsize for size in totals]
        self.unit_of = scene.unit_of()
        self.last_tensors = {tensors[-1].name for tensors in trained if tensors}
        num_units = len(totals)
        self.root = num_units - 1
        self.has_shard = [False] * num_units
        self.fresh: list[dict[str, int]] = [{} for _ in range(num_units)]  # autograd's gradients
        self.last_gradient = [0] * num_units
        self.accumulates = [False] * num_units  # autograd adds to earlier gradients
        self.added = [0] * num_units  # bytes of the sum in the dtype of the reduction
        self.reduce_input = 0
        self.reducing: Arrival | None = None
        self.all_reducing: Arrival | None = None
        self.all_reduced = [0] * num_units
        self.reduces = self.is_last = True
        self.is_pipelined = scene.plan.pipeline is not None
        self.is_over = True  # lingering memory is freed when backward ends
        backward = boundaries(scene.timeline.backward)
        self.num_ends = sum(item.mark is Mark.POST_BACKWARD for item in backward)
        self.ends_left = self.num_ends

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_last = is_last
        self.unwrapped.begin(is_first=is_first, is_last=is_last)
        self.reduces = is_last or self.step.sync.gradients is GradientSync.EVERY
        # in a pipeline, torch's root does not finalize backward before the last micro-batch
        self.is_over = is_last or not self.is_pipelined
        self.ends_left = self.num_ends

    def enter(self, unit: int) -> None:
        self.gathers.enter(unit)

    def leave(self, unit: int) -> None:
        self.gathers.leave(unit)
        if unit == self.root:
            self.gathers.end_forward()

    def before_backward(self, unit: int) -> None:
        self.gathers.before_backward(unit)

    def begin_half(self, kind: Kind) -> None:
        """Begin a half of a backward pass. No hook runs in the half of the weights, and none
        reduces in the half of the inputs."""
        self.reduces = self.is_over = False
        if kind is Kind.WEIGHT:
            self.accumulates = [bool(fresh) for fresh in self.fresh]

    def end_half(self, kind: Kind) -> None:
        """End a half, with the work of the hooks if it is due."""
        self.reduces = self.is_last or self.step.sync.gradients is GradientSync.EVERY
        if kind is Kind.WEIGHT and self.reduces:
            self.is_over, self.ends_left = True, len(self.reduced)
            times = self.scene.times
            for number, units in groupby(range(len(times)), key=times.__getitem__):
                self.tape.repeat(number, partial(self._after_backward_of, units))
        self.accumulates = [bool(fresh) for fresh in self.fresh]

    def _after_backward_of(self, units: Iterable[int]) -> None:
        """End the backward pass of a block's units, which take turns if blocks are repeated.

        A reduction frees the input of the previous one.
        """
        for unit in units:
            self.after_backward(unit)

    def complete(self, gradient: Complete) -> None:
        unit = self.unit_of[gradient.parameter]
        if not self.shards[unit].axes:  # not wrapped
            self.unwrapped.complete(gradient)
            return
        if self.accumulates[unit]:
            self.tape.add(wrapping.added_bytes(gradient))
            wrapping.time_addition(self.tape, self.scene.plan.update.layout.parameters, gradient)
            return
        if gradient.cloned:
            self.tape.spike(wrapping.copy_bytes(gradient))
            self.tape.add(wrapping.kept_bytes(gradient))
        if self.habits.casts_on_arrival and self.casts_before and not self.reduces:
            size = gradient.size // self.e_parameters * self.e_reduced
            self.tape.add(size)
            self.tape.add(-gradient.size)
            self.fresh[unit][gradient.parameter] = size
            return
        self.fresh[unit][gradient.parameter] = gradient.size
        if self.habits.names_last_gradient and gradient.parameter in self.last_tensors:
            self.last_gradient[unit] = gradient.size

    def after_backward(self, unit: int) -> None:
        """End a unit's backward pass: free its parameters and reduce its gradients."""
        if self.added[unit]:
            self._drop_fresh(unit)  # they were added to the sum
        # The unit is resharded before its gradients are copied: they do not exist with its
        # parameters.
        if self.is_last or self.step.sync.reshard_after_backward:
            self.gathers.reshard(unit)
        has_input = self.gathers.whole if self.habits.waits_without_gradients else self.reduced
        if self.reduces and has_input[unit]:
            self.tape.add(-self.reduce_input)
            self.reduce_input = 0
            self._wait_for_reduction()
            if self.fresh[unit] or self.added[unit]:
                self._reduce(unit)
        elif self.casts_before and not self.habits.casts_on_arrival:
            self._keep_in_reduced(unit)
        else:
            self.accumulates[unit] = bool(self.fresh[unit])
        self.ends_left -= 1
        if not self.ends_left and self.is_over:
            self.tape.add(-self.lingering_bytes())
            self.gathers.end_backward()
            self.reduce_input, self.all_reduced = 0, [0] * len(self.reduced)
            self._wait_for_reduction()
            if self.all_reducing is not None:
                self.all_reducing.wait()
                self.all_reducing = None

    def _wait_for_reduction(self) -> None:
        """Wait for the reduction that was issued last."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None

    def _drop_fresh(self, unit: int) -> None:
        self.tape.add(-sum(self.fresh[unit].values()))
        self.fresh[unit] = {}

    def _keep_in_reduced(self, unit: int) -> None:
        """Keep unreduced gradients in the dtype of the reduction. torch casts them in the order of
        the parameters, not in the order of arrival."""
        fresh = self.fresh[unit]
        for tensor in self.listed[unit]:
            size = fresh.get(tensor.name, 0)
            cast = size // self.e_parameters * self.e_reduced
            self.tape.add(cast)
            self.tape.add(-size)
            self.added[unit] += cast
        self.fresh[unit] = {}

    def _reduce(self, unit: int) -> None:
        """Reduce a unit's gradients. The last gradient outlives the others if torch's loop variable
        still refers to it."""
        whole, shard = self.reduced[unit] * self.shards[unit].ranks, self.reduced[unit]
        self.tape.add(-self.all_reduced[unit])
        self.all_reduced[unit] = 0
        last = self.last_gradient[unit]
        if self.added[unit]:
            last = last // self.e_parameters * self.e_reduced
        gradients = sum(self.fresh[unit].values()) + self.added[unit]
        if held := self._copy_moved(unit):
            gradients += held
            if not last:
                self.tape.add(-held)
                gradients, held = gradients - held, 0
            elif self.moved[unit][-1].name not in self.last_tensors:
                last += held
        # `foreach_reduce`: the input, the copy into it, the free of the gradients, then the output.
        self.tape.add(whole)
        self.tape.add(last - gradients)
        self.tape.add(shard)
        self._reduce_scatter(self.shards[unit], whole, shard)
        self._accumulate(unit)
        self.tape.add(-last)
        self.reduce_input = whole
        self.fresh[unit], self.added[unit], self.last_gradient[unit] = {}, 0, 0
        self.accumulates[unit] = False

    def _copy_moved(self, unit: int) -> int:
        """Copy the gradients of tensors that are not sharded by rows into the order of the shards.

        Each gradient is freed when the next one is copied. Return the bytes of the last one, to
        which torch's loop variable still refers.
        """
        held = 0
        for tensor in self.moved[unit]:
            in_sum = tensor.numel * self.e_reduced if self.added[unit] else 0
            if size := in_sum or self.fresh[unit].get(tensor.name, 0):
                self.tape.add(-held)
                self.tape.add(size)
                dtype = self.scene.plan.update.layout.reduced
                self.tape.record_operator(OperatorKind.COPY, dtype, 2 * size)
                held = size
        return held

    def _reduce_scatter(self, shards: UnitShards, whole: int, shard: int) -> None:
        """Reduce-scatter to shards, with one more buffer if it is an exchange, and all-reduce over
        replicas."""
        step = self.step
        is_native = step.reduce_scatter is ReduceScatterVia.NATIVE
        received, via = (0, "") if is_native else (whole, step.reduce_scatter.value)
        self.tape.hook(Hook.FSDP2_REDUCE)
        self.tape.record_operator(
            OperatorKind.COPY, self.scene.plan.update.layout.reduced, 2 * whole
        )
        self.tape.add(received)
        self.reducing = self.tape.record_collective(
            Collective.REDUCE_SCATTER,
            shards.axes,
            State.GRADIENTS,
            whole,
            via,
            is_awaited=not step.overlaps,
        )
        self.tape.add(-received)
        if shards.replicas:
            self.all_reducing = self.tape.record_collective(
                Collective.ALL_REDUCE,
                shards.replicas,
                State.GRADIENTS,
                shard,
                "",
                is_awaited=not step.overlaps,
                since=self.reducing.at if self.reducing is not None else None,
            )

    def _accumulate(self, unit: int) -> None:
        """Keep a reduced shard as the gradient, or add it to the existing one.

        The result of the all-reduce over replicas lives until backward ends or the unit is reduced
        again.
        """
        shard, was_there = self.reduced[unit], self.has_shard[unit]
        kept, dtype = self.kept[unit], self.scene.plan.update.layout.gradients
        self.has_shard[unit] = True
        if self.casts_after:
            self.tape.add(kept)
            self.tape.computed_beside(OperatorKind.COPY, dtype, shard + kept)
        if was_there:
            self.tape.computed_beside(OperatorKind.POINTWISE, dtype, 3 * kept)
        # Without a cast or an addition the gradients are views of the result, which then stays.
        if self.shards[unit].replicas and (self.casts_after or was_there):
            self.all_reduced[unit] = shard
        elif self.casts_after or was_there:
            self.tape.add(-shard)
        if self.casts_after and was_there:
            self.tape.add(-self.kept[unit])

    def gathered_bytes(self) -> int:
        return self.gathers.gathered_bytes()

    def lingering_bytes(self) -> int:
        replicas = zip(self.all_reduced, self.scene.times, strict=True)
        return self.reduce_input + sum(size * times for size, times in replicas)

    def signature(self) -> Hashable:
        gathers = self.gathers
        return (
            (*gathers.is_gathered, *gathers.is_pending, *gathers.between, gathers.buffer),
            (*self.has_shard, *self.accumulates, *self.added, *self.last_gradient),
            tuple(tuple(fresh.items()) for fresh in self.fresh),
            (self.reduce_input, *self.all_reduced, self.reduces, self.is_last),
            self.unwrapped.signature(),
        )


def _list_tensors(unit: UnitFacts) -> list[TensorFacts]:
    """Return a unit's tensors in the order of FSDP2."""
    tensors = {tensor.name: tensor for tensor in unit.tensors}
    return [tensors[name] for name in fully_shard_order(tuple(tensors))]


def _padded_sizes(
    units: Sequence[Sequence[TensorFacts]], shards: Sequence[UnitShards]
) -> list[list[int]]:
    """Return the elements of one rank's padded part of each wrapped tensor, by unit."""
    rows: dict[tuple[UnitShards, Shapes], list[int]] = {}
    padded: list[list[int]] = []
    for tensors, own in zip(units, shards, strict=True):
        key = own, tuple([tensor.shape for tensor in tensors])
        if key not in rows:
            rows[key] = [own.padded_elements(shape) for shape in key[1] if own.axes]
        padded.append(rows[key])
    return padded
