"""Which ranks must draw the same random numbers, and where their generators stand.

Ranks draw alike where they compute the same thing: on the same samples, in the same layers, on
copies of the activations; and over cp, where each takes its tokens' part of the masks of all. So
every other mesh axis sets them apart but the tensor axis, and that one too where its ranks work on
slices of the tokens: there a norm's weight is distributed, and whole.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.interpreter.program import Program
from ptrain.meters.digest import of_bytes
from ptrain.models.dropout import drops_out
from ptrain.spec.placement import CUTTING_AXES, SAMPLE_AXES, TOKEN_AXES, Axis


def drawn(program: Program) -> tuple[str, str] | None:
    """This rank's place among those that draw apart, and a digest of its generator's state. None
    for a model that draws nothing: then no state of a generator is part of the training's."""
    if not drops_out(program.model):
        return None
    mesh = program.mesh
    cutting = [axis for axis in CUTTING_AXES if axis not in SAMPLE_AXES]
    alike = TOKEN_AXES if has_token_slices(program.model) else cutting
    apart = (axis for axis in mesh.axes if axis not in alike)
    place = ",".join(f"{axis}={mesh.coordinate(axis)}" for axis in apart)
    return place, generator_digest(program.world.device)


def generator_digest(device: torch.device) -> str:
    """Return a digest of where the generator of a device stands."""
    is_cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
    return of_bytes(state.numpy().tobytes())


def has_token_slices(model: nn.Module) -> bool:
    """Return whether the tensor axis cuts the tokens between sub-blocks: some module has nothing
    but whole tensors that are distributed all the same. (A row operator's bias is one beside a cut
    weight.)"""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(map(_is_whole, own)):
            return True
    return False


def _is_whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == Axis.TP and placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
