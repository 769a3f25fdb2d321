"""Simulates the update of tensors that stay in place, for any wrap.

The training code of the update (`optimizers.update`) runs on fake tensors, once for each kind of
unit. A single device has no wrapper: only autograd and the optimizer allocate.

DistributedDataParallel has gradient buckets that always live. They are filled in the order in which
gradients arrive, and all-reduced when they are full.

`torch/csrc/distributed/c10d/reducer.cpp`: after the first backward pass the buckets are rebuilt
once in the order of arrival, which rank 0 broadcasts as indices and then as bucket sizes
(`sync_bucket_indices`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from ptrain.axes.data.cost import assign_owners, bucket_caps, bucket_sizes
from ptrain.cost import Collective, Footprint, Phase, State, Traffic
from ptrain.derivation.clock import Arrival
from ptrain.derivation.ghosts import wrapping
from ptrain.derivation.ghosts.wrapping import Times, WrapContext, Wrapping, by_operator, state_rows
from ptrain.derivation.tape import Account, Scene, Tape, Wrap
from ptrain.facts.model import TensorFacts, UnitFacts
from ptrain.optimizers.ghost import GhostOptimizerFactory, GhostScale
from ptrain.optimizers.groups import Rule, rules_of_unit, uniform_rule
from ptrain.optimizers.update import ResidentSlot, Slot, TargetsUpdate
from ptrain.runtime.ghost import Ghost, GhostRuntime, Storage
from ptrain.runtime.interface import Shape
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import ranks_over
from ptrain.steps.wraps import Replicate
from ptrain.timeline import Complete

Shapes = tuple[Shape, ...]


class Cost(NamedTuple):
    """Bytes of optimizer state that an update keeps, and bytes that it allocates temporarily."""

    kept: int
    rise: int


class InPlaceTarget:
    """A tensor that is updated where it is stored, and its gradient."""

    is_in_place = True
    is_frozen = False

    def __init__(self, value: Ghost, gradient: Ghost, *, owns_master: bool) -> None:
        self._value, self._gradient, self.owns_master = value, gradient, owns_master

    def persistent_parameter(self) -> Ghost | None:
        """Return None: the tensor is already in place."""

    def working_gradient(self) -> Ghost:
        return self._gradient

    def value(self) -> Ghost:
        return self._value

    def store(self, value: Ghost) -> None:
        """Do nothing: the value is already stored, or copied in place."""

    def local_numels(self) -> list[int]:
        return [self._value.numel]

    def create_slot(self, initial: Ghost) -> Slot[Ghost]:
        return ResidentSlot(initial)


class InPlace(Wrapping):
    """A wrapping whose tensors stay in place.

    Parameters have `stored` elements, gradients `stored_gradients`. The optimizer state is that of
    the shapes in `updated`.
    """

    owns_master = False

    def __init__(self, wrapped: WrapContext) -> None:
        self.wrapped = wrapped
        self._costs: dict[tuple[Shapes, tuple[Rule, ...]], Cost] = {}

    @cached_property
    def stored_elements(self) -> int:
        """The elements of parameters on every rank, including padding and without quantized
        weights."""
        return self.wrapped.facts.numel - self.quantized_bytes

    @cached_property
    def quantized_bytes(self) -> int:
        """The bytes of quantized weights on every rank, including padding."""
        return self.wrapped.facts.quantized_numel

    @cached_property
    def stored_gradients(self) -> int:
        """The elements of gradients on every rank. Frozen parameters have none."""
        return self.wrapped.facts.trained_numel

    def updated_shapes(self, unit: UnitFacts, shard: int) -> Shapes:
        """Return the shapes of a unit's tensors that the rank with this shard updates.

        Args:
            unit: The unit, with the shapes of one tp rank.
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        return unit.trained_shapes

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout = self.wrapped.plan.update.layout
        parameters = self.stored_elements * layout.parameters.itemsize + self.quantized_bytes
        gradients = self.stored_gradients * layout.gradients.itemsize
        return state_rows(parameters, self.optimizer_bytes(shard), gradients)

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        yield unit.trained_numel

    @cached_property
    def kinds(self) -> list[tuple[UnitFacts, int]]:
        """One unit of each kind, with the number of equal units.

        Units of equal shapes and update rules have equal memory and traffic.
        """
        kinds: dict[Hashable, list[UnitFacts]] = {}
        apart = self.wrapped.plan.is_apart
        for unit in self.wrapped.facts.units:
            frozen = tuple([tensor.is_frozen for tensor in unit.tensors])
            own = self.rules_of(unit)
            kind = unit.shapes, frozen, unit.is_root, own, apart(unit.modules), self.turn_of(unit)
            kinds.setdefault(kind, []).append(unit)
        return [(units[0], len(units)) for units in kinds.values()]

    def rules_of(self, unit: UnitFacts) -> tuple[Rule, ...]:
        """Return the update rule of each trained tensor of a unit."""
        return rules_of_unit(self.wrapped.spec.optimizer, unit)

    def turn_of(self, unit: UnitFacts) -> Hashable:
        """Return a key of the treatment that depends on a unit's place among others."""
        return None

    def numels(self, shard: int) -> list[int]:
        """Return the elements of each tensor that the rank with this shard updates."""
        by_kind: dict[tuple[Shapes, bool], list[int]] = {}
        numels: list[int] = []
        for unit in self.wrapped.facts.units:
            kind = unit.trained_shapes, self.wrapped.plan.is_apart(unit.modules)
            if kind not in by_kind:
                by_kind[kind] = [math.prod(shape) for shape in self.updated_shapes(unit, shard)]
            numels += by_kind[kind]
        return numels

    def shapes_by_rule(self, shard: int) -> dict[str, list[Shape]]:
        """Return the shapes that the rank with this shard updates, by update rule.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        by_rule: dict[str, list[Shape]] = {}
        for unit, times in self.kinds:
            own = self.rules_of(unit)
            for shape, rule in zip(self.updated_shapes(unit, shard), own, strict=True):
                by_rule.setdefault(rule.name, []).extend([shape] * times)
        return by_rule

    def optimizer_bytes(self, shard: int) -> int:
        """Return the bytes of optimizer state on the rank with this shard.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        return sum(
            times * self._cost(unit, self.updated_shapes(unit, shard)).kept
            for unit, times in self.kinds
        )

    def temporary_bytes(self, shard: int) -> Iterator[int]:
        """Yield the temporary bytes of the update of each kind of unit.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        yield from (
            self._cost(unit, self.updated_shapes(unit, shard)).rise for unit, _ in self.kinds
        )

    def _cost(self, unit: UnitFacts, shapes: Shapes) -> Cost:
        """Return the cached cost of a unit's update."""
        key = shapes, self.rules_of(unit)
        if key not in self._costs:
            self._costs[key] = self.update_cost(*key)
        return self._costs[key]

    def update_cost(self, shapes: Shapes, rules: Sequence[Rule]) -> Cost:
        """Return the cost of updating tensors of these shapes.

        Args:
            shapes: Local shapes, in the order of the update.
            rules: The update rule of each shape.
        """
        spec, layout = self.wrapped.spec, self.wrapped.plan.update.layout
        own = spec.optimizer, layout, self.owns_master, spec.is_for_cuda
        return _cost_of(tuple(shapes), tuple(rules), *own)


class InPlaceUpdate(Wrap):
    """The end of a step of a wrap whose tensors stay in place."""

    tape: Tape
    wrapping: InPlace

    def kind_of_shard(self, shard: int) -> Hashable:
        return self.wrapping.kind_of_shard(shard)

    def reduce(self) -> None:
        """Reduce nothing. The overflow check of scaled gradients allocates a scalar."""
        plan = self.scene.plan
        if plan.update.layout.scales_loss and plan.wrap.keeps_gradients_on_device:
            self.tape.spike(DType.FP32.itemsize)

    def norm_groups(self, shard: int) -> list[list[int]] | None:
        return by_operator(self.scene, self.wrapping.numels(shard))

    def update(self, shard: int) -> None:
        # A spike for each kind is enough: the update of equal units rises to equal levels, and the
        # temporaries of a unit are freed before the next one is updated.
        for rise in self.wrapping.temporary_bytes(shard):
            self.tape.spike(rise)
        if self.tape.clock is not None:
            for rule, shapes in self.wrapping.shapes_by_rule(shard).items():
                self.tape.clock.run_update(rule, self.scene.plan.update.layout, shapes)


class OneDevice(InPlace):
    """The wrapping of a model without a wrapper."""

    reach: int | None = 0

    def make_wrap(self, scene: Scene) -> Local:
        return Local(scene, self)


class Local(InPlaceUpdate):
    """The wrap that keeps autograd's gradients in place and adds later ones to them."""

    def __init__(self, scene: Scene, wrapping: InPlace) -> None:
        self.scene, self.tape, self.wrapping = scene, scene.tape, wrapping
        self.is_first = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first = is_first

    def complete(self, gradient: Complete) -> None:
        dtype = self.scene.plan.update.layout.gradients
        if self.is_first:
            self.tape.spike(wrapping.copy_bytes(gradient))
            self.tape.add(wrapping.kept_bytes(gradient))
            wrapping.time_copy(self.tape, dtype, gradient)
        else:
            self.tape.add(wrapping.added_bytes(gradient))
            wrapping.time_addition(self.tape, dtype, gradient)

    def signature(self) -> Hashable:
        return self.is_first


@lru_cache(maxsize=2**8)  # a search derives many specs with equal updates
def _cost_of(
    shapes: Shapes,
    of_shapes: tuple[Rule, ...],
    optimizer: OptimizerSpec,
    layout: Layout,
    owns_master: bool,
    is_for_cuda: bool,
) -> Cost:
    tape = Tape(is_reading=False)
    room, dtype = GhostRuntime(tape, {}, {}), layout.parameters
    if owns_master and layout.master is not None:
        dtype = layout.master

    def ghost(shape: Shape, dtype: DType, state: State) -> Ghost:
        size = math.prod(shape) * dtype.itemsize
        return Ghost(Storage(size, Tier.DEVICE, state, "", tape), dtype, shape)

    targets = [
        InPlaceTarget(
            ghost(shape, dtype, State.PARAMETERS),
            ghost(shape, layout.gradients, State.GRADIENTS),
            owns_master=owns_master,
        )
        for shape in shapes
    ]
    rules = GhostOptimizerFactory(tape, is_cpu=not is_for_cuda)
    own = [[(rule,) for rule in of_shapes]]
    update = TargetsUpdate([targets], optimizer, layout, room, rules, own)
    tape.is_reading = True
    update.step(0.0, GhostScale(tape) if layout.scales_loss else None)
    tape.is_reading = False
    kept = {id(ghost.storage): ghost.storage.size for _, ghost in update.storages()}
    return Cost(sum(kept.values()), tape.peak)


_INDEX_BYTES = 4  # int32


class Replicas(InPlace):
    """A model whose parameters and gradients are replicated on all ranks."""

    def __init__(self, wrapped: WrapContext, step: Replicate) -> None:
        super().__init__(wrapped)
        self.step = step

    def buckets(self) -> list[int]:
        """Return the bytes of the gradient buckets, in the order of their reduction."""
        facts, itemsize = self.wrapped.facts, self.wrapped.plan.update.layout.gradients.itemsize
        numel = {tensor.name: tensor.numel for tensor in facts.tensors}
        # The rebuilt buckets follow the arrival order of the first backward pass
        # (`Reducer::rebuild_buckets`, torch 2.13), not the reversed order of parameters with which
        # DDP starts. A steady step has no other.
        return bucket_sizes(
            (numel[name] * itemsize for name in facts.gradient_order),
            bucket_caps(self.step.bucket_bytes),
        )

    def traffic(self, times: Times | None) -> Iterator[Traffic]:
        account, facts = Account(self.wrapped.spec), self.wrapped.facts
        scene = self.wrapped.make_scene(facts.units, account)
        scene.tape.enter(Phase.SETUP)
        player = self.make_wrap(scene)
        player.rebuild_buckets()
        scene.tape.enter(Phase.BACKWARD)
        player.begin(is_first=True, is_last=True)  # micro-batches before the last send nothing
        itemsize = self.wrapped.plan.update.layout.gradients.itemsize
        numel = {tensor.name: tensor.numel for tensor in facts.tensors}
        for name in facts.gradient_order:
            player.complete(Complete(name, numel[name] * itemsize))
        player.end_passes()
        scene.tape.enter(Phase.UPDATE)
        player.update(0)
        yield from account.rows

    def make_wrap(self, scene: Scene) -> Replicated:
        return Replicated(scene, self)


class Replicated(Local):
    """The wrap of DistributedDataParallel. With one micro-batch, gradients are copied into the
    buckets; with several, they are added to them. autograd's gradient is then freed at once."""

    def __init__(self, scene: Scene, replicas: Replicas) -> None:
        super().__init__(scene, replicas)
        self.replicas, self.axes = replicas, replicas.step.axes
        # Buckets live for the full step, and gradients are views of them
        # (`gradient_as_bucket_view`). Without the views every gradient would exist twice.
        self.tape.add(scene.facts.trained_numel * scene.plan.update.layout.gradients.itemsize)
        self.copies = scene.plan.accumulate.micro_batches == 1
        self.root = len(scene.facts.units) - 1
        self.due: list[int] = []  # bytes of buckets that are not reduced yet
        self.arrived = 0  # bytes of arrived gradients whose bucket is not reduced yet
        self.reducing: list[Arrival] = []

    def rebuild_buckets(self) -> None:
        """Broadcast the bucket order after a run's first backward pass: the indices of all tensors
        with their number, and then the bucket sizes."""
        tensors, buckets = len(self.scene.facts.trained), len(self.replicas.buckets())
        # `sync_bucket_indices` appends the number of buckets to the indices, hence one more
        # element.
        for count in (tensors + 1, buckets):
            self.tape.record_collective(
                Collective.BROADCAST, self.axes, State.OTHER, _INDEX_BYTES * count, ""
            )

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        super().begin(is_first=is_first, is_last=is_last)
        if is_last and (self.tape.account is not None or self.tape.clock is not None):
            self.due = self.replicas.buckets()
        self.arrived = 0

    def complete(self, gradient: Complete) -> None:
        """Accept a gradient. A full bucket is reduced while the gradient that filled it is still
        alive."""
        if gradient.cloned and self.copies:
            self.tape.spike(wrapping.copy_bytes(gradient))
        dtype = self.scene.plan.update.layout.gradients
        if self.copies:
            self.tape.record_operator(OperatorKind.COPY, dtype, 2 * gradient.size)
        else:
            wrapping.time_addition(self.tape, dtype, gradient)
        self.arrived += gradient.size
        if self.replicas.step.overlaps:
            # Buckets are reduced in order. They are filled in the order of arrival, so the next one
            # is full once its number of bytes has arrived, whichever tensors these were.
            while self.due and self.due[0] <= self.arrived:
                self._reduce()
        self.tape.add(wrapping.added_bytes(gradient))

    def after_backward(self, unit: int) -> None:
        """Reduce the remaining buckets when the root's backward ends. In a pipeline, wait for all
        passes."""
        if unit == self.root and self.scene.plan.pipeline is None:
            self.end_passes()

    def end_passes(self) -> None:
        """Reduce the remaining buckets in order, and wait for all reductions."""
        while self.due:
            self._reduce()
        for arrival in self.reducing:
            arrival.wait()
        self.reducing = []

    def _reduce(self) -> None:
        """All-reduce the next bucket in place."""
        size = self.due.pop(0)
        self.arrived -= size
        self.tape.hook(Hook.DDP_BUCKET)
        arrival = self.tape.record_collective(
            Collective.ALL_REDUCE,
            self.axes,
            State.GRADIENTS,
            size,
            "",
            is_awaited=not self.replicas.step.overlaps,
        )
        if arrival is not None:
            self.reducing.append(arrival)

    def norm_groups(self, shard: int) -> list[list[int]] | None:
        """Return the elements of the buckets, or of each tensor if sharded operators have separate
        norms."""
        clip, facts = self.scene.plan.clip, self.scene.facts
        # Without sharded operators the norm is taken of whole buckets, which are contiguous. Copies
        # of a tensor are counted on another stage only, so that buckets with copies are split into
        # tensors.
        is_cut = clip is not None and bool(clip.operator_axes)
        if is_cut or any(tensor.is_copy for tensor in facts.trained):
            return super().norm_groups(shard)
        itemsize = self.scene.plan.update.layout.gradients.itemsize
        return [[size // itemsize for size in self.replicas.buckets()]]

    def finish_update(self) -> None:
        """Zero the buckets if gradients are added to them."""
        if not self.copies:
            layout = self.scene.plan.update.layout
            size = self.scene.facts.trained_numel * layout.gradients.itemsize
            self.tape.record_operator(OperatorKind.POINTWISE, layout.gradients, size)


# torch's ZeroRedundancyOptimizer with DistributedDataParallel: full tensors are distributed over
# the replicas, and each owner broadcasts the parameters that it updated.
#
# `torch/distributed/optim/zero_redundancy_optimizer.py`: tensors are assigned largest first, each
# to the rank with the fewest elements (`_partition_parameters`, `axes.data.cost.spread`). With
# `parameters_as_bucket_view` parameters are views of a bucket per owner. A rank that owns no tensor
# has a bucket of one fp32 element (`_build_param_buckets`).


class SpreadUpdate(Replicas):
    """A replicated model whose optimizer state is distributed over the ranks by tensor."""

    @cached_property
    def owned_tensors(self) -> list[list[TensorFacts]]:
        """The tensors that each rank updates."""
        tensors, ranks = self.wrapped.facts.trained, ranks_over(self.wrapped.spec, self.step.axes)
        owners = assign_owners([tensor.numel for tensor in tensors], ranks)
        owned: list[list[TensorFacts]] = [[] for _ in range(ranks)]
        for tensor, owner in zip(tensors, owners, strict=True):
            owned[owner].append(tensor)
        return owned

    def largest_tensor(self, shard: int) -> TensorFacts | None:
        """Return the largest tensor that the rank with this shard updates, or None."""
        return max(self.owned_tensors[shard], key=lambda tensor: tensor.numel, default=None)

    def parameter_buckets(self) -> list[int]:
        """Return the bytes of the bucket that each owner broadcasts."""
        itemsize = self.wrapped.plan.update.layout.parameters.itemsize
        return [
            sum(tensor.numel for tensor in tensors) * itemsize or DType.FP32.itemsize
            for tensors in self.owned_tensors
        ]

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the shard: each one owns different tensors."""
        return shard

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout = self.wrapped.plan.update.layout
        shapes: dict[Shapes, int] = {}
        for tensor in self.owned_tensors[shard]:
            shapes[tensor.shape,] = shapes.get((tensor.shape,), 0) + 1
        # all parameters have one rule (`axes.data.form`)
        rule = uniform_rule(self.wrapped.spec.optimizer)
        optimizer = sum(
            times * self.update_cost(case, [rule]).kept for case, times in shapes.items()
        )
        gradients = self.stored_gradients * layout.gradients.itemsize
        frozen = (self.stored_elements - self.stored_gradients) * layout.parameters.itemsize
        frozen += self.quantized_bytes
        return state_rows(sum(self.parameter_buckets()) + frozen, optimizer, gradients)

    def notes(self) -> Iterator[str]:
        axes = " and ".join(self.step.axes)
        yield (
            "with torch's ZeroRedundancyOptimizer, DistributedDataParallel all-reduces full "
            "gradients, 2r|G|, and owners broadcast updated parameters, r|Θ|: 3 units on "
            f"{axes}. The same placement on dp_shard reduce-scatters and all-gathers: 2 units"
        )

    def make_wrap(self, scene: Scene) -> SpreadReplicated:
        return SpreadReplicated(scene, self)


class SpreadReplicated(Replicated):
    """The wrap of DistributedDataParallel with ZeroRedundancyOptimizer, which broadcasts parameter
    buckets after the update."""

    def __init__(self, scene: Scene, spread_update: SpreadUpdate) -> None:
        super().__init__(scene, spread_update)
        self.spread_update = spread_update

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return True if the rank updates a tensor, or the shape of its largest tensor.

        Gradients are replicated, and a fused update has equal memory for any tensors. If the update
        is not fused, the largest tensor determines its memory.
        """
        largest = self.spread_update.largest_tensor(shard)
        if largest is None or not self.scene.spec.optimizer.properties.temporaries:
            return largest is not None
        return largest.shape

    def update(self, shard: int) -> None:
        """Update the owned parameters, which are not cast, and broadcast them.

        All broadcasts are issued before the first of them is awaited. The time is that of the owner
        with the most elements.
        """
        if largest := self.spread_update.largest_tensor(shard):
            rule = uniform_rule(self.scene.spec.optimizer)
            self.tape.spike(self.spread_update.update_cost((largest.shape,), [rule]).rise)
        update = self.scene.plan.update
        if self.tape.clock is not None:
            # A rank's step ends when it has all buckets. The last one is broadcast by the owner
            # that updates most.
            most = max(self.spread_update.owned_tensors, key=lambda own: sum(t.numel for t in own))
            shapes = [tensor.shape for tensor in most]
            self.tape.clock.run_update(update.optimizer, update.layout, shapes)
        # `ZeroRedundancyOptimizer._sync_params` (torch 2.13) collects the handles of all owners'
        # broadcasts (`async_op=True`) before it waits for any.
        arrivals = [
            self.tape.record_collective(
                Collective.BROADCAST, self.axes, State.PARAMETERS, size, "", is_awaited=False
            )
            for size in self.spread_update.parameter_buckets()
        ]
        for arrival in arrivals:
            if arrival is not None:
                arrival.wait()
