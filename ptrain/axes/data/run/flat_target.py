"""What the optimizer updates of a flat unit, as checkpoints and the norm see it: by the names of
the tensors that it stands for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.axes.data.cuts import Axes, Cuts
from ptrain.axes.data.run.members import ParameterMembers
from ptrain.axes.data.run.target import CutView, Named, part_of, whole_of
from ptrain.axes.data.theta import Parameters
from ptrain.axes.data.update import ShardTarget, TensorsUpdate, TensorTarget, UnitState
from ptrain.cost import State
from ptrain.optimizers.update import Slot
from ptrain.rooms.torch import TorchRoom
from ptrain.spec.placement import Tier
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FlatUnits
from ptrain.units import ceil_div


class FlatTensors:
    """The tensors of one flat buffer, by their names."""

    def __init__(
        self, members: ParameterMembers, cuts: Cuts[torch.Tensor], room: TorchRoom
    ) -> None:
        self.tensors, self.named, self.pieces = members, members.named, members.pieces
        self.cutting_axes = members.cutting_axes
        self.buffer_cuts, self.own_room = cuts, room
        self.mesh, self.device = room.mesh, room.device

    def whole(self, cuts: Cuts[torch.Tensor], part: torch.Tensor, cut: Axes) -> torch.Tensor:
        """A stored tensor made whole on the device, of its own memory."""
        room = self.own_room
        held = room.new(part.numel(), room.dtype(part), Tier.DEVICE, State.OTHER)
        held.copy_(part)
        return cuts.gather(held, cut, cut, State.OTHER) if cut else held

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as a checkpoint wants it: cut over the ranks that keep shards of it."""
        axes = self.buffer_cuts.axes
        if not axes:
            return tensor.clone()
        return distribute_rows(tensor, self.mesh.submesh(axes))

    def split(self, part: torch.Tensor, cut: Axes) -> Named:
        """Rows of the named tensors: gathers the buffer, keeps this rank's share of each of
        them."""
        whole = self.whole(self.buffer_cuts, part, cut)
        return {
            name: self.rows(whole_of(parameter, piece))
            for (name, parameter), piece in zip(self.named, self.pieces(whole), strict=True)
        }

    def join(self, named: Named, cut: Axes) -> torch.Tensor:
        """Return this rank's shard of a buffer of the named tensors."""
        first, cuts = named[self.named[0][0]], self.buffer_cuts
        whole = torch.zeros(cuts.padded, dtype=first.dtype, device=self.device)
        for (name, parameter), piece in zip(self.named, self.pieces(whole), strict=True):
            piece.copy_(part_of(parameter, full(named[name])))
        return cuts.take(whole, (), cut)

    def export(self, parameters: Parameters[torch.Tensor]) -> Named:
        """Return the parameters that are in it, by name."""
        parameters.settle()
        return self.split(parameters.stored, parameters.cut)

    def load(self, parameters: Parameters[torch.Tensor], named: Named) -> None:
        """Write them."""
        parameters.settle()
        parameters.stored.copy_(self.join(named, parameters.cut))


class FlatState(UnitState[torch.Tensor], FlatTensors):
    """What is trained of a unit of a module's parameters."""

    def __init__(
        self,
        members: ParameterMembers,
        cuts: Cuts[torch.Tensor],
        step: FlatUnits,
        layout: Layout,
        room: TorchRoom,
    ) -> None:
        UnitState.__init__(self, members, cuts, step, layout)
        FlatTensors.__init__(self, members, cuts, room)


class FlatFrozen(FlatTensors):
    """What is frozen of it, of which there is Theta alone."""

    def __init__(
        self,
        members: ParameterMembers,
        cuts: Cuts[torch.Tensor],
        step: FlatUnits,
        layout: Layout,
        room: TorchRoom,
    ) -> None:
        super().__init__(members, cuts, room)
        self.parameters = Parameters(members, cuts, step, layout)


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
        if part.dim() == 0:
            return {name: part for name, _ in self.unit.named}
        return self.unit.split(part, self.unit.step.optimizer)

    def named(self, part: torch.Tensor) -> Named:
        return self.unit.split(part, self.unit.step.updated)

    def join(self, named: Named) -> torch.Tensor:
        first = named[self.unit.named[0][0]]
        if first.dim() == 0:
            return first
        return self.unit.join(named, self.unit.step.optimizer)

    def export(self) -> Named:
        return self.unit.export(self.unit.parameters)

    def load(self, named: Named) -> None:
        self.unit.load(self.unit.parameters, named)


class FrozenTarget:
    """What is frozen of one unit, which nothing updates."""

    is_frozen = True
    is_in_place = False
    owns_master = False
    gradient = None

    def __init__(self, unit: FlatFrozen) -> None:
        self.unit = unit

    def lasting(self) -> torch.Tensor | None:
        """Nobody updates it."""

    def views(self) -> Iterable[CutView]:
        return []

    def working_gradient(self) -> None:
        """There is none."""

    def value(self) -> torch.Tensor:
        return self.unit.parameters.stored

    def store(self, value: torch.Tensor) -> None:
        raise AssertionError("what is frozen is updated by nobody")

    def slot(self, initial: torch.Tensor) -> Slot[torch.Tensor]:
        raise AssertionError("what is frozen has no optimizer state")

    def split(self, part: torch.Tensor) -> Named:
        raise AssertionError("what is frozen has no optimizer state")

    def join(self, named: Named) -> torch.Tensor:
        raise AssertionError("what is frozen has no optimizer state")

    def named(self, part: torch.Tensor) -> Named:
        return self.unit.split(part, self.unit.parameters.cut)

    def export(self) -> Named:
        return self.unit.export(self.unit.parameters)

    def load(self, named: Named) -> None:
        self.unit.load(self.unit.parameters, named)


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
