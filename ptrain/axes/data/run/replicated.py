"""Replicas: DistributedDataParallel, summing, in buckets of any size, in or after backward.

Note: static_graph stays off. It changes no number, and spares only the search for unused
parameters, which is off already; and torch 2.13 fails in `no_sync` on the first micro-batch of such
a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ptrain.axes.data.run.flat import ParameterWrap
from ptrain.axes.data.run.spread import ZeroRedundancyUpdate
from ptrain.axes.data.run.summing import handing_over
from ptrain.facts.stages import Units
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import Replicate
from ptrain.timeline import Kind

_STOCK_BUCKET_MB = 25


class ReplicatedWrap(ParameterWrap):
    """DistributedDataParallel, summing. Its constructor sends nothing: all ranks hold the same
    initial weights already."""

    def __init__(
        self,
        model: nn.Module,
        step: Replicate,
        mesh: Mesh,
        units: Units,
        registry: Registry,
    ) -> None:
        super().__init__(model, units)
        device = mesh.world.device
        self.step, self.mesh, self.registry = step, mesh, registry
        self.group = mesh.group(step.axes)
        self.keeps_buckets = False
        self._buckets: list[torch.Tensor] = []  # of this step, in the order in which they were full
        self._unreduced: list[torch.Tensor] = []
        self._reducing: list[dist.Work] = []
        self._trained = [p for p in model.parameters() if p.requires_grad]
        with warnings.catch_warnings():
            # 2.13 renames broadcast_buffers, but its successor would still broadcast once
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=self.group,
                bucket_cap_mb=_bucket_cap_mb(step),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        self.wrapped.register_comm_hook(None, handing_over(self._receive, registry))
        self.module = self.wrapped

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if is_last:
            yield
            self._reduce_kept()
            return
        self.keeps_buckets = True
        with self.wrapped.no_sync():
            yield

    def forward_pass(self) -> AbstractContextManager[None]:
        """Whether a backward pass reduces is not known yet, and told in it."""
        self.keeps_buckets = True
        accumulating: AbstractContextManager[None] = self.wrapped.no_sync()
        return accumulating

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        assert kind is Kind.BACKWARD, "torch's replicas wait for autograd to accumulate"
        if is_last:
            self.wrapped.reducer.prepare_for_backward([])
        yield
        if is_last:
            self._reduce_kept()

    def _receive(self, bucket: torch.Tensor) -> None:
        """Sum a full bucket over the ranks, asynchronously; without overlap, later. The loss is
        divided by a global count already."""
        self._buckets.append(bucket)
        if self.step.overlaps:
            if (work := dist.all_reduce(bucket, group=self.group, async_op=True)) is not None:
                self._reducing.append(work)
        else:
            self._unreduced.append(bucket)

    def _reduce_kept(self) -> None:
        """When backward is over: wait for what is on its way. Without overlap, reduce one bucket
        after the other."""
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        for bucket in self._unreduced:
            dist.all_reduce(bucket, group=self.group)
        self._unreduced.clear()

    def gradients(self) -> list[torch.Tensor]:
        """Return the buckets: DDP's are few, and hold nothing else. Where somebody put another
        gradient in place of a view of them, return what he put there."""
        return list(self._buckets) if self._have_all() else super().gradients()

    def _have_all(self) -> bool:
        """Return whether the buckets have all gradients."""
        if sum(map(torch.numel, self._buckets)) != sum(map(torch.numel, self._trained)):
            return False
        storages = {bucket.untyped_storage()._cdata for bucket in self._buckets}
        return all(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata in storages
            for parameter in self._trained
        )

    def clear_gradients(self) -> None:
        """Accumulation adds into the buckets, so they are zeroed; else autograd's gradients are
        copied into them, which saves reading them. In the second step DDP makes its buckets
        anew."""
        self._buckets.clear()
        for target in self._targets():
            if self.keeps_buckets and target.parameter.grad is not None:
                target.parameter.grad.zero_()
            else:
                target.parameter.grad = None

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> ZeroRedundancyUpdate | None:
        if not self.step.zero_redundancy:
            return None
        return ZeroRedundancyUpdate(
            list(self._targets()),
            optimizer,
            self.mesh.submesh(self.step.axes),
            self.registry,
            stands_in=self.mesh.world.stands_in,
        )


def _bucket_cap_mb(step: Replicate) -> float | None:
    """None for torch's own size, with which it keeps the first bucket small."""
    cap = step.bucket_bytes / 2**20
    return None if cap == _STOCK_BUCKET_MB else cap
