"""What the expert axis does to a module: of the experts' tensors a rank has its own, and rows
travel to the ranks of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from ptrain.axes.context.run.routing import SampleSlices, route_slices
from ptrain.axes.expert.run.exchange import Assumption, Travels
from ptrain.axes.tensor.run.gradients import OwnSlices
from ptrain.internals.dtensor import side_by_side
from ptrain.models.moe import MoE
from ptrain.rooms.mesh import Mesh
from ptrain.spec.axis import Axis
from ptrain.steps.experts import ExpertParallel


def parallelize_experts(model: nn.Module, step: ExpertParallel, mesh: Mesh) -> None:
    """Give this rank its experts of `model`, or of a stage of it. Its tensors may be on meta, and
    those whose features are cut over another axis are cut over both; where that axis is folded its
    ranks have slices of the tokens, and count together what is chosen."""
    group = mesh.group(step.axes)
    for name, module in list(model.named_modules()):
        if isinstance(module, MoE):
            module.journey = Travels(group, step.overlaps)
        if name in step.modules:
            for projection in module.children():
                _give_own(projection, mesh.ordered(step.axes), mesh)
    if step.folded:
        tokens = SampleSlices(mesh.group(step.counting), mesh.registry, step.spans)
        route_slices(model, tokens, mesh.size(step.folded))


def assume(model: nn.Module, routing: Callable[[str], Assumption]) -> None:
    """On fake ranks, from now on rows of each layer with experts go as `routing` says of the
    layer's name."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            assert isinstance(module.journey, Travels), "it has experts of other ranks"
            module.journey.assumed = routing(name)


def _give_own(projection: nn.Module, axes: Sequence[Axis], mesh: Mesh) -> None:
    """Cut the weight of all experts by its first dimension."""
    weight = projection.get_parameter("weight")
    own = nn.Parameter(_own(weight, axes, mesh), requires_grad=weight.requires_grad)
    projection.register_parameter("weight", own)
    if not isinstance(weight, DTensor):  # else it is read so already
        OwnSlices()._apply(projection, mesh.submesh(axes))


@torch.no_grad()
def _own(weight: torch.Tensor, axes: Sequence[Axis], mesh: Mesh) -> DTensor:
    held, meshes = weight, [mesh.submesh((axis,)) for axis in axes]
    placements: list[Placement] = [Shard(0)] * len(axes)
    if isinstance(weight, DTensor):
        meshes.append(weight.device_mesh)
        held, placements = weight.to_local(), [*placements, *weight.placements]
    own = len(held) // mesh.size(axes)
    device_mesh = side_by_side(*meshes) if len(meshes) > 1 else meshes[0]
    return DTensor.from_local(
        held.narrow(0, own * mesh.place(axes), own).clone(),
        device_mesh,
        placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
