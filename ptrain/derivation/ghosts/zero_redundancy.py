"""torch's ZeroRedundancyOptimizer beside DistributedDataParallel: whole tensors are spread over the
replicas, and each owner broadcasts what it updated.

`torch/distributed/optim/zero_redundancy_optimizer.py`: the largest tensor first, each to the rank
that has least so far (`_partition_parameters`, `axes.data.costs.spread`). With
`parameters_as_bucket_view` parameters are views of a bucket per owner, and a rank that owns nothing
has a bucket of one element of fp32 (`_build_param_buckets`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from ptrain.axes.data.costs import spread
from ptrain.costs import Collective, Footprint, State
from ptrain.derivation.ghosts.ddp import Replicas, Replicated
from ptrain.derivation.ghosts.in_place import Shapes
from ptrain.derivation.ghosts.wrapping import rows
from ptrain.derivation.tape import Scene
from ptrain.facts.model import TensorFacts
from ptrain.spec.layout import ranks_over
from ptrain.spec.precision import DType


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
            "torch's ZeroRedundancyOptimizer leaves the gradients to DistributedDataParallel, "
            "which sums them whole on every rank, 2r|G|, and its owners broadcast what they "
            f"updated, r|Θ|: 3 units on {axes}. The same tuple on dp_shard reduces to shards and "
            "gathers the updated ones: 2 units"
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
