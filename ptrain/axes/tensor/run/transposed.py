"""Torch's parallel styles for layers whose weight is stored inputs by outputs (transformers'
Conv1D), which torch's own do not know."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


class TransposedColumn(ColwiseParallel):
    """A column layer: of its weight the second dimension is cut, of its bias the only one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distributed(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class TransposedRow(RowwiseParallel):
    """A row layer: of its weight the first dimension is cut, and its bias is whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _distributed(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _distributed(
    style: Any, module: nn.Module, device_mesh: DeviceMesh, placements: dict[str, Placement]
) -> nn.Module:
    def cut(_: str, child: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(child.named_parameters(recurse=False)):
            part = distribute_tensor(
                parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank
            )
            child.register_parameter(name, nn.Parameter(part, parameter.requires_grad))

    return distribute_module(
        module,
        device_mesh,
        cut,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )
