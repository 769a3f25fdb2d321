"""What a placement on the data axes does to a module: each plan step as a wrap, ready to run.

A wrap gives the module to call, says what belongs to one micro-batch, brings the gradients into
the optimizer's layout, and lists what the optimizer updates. The loop around it is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol, assert_never

import torch
import torch.distributed as dist
from torch import nn

from ptrain.axes.data.flat import FlatWrap
from ptrain.axes.data.summing import summing_hook
from ptrain.costs import State
from ptrain.interpreter.mesh import Mesh
from ptrain.interpreter.registry import Registry
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Replicate, Wrap
from ptrain.spec.batch import GradientSync


class Target(Protocol):
    """A local tensor that the optimizer updates."""

    @property
    def gradient(self) -> torch.Tensor | None: ...

    def value(self) -> torch.Tensor: ...

    def store(self, value: torch.Tensor) -> None: ...


class Wrapped(Protocol):
    """What the program needs of a wrap."""

    module: nn.Module

    def micro_batch(self, is_last: bool) -> object: ...

    def end_evaluation(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def clear_gradients(self) -> None: ...

    def targets(self) -> list[list[Target]]: ...

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]: ...


class TensorTarget:
    """A parameter whose local part is a tensor: itself, or the local part of a DTensor."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def gradient(self) -> torch.Tensor | None:
        gradient = self.parameter.grad
        return None if gradient is None else local(gradient)

    def value(self) -> torch.Tensor:
        return local(self.parameter.detach())

    def store(self, value: torch.Tensor) -> None:
        held = self.value()
        if held.data_ptr() != value.data_ptr():
            held.copy_(value)


class ParameterWrap:
    """What all wraps that leave parameters in the module have in common."""

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self.module = model
        self.model = model
        self.unit_names = units

    def micro_batch(self, is_last: bool) -> object:
        return nullcontext()

    def end_evaluation(self) -> None:
        """Nothing was gathered."""

    def reduce_gradients(self) -> None:
        """They are where the optimizer wants them."""

    def clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def targets(self) -> list[list[TensorTarget]]:
        """A group per unit."""
        seen: set[int] = set()
        groups = []
        for name in self.unit_names:
            module = self.model.get_submodule(name)
            fresh = [p for p in module.parameters() if id(p) not in seen and p.requires_grad]
            seen.update(map(id, fresh))
            if fresh:
                groups.append([TensorTarget(parameter) for parameter in fresh])
        return groups

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for parameter in self.model.parameters():
            yield State.PARAMETERS, local(parameter.detach())
            if parameter.grad is not None:
                yield State.GRADIENTS, local(parameter.grad)


class ReplicatedWrap(ParameterWrap):
    """DistributedDataParallel, summing. Its constructor sends nothing: all ranks hold the same
    initial weights already."""

    def __init__(
        self,
        model: nn.Module,
        step: Replicate,
        mesh: Mesh,
        units: tuple[str, ...],
        registry: Registry,
    ) -> None:
        super().__init__(model, units)
        from torch.nn.parallel import DistributedDataParallel

        device = mesh.world.device
        self.keeps_buckets = False
        with warnings.catch_warnings():
            # 2.13 renames broadcast_buffers, but its successor would still broadcast once
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=mesh.group(step.axes),
                bucket_cap_mb=step.bucket_bytes / 2**20,
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
        for parameter in self.model.parameters():
            if self.keeps_buckets and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None


class FullyShardedWrap(ParameterWrap):
    """FSDP2 by unit, then the root; on a 2-d mesh it is HSDP. Averaging is off."""

    def __init__(
        self,
        model: nn.Module,
        step: FullyShard,
        mesh: Mesh,
        units: tuple[str, ...],
        registry: Registry,
    ) -> None:
        super().__init__(model, units)
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from ptrain.interpreter.comm import TaggedAllGather, TaggedReduceScatter

        device_mesh = fsdp_mesh(step, mesh)
        for name in units:
            fully_shard(
                model.get_submodule(name),
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

    def micro_batch(self, is_last: bool) -> object:
        root = self.model
        sync = self.step.sync
        root.set_requires_gradient_sync(is_last or sync.gradients is GradientSync.EVERY)
        root.set_reshard_after_backward(is_last or sync.reshard_after_backward)
        return nullcontext()

    def end_evaluation(self) -> None:
        for module in self.sharded:
            module.reshard()


def apply(
    model: nn.Module, step: Wrap, mesh: Mesh, units: tuple[str, ...], registry: Registry
) -> Wrapped:
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds; any other tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part
