"""The update that a training runs, on tensors of its own, and the clip of their gradients' norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ptrain.axes.data.run.wrapped import ParameterWrap
from ptrain.calibration.bench import Bench, RateSheet, Work
from ptrain.calibration.points import Points
from ptrain.interpreter.clip import global_norm, scale_down
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.optimizers.torch import TorchRules
from ptrain.optimizers.update import TargetsUpdate
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.torch import TorchRoom
from ptrain.rooms.world import World
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import FUSED
from ptrain.spec.precision import LAYOUTS, Layout
from ptrain.spec.rates import CLIP
from ptrain.steps.step import Clip, CreateMesh

_FEWEST = 4  # points, of which some have several tensors
_VALUE = 0.01  # of parameters and gradients: nothing depends on it


def updates(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Of layouts that keep every state in one dtype: what others cast beside it are copies."""
    for layout in _plain(points):
        for elements, tensors in bench.in_time(points.updates, least=_FEWEST):
            for name, work in _works(layout, elements, tensors, bench.device):
                key = (name, layout.updated, elements, tensors)
                sheet.note("updates", *key, seconds=bench.busy_seconds(work))


def _plain(points: Points) -> Iterator[Layout]:
    for layout in LAYOUTS.values():
        is_one = layout.parameters is layout.gradients is layout.moments and not layout.master
        if is_one and layout.parameters in points.sides:
            yield layout


def _works(
    layout: Layout, elements: int, tensors: int, device: torch.device
) -> Iterator[tuple[str, Work]]:
    dtype, own = TORCH_DTYPES[layout.updated], elements // tensors
    mesh = Mesh(CreateMesh(axes=(), degrees=()), World(device=device))
    for rule in FUSED:
        model = nn.ParameterList(
            torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, _VALUE)
        wrapped = ParameterWrap(model, ((ROOT,),))
        update = TargetsUpdate(
            wrapped.targets(),
            OptimizerSpec(name=rule),
            layout,
            TorchRoom(mesh, mesh.registry),
            TorchRules(),
        )
        yield rule, lambda update=update: update.step(1e-9)  # type: ignore[misc]
    step = Clip(max_norm=1.0, axes=())
    gradients = [torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)]

    def clip() -> None:
        with torch.no_grad():
            scale_down(gradients, global_norm(gradients, step, mesh), step)

    yield CLIP, clip
