"""Simulates DistributedDataParallel: gradient buckets that always live, filled in the order in
which gradients arrive, and all-reduced when full.

`torch/csrc/distributed/c10d/reducer.cpp`: after the first backward pass the buckets are rebuilt
once in the order of arrival, which rank 0 broadcasts as indices and then as bucket sizes
(`sync_bucket_indices`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from ptrain.axes.data.cost import bucket_caps, bucket_sizes, spread
from ptrain.cost import Collective, Footprint, Phase, State, Traffic
from ptrain.derivation.clock import Arrival
from ptrain.derivation.ghosts import autograd
from ptrain.derivation.ghosts.in_place import InPlace, Local, Shapes
from ptrain.derivation.ghosts.wrapping import Times, Wrapped, rows
from ptrain.derivation.tape import Account, Scene
from ptrain.facts.model import TensorFacts
from ptrain.spec.precision import DType
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import ranks_over
from ptrain.steps.wraps import Replicate
from ptrain.timeline import Complete

_INDEX_BYTES = 4  # int32


class Replicas(InPlace):
    """A model whose parameters and gradients are replicated on all ranks."""

    def __init__(self, wrapped: Wrapped, step: Replicate) -> None:
        super().__init__(wrapped)
        self.step = step

    def buckets(self) -> list[int]:
        """Return the bytes of the gradient buckets, in the order of their reduction."""
        facts, itemsize = self.wrapped.facts, self.wrapped.plan.update.layout.gradients.itemsize
        numel = {tensor.name: tensor.numel for tensor in facts.tensors}
        return bucket_sizes(
            (numel[name] * itemsize for name in facts.gradient_order),
            bucket_caps(self.step.bucket_bytes),
        )

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        account, facts = Account(self.wrapped.spec), self.wrapped.facts
        scene = self.wrapped.scene(facts.units, account)
        scene.tape.enter(Phase.SETUP)
        player = self.player(scene)
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

    def player(self, scene: Scene) -> Replicated:
        return Replicated(scene, self)


class Replicated(Local):
    """The wrap of DistributedDataParallel. With one micro-batch, gradients are copied into the
    buckets; with several, they are added to them. autograd's gradient is then freed at once."""

    def __init__(self, scene: Scene, replicas: Replicas) -> None:
        super().__init__(scene, replicas)
        self.replicas, self.axes = replicas, replicas.step.axes
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
            self.tape.spike(autograd.rise(gradient))
        dtype = self.scene.plan.update.layout.gradients
        if self.copies:
            self.tape.record_operator(OperatorKind.COPY, dtype, 2 * gradient.size)
        else:
            autograd.adds(self.tape, dtype, gradient)
        self.arrived += gradient.size
        if self.replicas.step.overlaps:
            while self.due and self.due[0] <= self.arrived:
                self._reduce()
        self.tape.add(autograd.added(gradient))

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

    def clipped(self, shard: int) -> list[list[int]] | None:
        """Return the elements of the buckets, or of each tensor if sharded operators have separate
        norms."""
        clip, facts = self.scene.plan.clip, self.scene.facts
        is_cut = clip is not None and bool(clip.operator_axes)
        if is_cut or any(tensor.is_copy for tensor in facts.trained):
            return super().clipped(shard)
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
    def owned(self) -> list[list[TensorFacts]]:
        """The tensors that each rank updates."""
        tensors, ranks = self.wrapped.facts.trained, ranks_over(self.wrapped.spec, self.step.axes)
        owners = spread([tensor.numel for tensor in tensors], ranks)
        owned: list[list[TensorFacts]] = [[] for _ in range(ranks)]
        for tensor, owner in zip(tensors, owners, strict=True):
            owned[owner].append(tensor)
        return owned

    def largest(self, shard: int) -> TensorFacts | None:
        """Return the largest tensor that the rank with this shard updates, or None."""
        return max(self.owned[shard], key=lambda tensor: tensor.numel, default=None)

    def parameter_buckets(self) -> list[int]:
        """Return the bytes of the bucket that each owner broadcasts."""
        itemsize = self.wrapped.plan.update.layout.parameters.itemsize
        return [
            sum(tensor.numel for tensor in tensors) * itemsize or DType.FP32.itemsize
            for tensors in self.owned
        ]

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the shard: each one owns different tensors."""
        return shard

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout = self.wrapped.plan.update.layout
        shapes: dict[Shapes, int] = {}
        for tensor in self.owned[shard]:
            shapes[tensor.shape,] = shapes.get((tensor.shape,), 0) + 1
        # all rules that may be distributed are elementwise, so no tensor is `hidden`
        optimizer = sum(times * self.played(case, [False]).kept for case, times in shapes.items())
        gradients = self.stored_gradients() * layout.gradients.itemsize
        frozen = (self.stored() - self.stored_gradients()) * layout.parameters.itemsize
        return rows(sum(self.parameter_buckets()) + frozen, optimizer, gradients)

    def notes(self) -> Iterator[str]:
        axes = " and ".join(self.step.axes)
        yield (
            "with torch's ZeroRedundancyOptimizer, DistributedDataParallel all-reduces full "
            "gradients, 2r|G|, and owners broadcast updated parameters, r|Θ|: 3 units on "
            f"{axes}. The same placement on dp_shard reduce-scatters and all-gathers: 2 units"
        )

    def player(self, scene: Scene) -> SpreadReplicated:
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
        largest = self.spread_update.largest(shard)
        if largest is None or not self.scene.spec.optimizer.row.temporaries:
            return largest is not None
        return largest.shape

    def update(self, shard: int) -> None:
        """Update the owned parameters, which are not cast, and broadcast them.

        All broadcasts are issued before the first of them is awaited. The time is that of the owner
        with the most elements.
        """
        if largest := self.spread_update.largest(shard):
            self.tape.spike(self.spread_update.played((largest.shape,), [False]).rise)
        update = self.scene.plan.update
        if self.tape.clock is not None:
            most = max(self.spread_update.owned, key=lambda own: sum(t.numel for t in own))
            shapes = [tensor.shape for tensor in most]
            self.tape.clock.update(update.optimizer, update.layout, shapes)
        arrivals = [
            self.tape.record_collective(
                Collective.BROADCAST, self.axes, State.PARAMETERS, size, "", is_awaited=False
            )
            for size in self.spread_update.parameter_buckets()
        ]
        for arrival in arrivals:
            if arrival is not None:
                arrival.wait()
