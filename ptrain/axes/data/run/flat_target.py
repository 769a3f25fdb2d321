"""What the optimizer updates of a flat unit, as checkpoints and the norm see it: by the names of
the tensors that it stands for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.axes.data.cuts import Axes, Cuts
from ptrain.axes.data.run.local_part import part_of, whole_of
from ptrain.axes.data.run.members import ParameterMembers
from ptrain.axes.data.run.target import CutView, Named
from ptrain.axes.data.update import ShardTarget, TensorsUpdate, TensorTarget, UnitState
from ptrain.costs import State
from ptrain.rooms.torch import TorchRoom
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits
from ptrain.units import ceil_div


class FlatState(UnitState[torch.Tensor]):
    """A unit of a module's parameters."""

    def __init__(
        self,
        members: ParameterMembers,
        cuts: Cuts[torch.Tensor],
        step: FlatUnits,
        layout: Layout,
        room: TorchRoom,
    ) -> None:
        super().__init__(members, cuts, step, layout)
        self.named, self.pieces = members.named, members.pieces
        self.cutting_axes = members.cutting_axes
        self.mesh, self.device = room.mesh, room.device

    def whole(self, cuts: Cuts[torch.Tensor], part: torch.Tensor, cut: Axes) -> torch.Tensor:
        """A stored tensor made whole on the device, of its own memory."""
        room = self.room
        held = room.new(part.numel(), room.dtype(part), Tier.DEVICE, State.OTHER)
        held.copy_(part)
        return cuts.gather(held, cut, cut, State.OTHER) if cut else held

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as a checkpoint wants it: cut over the ranks that keep shards of it."""
        if not self.cuts.axes:
            return tensor.clone()
        return distribute_rows(tensor, self.mesh.submesh(self.cuts.axes))


class FlatTarget(ShardTarget[torch.Tensor]):
    """One unit: its shard over the axes of the update."""

    unit: FlatState

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.unit.gradients.kept

    def views(self) -> Iterable[CutView]:
        gradients, cutting = self.unit.gradients, self.unit.cutting_axes
        held = gradients.kept
        if held is None:
            return []
        runs = self.unit.parameters.cut_runs(gradients.now)
        return [(cutting if is_cut else (), held[start:end]) for start, end, is_cut in runs]

    def split(self, part: torch.Tensor) -> Named:
        """Rows of the named tensors: gathers one unit, keeps this rank's share of every tensor."""
        if part.dim() == 0:
            return {name: part for name, _ in self.unit.named}
        return self._rows(part, self.unit.step.optimizer)

    def named(self, part: torch.Tensor) -> Named:
        return self._rows(part, self.unit.step.updated)

    def join(self, named: Named) -> torch.Tensor:
        first = named[self.unit.named[0][0]]
        if first.dim() == 0:
            return first
        return self._shard(named, self.unit.step.optimizer)

    def export(self) -> Named:
        parameters = self.unit.parameters
        parameters.settle()
        return self._rows(parameters.stored, parameters.cut)

    def load(self, named: Named) -> None:
        parameters = self.unit.parameters
        parameters.settle()
        parameters.stored.copy_(self._shard(named, parameters.cut))

    def _rows(self, part: torch.Tensor, cut: Axes) -> Named:
        whole = self.unit.whole(self.unit.cuts, part, cut)
        return {
            name: self.unit.rows(whole_of(parameter, piece))
            for (name, parameter), piece in zip(
                self.unit.named, self.unit.pieces(whole), strict=True
            )
        }

    def _shard(self, named: Named, cut: Axes) -> torch.Tensor:
        unit = self.unit
        first = named[unit.named[0][0]]
        whole = torch.zeros(unit.cuts.padded, dtype=first.dtype, device=unit.device)
        for (name, parameter), piece in zip(unit.named, unit.pieces(whole), strict=True):
            piece.copy_(part_of(parameter, full(named[name])))
        return unit.cuts.take(whole, (), cut)


class FlatTensorTarget(TensorTarget[torch.Tensor]):
    """One whole tensor of a unit. What is the unit's is told by its first tensor."""

    unit: FlatState

    def __init__(self, update: TensorsUpdate[torch.Tensor], whole: FlatTarget, index: int) -> None:
        super().__init__(update, index)
        self.name = whole.unit.named[index][0]
        self._whole = whole

    @property
    def gradient(self) -> torch.Tensor | None:
        return self._whole.gradient if self.index == 0 else None

    def views(self) -> Iterable[CutView]:
        return self._whole.views() if self.index == 0 else []

    def named(self, part: torch.Tensor) -> Named:
        return {self.name: self.unit.rows(part.view(self.shape))}

    def split(self, part: torch.Tensor) -> Named:
        if part.dim() == 0:
            return {self.name: part}
        if part.shape != self.shape:
            flat = self.unit.whole(self.cuts, part, self.unit.step.optimizer)
            part = flat[: self.cuts.numel].view(self.shape)
        return {self.name: self.unit.rows(part)}

    def join(self, named: Named) -> torch.Tensor:
        whole = full(named[self.name])
        if whole.dim() == 0 or self.keeps_whole:
            return whole
        flat = whole.new_zeros(self.cuts.padded)
        flat[: whole.numel()].copy_(whole.reshape(-1))
        return self.cuts.take(flat, (), self.route.kept)

    def export(self) -> Named:
        return self._whole.export() if self.index == 0 else {}

    def load(self, named: Named) -> None:
        if self.index == 0:
            self._whole.load(named)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be cut over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank holds whole as a DTensor cut along its first dimension."""
    if tensor.dim() == 0:
        return DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False)
    rows = ceil_div(tensor.shape[0], mesh.size())
    start = min(rows * mesh.get_local_rank(), tensor.shape[0])
    return DTensor.from_local(
        tensor[start : start + rows].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
