"""What a placement on the data axes does to a module: each plan step as a wrap, ready to run.

A wrap gives the module to call, says what belongs to one micro-batch, brings the gradients into
the optimizer's layout, and lists what the optimizer updates. The loop around it is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Protocol, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from ptrain.axes.data.flat import FlatWrap, parameters_by_unit
from ptrain.axes.data.summing import summing_hook
from ptrain.axes.data.target import Target, TensorTarget, local
from ptrain.costs import State
from ptrain.interpreter.comm import TaggedAllGather, TaggedReduceScatter
from ptrain.interpreter.mesh import Mesh
from ptrain.interpreter.registry import Registry
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Replicate, Units, Wrap
from ptrain.spec.batch import GradientSync

_STOCK_BUCKET_MB = 25


class Wrapped(Protocol):
    """What the program needs of a wrap."""

    module: nn.Module

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]: ...

    def end_evaluation(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def clear_gradients(self) -> None: ...

    def targets(self) -> Sequence[Sequence[Target]]: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class ParameterWrap:
    """What all wraps that leave parameters in the module have in common."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        self.module = model
        self.model = model
        self.unit_names = units
        self._groups: list[list[TensorTarget]] = []

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end_evaluation(self) -> None:
        """Nothing was gathered."""

    def reduce_gradients(self) -> None:
        """They are where the optimizer wants them."""

    def clear_gradients(self) -> None:
        for target in self._targets():
            target.parameter.grad = None

    def targets(self) -> list[list[TensorTarget]]:
        """A group per unit. Read off the module once, before it runs: while a unit is gathered, the
        module's parameters are not those that the rank stores."""
        if not self._groups:
            self._groups = [
                [TensorTarget(name, parameter) for name, parameter in named]
                for _, named in parameters_by_unit(self.model, self.unit_names)
            ]
        return self._groups

    def _targets(self) -> Iterator[TensorTarget]:
        return chain.from_iterable(self.targets())

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for target in self._targets():
            yield State.PARAMETERS, target.value()
            if target.gradient is not None:
                yield State.GRADIENTS, target.gradient


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
        self.keeps_buckets = False
        with warnings.catch_warnings():
            # 2.13 renames broadcast_buffers, but its successor would still broadcast once
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=mesh.group(step.axes),
                bucket_cap_mb=_bucket_cap_mb(step),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        self.wrapped.register_comm_hook(None, summing_hook(mesh.group(step.axes), registry))
        self.module = self.wrapped

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if is_last:
            yield
            return
        self.keeps_buckets = True
        with self.wrapped.no_sync():
            yield

    def clear_gradients(self) -> None:
        """Accumulation adds into the buckets, so they are zeroed; else autograd's gradients are
        copied into them, which saves reading them."""
        for target in self._targets():
            if self.keeps_buckets and target.parameter.grad is not None:
                target.parameter.grad.zero_()
            else:
                target.parameter.grad = None


def _bucket_cap_mb(step: Replicate) -> float | None:
    """None for torch's own size, with which it keeps the first bucket small."""
    cap = step.bucket_bytes / 2**20
    return None if cap == _STOCK_BUCKET_MB else cap


class FullyShardedWrap(ParameterWrap):
    """FSDP2 by unit, then the root; on a 2-d mesh it is HSDP. Averaging is off."""

    def __init__(
        self,
        model: nn.Module,
        step: FullyShard,
        mesh: Mesh,
        units: Units,
        registry: Registry,
    ) -> None:
        super().__init__(model, units)
        device_mesh = fsdp_mesh(step, mesh)
        for modules in units:
            fully_shard(
                [model.get_submodule(name) for name in modules],
                mesh=device_mesh,
                reshard_after_forward=step.sync.reshard_after_forward,
            )
        self.step = step
        self.sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(TaggedAllGather(registry))
            module.set_custom_reduce_scatter(TaggedReduceScatter(step.reduce_scatter, registry))

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        root = self.model
        sync = self.step.sync
        root.set_requires_gradient_sync(is_last or sync.gradients is GradientSync.EVERY)
        root.set_reshard_after_backward(is_last or sync.reshard_after_backward)
        return nullcontext()

    def end_evaluation(self) -> None:
        for module in self.sharded:
            module.reshard()

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """The shards, also while the module shows gathered parameters, and the gradients: reduced
        ones of the shards, unreduced ones (`sync: last`) of the gathered parameters."""
        for module in self.sharded:
            for group in _parameter_groups(module):
                for part in group.fsdp_params:
                    yield State.PARAMETERS, local(part.sharded_param.detach())
                    for holder in (part.sharded_param, getattr(part, "_unsharded_param", None)):
                        if holder is not None and holder.grad is not None:
                            yield State.GRADIENTS, local(holder.grad)


def _parameter_groups(module: FSDPModule) -> Sequence[FSDPParamGroup]:
    """What FSDP2 gathers together. Torch 2.13 has a list of groups, 2.11 one or none."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def apply(model: nn.Module, step: Wrap, mesh: Mesh, units: Units, registry: Registry) -> Wrapped:
    """Wrap `model` as the step says."""
    match step:
        case LocalGradients():
            return ParameterWrap(model, units)
        case Replicate():
            return ReplicatedWrap(model, step, mesh, units, registry)
        case FullyShard():
            return FullyShardedWrap(model, step, mesh, units, registry)
        case FlatUnits():
            return FlatWrap(model, step, mesh, units, registry)
        case _:
            assert_never(step)


def fsdp_mesh(step: FullyShard, mesh: Mesh) -> dist.DeviceMesh:
    """One dimension, or (replicate, shard)."""
    if not step.replicate_axes:
        return mesh.submesh(step.shard_axes)
    assert mesh.device_mesh is not None and len(step.replicate_axes + step.shard_axes) == 2
    return mesh.device_mesh[str(step.replicate_axes[0]), str(step.shard_axes[0])]
