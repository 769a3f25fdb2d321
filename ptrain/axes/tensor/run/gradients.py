"""What becomes of the gradients of parameters that several ranks compute a part of: a module's own
parameters are read through a function whose backward pass says so."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ptrain.cost import State
from ptrain.rooms.registry import Registry


class _ReadThrough(ParallelStyle):
    """While a module runs, its own parameters are what `through` makes of them, whoever holds
    them."""

    @abstractmethod
    def through(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        """`parameter` itself in a forward pass, with a backward pass of its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.put_on(module, device_mesh)

    def put_on(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Return the module, which reads its parameters so from now on."""
        names = [name for name, _ in module.named_parameters(recurse=False)]

        def enter(module: nn.Module, _: object) -> None:
            for name in names:  # before nn.Module looks among its parameters, it looks here
                held = module._parameters[name]
                assert held is not None
                module.__dict__[name] = self.through(held, device_mesh)

        def leave(module: nn.Module, *_: object) -> None:
            for name in names:
                module.__dict__.pop(name, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class OwnSlices(_ReadThrough):
    """Of a tensor that is cut, for a module that computes with the rank's slice alone."""

    def through(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Registering(_ReadThrough):
    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self.registry = registry


class GradientsAsKept(_Registering):
    """Of a tensor that is used on a rank's tokens, or cut while its gradient comes whole."""

    def through(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return _AsKept.apply(parameter, self.registry)


class SummedGradients(_Registering):
    """Of a tensor that every rank has whole and uses on its own slice of the features (a norm of
    the heads within attention): what the ranks' gradients add up to is the gradient of each."""

    def through(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return _Summed.apply(parameter, device_mesh.get_group(), self.registry)


class _AsKept(torch.autograd.Function):
    """The identity; backward gives a gradient the cut of its parameter. What the ranks computed of
    their tokens (of a norm) is summed here, once. An embedding's comes whole; this rank's rows are
    all that stays of it."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, registry: Registry) -> torch.Tensor:
        ctx.placements, ctx.registry = parameter.placements, registry
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[torch.Tensor, None]:
        if gradient.placements == ctx.placements:
            return gradient, None
        ctx.registry.tag(gradient._local_tensor, State.GRADIENTS)
        kept = gradient.redistribute(placements=ctx.placements)
        if isinstance(ctx.placements[0], Shard):
            rows = kept.to_local()
            kept = DTensor.from_local(
                torch.empty_like(rows).copy_(rows),  # a slice alone would keep the whole alive
                kept.device_mesh,
                kept.placements,
                run_check=False,
                shape=kept.shape,
                stride=kept.stride(),
            )
        return kept, None


class _Summed(torch.autograd.Function):
    """The identity; backward sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup, registry: Registry
    ) -> torch.Tensor:
        ctx.group, ctx.registry = group, registry
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = gradient.clone()  # autograd may hold what it gives
        ctx.registry.tag(summed, State.GRADIENTS)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None, None
