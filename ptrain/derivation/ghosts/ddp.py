"""torch's DistributedDataParallel: buckets of gradients that live always, in the order in which
gradients arrive, each summed when it is full.

`torch/csrc/distributed/c10d/reducer.cpp`: after a first backward pass the buckets are made anew in
the order of arrival, which rank 0 broadcasts as indices and then as bucket sizes
(`sync_bucket_indices`), once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.data.cost import bucket_caps, bucket_sizes
from ptrain.costs import Collective, Phase, State, Traffic
from ptrain.derivation.clock_state import Arrival
from ptrain.derivation.ghosts import autograd
from ptrain.derivation.ghosts.in_place import InPlace
from ptrain.derivation.ghosts.one_device import Local
from ptrain.derivation.ghosts.wrapping import Times, Wrapped
from ptrain.derivation.tape import Account, Scene
from ptrain.spec.rates import Hook, OperatorKind
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
        player.after_backward(len(facts.units) - 1)
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
        itemsize = scene.plan.update.layout.gradients.itemsize
        self.tape.add(scene.facts.trained_numel * itemsize)
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
            size = _INDEX_BYTES * count
            self.tape.sent(Collective.BROADCAST, self.axes, State.OTHER, size, "")

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
        """Reduce what is due still when the root's backward is over, one bucket after the other;
        then all of them are awaited."""
        if unit != self.root:
            return
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
