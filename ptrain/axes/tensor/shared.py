"""A tensor that every rank has whole and uses on its own slice of the features (a norm of the heads
within attention): what the ranks' gradients add up to is the gradient of each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ptrain.costs import State
from ptrain.interpreter.registry import Registry


class SummedGradients(ParallelStyle):
    """While a module runs, its own parameters are read through `_Summed`."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self.registry = registry

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        group = device_mesh.get_group()

        def enter(module: nn.Module, _: object) -> None:
            for name in names:  # before nn.Module looks among its parameters, it looks here
                held = module._parameters[name]
                module.__dict__[name] = _Summed.apply(held, group, self.registry)

        def leave(module: nn.Module, *_: object) -> None:
            for name in names:
                module.__dict__.pop(name, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


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
