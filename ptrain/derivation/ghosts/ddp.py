"""torch's DistributedDataParallel: buckets of gradients that live always, in the order in which
gradients arrive, each summed when it is full.

`torch/csrc/distributed/c10d/reducer.cpp`: after a first backward pass the buckets are made anew in
the order of arrival, which rank 0 broadcasts as indices and then as bucket sizes
(`sync_bucket_indices`), once.
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
    """A model whose Theta and G are whole on all ranks."""

    def __init__(self, wrapped: Wrapped, step: Replicate) -> None:
        super().__init__(wrapped)
        self.step = step

    def buckets(self) -> list[int]:
        """Return the bytes of the gradient buckets, in the order in which they are reduced."""
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
    """Buckets live always. Where they are added to (K > 1) or copied into, autograd's own gradient
    goes at once."""

    def __init__(self, scene: Scene, replicas: Replicas) -> None:
        super().__init__(scene, replicas)
        self.replicas, self.axes = replicas, replicas.step.axes
        self.tape.add(scene.facts.trained_numel * scene.plan.update.layout.gradients.itemsize)
        self.copies = scene.plan.accumulate.micro_batches == 1
        self.root = len(scene.facts.units) - 1
        self.due: list[int] = []  # bytes of buckets that are to be reduced
        self.arrived = 0  # bytes of gradients that none of them has
        self.reducing: list[Arrival] = []

    def rebuild_buckets(self) -> None:
        """A run's first backward pass is over: the indices of all tensors and how many there are,
        and then the sizes of the buckets."""
        tensors, buckets = len(self.scene.facts.trained), len(self.replicas.buckets())
        for count in (tensors + 1, buckets):
            self.tape.sent(Collective.BROADCAST, self.axes, State.OTHER, _INDEX_BYTES * count, "")

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        super().begin(is_first=is_first, is_last=is_last)
        if is_last and (self.tape.account is not None or self.tape.clock is not None):
            self.due = self.replicas.buckets()
        self.arrived = 0

    def complete(self, gradient: Complete) -> None:
        """A full bucket is reduced while the gradient that filled it still lives."""
        if gradient.cloned and self.copies:
            self.tape.spike(autograd.rise(gradient))
        dtype = self.scene.plan.update.layout.gradients
        if self.copies:
            self.tape.computed(OperatorKind.COPY, dtype, 2 * gradient.size)
        else:
            autograd.adds(self.tape, dtype, gradient)
        self.arrived += gradient.size
        if self.replicas.step.overlaps:
            while self.due and self.due[0] <= self.arrived:
                self._reduce()
        self.tape.add(autograd.added(gradient))

    def after_backward(self, unit: int) -> None:
        """Reduce what is due still when the root's backward is over; in a pipeline when all passes
        are."""
        if unit == self.root and self.scene.plan.pipeline is None:
            self.end_passes()

    def end_passes(self) -> None:
        """Reduce one bucket after the other; then all of them are awaited."""
        while self.due:
            self._reduce()
        for arrival in self.reducing:
            arrival.wait()
        self.reducing = []

    def _reduce(self) -> None:
        """A bucket, in place."""
        size = self.due.pop(0)
        self.arrived -= size
        self.tape.hook(Hook.DDP_BUCKET)
        arrival = self.tape.sent(
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
        """Return the buckets' elements, unless the norm asks what of them operator axes cut."""
        clip, facts = self.scene.plan.clip, self.scene.facts
        is_cut = clip is not None and bool(clip.operator_axes)
        if is_cut or any(tensor.is_copy for tensor in facts.trained):
            return super().clipped(shard)
        itemsize = self.scene.plan.update.layout.gradients.itemsize
        return [[size // itemsize for size in self.replicas.buckets()]]

    def finish_update(self) -> None:
        """Buckets that gradients are added to are zeroed for the next step."""
        if not self.copies:
            layout = self.scene.plan.update.layout
            size = self.scene.facts.trained_numel * layout.gradients.itemsize
            self.tape.computed(OperatorKind.POINTWISE, layout.gradients, size)


# torch's ZeroRedundancyOptimizer beside DistributedDataParallel: whole tensors are spread over the
# replicas, and each owner broadcasts what it updated.
#
# `torch/distributed/optim/zero_redundancy_optimizer.py`: the largest tensor first, each to the
# rank that has least so far (`_partition_parameters`, `axes.data.cost.spread`). With
# `parameters_as_bucket_view` parameters are views of a bucket per owner, and a rank that owns
# nothing has a bucket of one element of fp32 (`_build_param_buckets`).


class SpreadUpdate(Replicas):
    """A model whose Omega is spread over all ranks, tensor by tensor."""

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
        """Return the largest tensor that the rank with this shard updates, if it updates any."""
        return max(self.owned[shard], key=lambda tensor: tensor.numel, default=None)

    def parameter_buckets(self) -> list[int]:
        """Return the bytes of the bucket that each owner sends."""
        itemsize = self.wrapped.plan.update.layout.parameters.itemsize
        return [
            sum(tensor.numel for tensor in tensors) * itemsize or DType.FP32.itemsize
            for tensors in self.owned
        ]

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return the shard: each owns other tensors."""
        return shard

    def footprints(self, shard: int) -> Iterator[Footprint]:
        layout = self.wrapped.plan.update.layout
        shapes: dict[Shapes, int] = {}
        for tensor in self.owned[shard]:
            shapes[tensor.shape,] = shapes.get((tensor.shape,), 0) + 1
        # every rule that is spread goes element by element: no tensor is another case
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
    """The buckets of gradients, and after the update those of parameters."""

    def __init__(self, scene: Scene, spread_update: SpreadUpdate) -> None:
        super().__init__(scene, spread_update)
        self.spread_update = spread_update

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return whether the rank updates anything: gradients are whole, and an update has the same
        beside any tensor; of an update that is not fused, the largest of its tensors."""
        largest = self.spread_update.largest(shard)
        if largest is None or not self.scene.spec.optimizer.row.temporaries:
            return largest is not None
        return largest.shape

    def update(self, shard: int) -> None:
        """The optimizer works on the parameters themselves: nothing is cast. All broadcasts are
        issued before the first of them is awaited, and that of the owner with most comes last."""
        if largest := self.spread_update.largest(shard):
            self.tape.spike(self.spread_update.played((largest.shape,), [False]).rise)
        update = self.scene.plan.update
        if self.tape.clock is not None:
            most = max(self.spread_update.owned, key=lambda own: sum(t.numel for t in own))
            shapes = [tensor.shape for tensor in most]
            self.tape.clock.update(update.optimizer, update.layout, shapes)
        arrivals = [
            self.tape.sent(
                Collective.BROADCAST, self.axes, State.PARAMETERS, size, "", is_awaited=False
            )
            for size in self.spread_update.parameter_buckets()
        ]
        for arrival in arrivals:
            if arrival is not None:
                arrival.wait()
