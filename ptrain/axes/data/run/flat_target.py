"""What the optimizer updates of one unit: a flat shard over the update's axes, or, where an update
needs whole tensors, each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrain.axes.data.run.flat_gradients import Gradients
from ptrain.axes.data.run.flat_parameters import Parameters, pieces
from ptrain.axes.data.run.flat_shard import Route, RoutedSlot
from ptrain.axes.data.run.layout import FlatLayout, same_memory
from ptrain.axes.data.run.local_part import part_of, whole_of
from ptrain.axes.data.run.target import Named, Resident, Slot
from ptrain.costs import State
from ptrain.plan.step import FlatUnits
from ptrain.rooms.tiers import Tiers, cast
from ptrain.spec.axis import Axis
from ptrain.spec.placement import Tier
from ptrain.units import ceil_div


class FlatState:
    """Theta and G of one unit, and what is read of the next one while this one is updated."""

    def __init__(self, parameters: Parameters, step: FlatUnits) -> None:
        self.parameters = parameters
        self.gradients = Gradients(parameters, step)
        self.step = step
        self.slots: list[torch.Tensor] = []  # on file, to be read ahead
        self.following: FlatState | None = None

    @property
    def layout(self) -> FlatLayout:
        return self.parameters.layout

    @property
    def tiers(self) -> Tiers:
        return self.parameters.tiers

    def read_ahead(self) -> None:
        """Announce what the update of the following unit needs."""
        if self.following is not None:
            self.following.gradients.read_ahead()
            for tensor in (self.following.parameters.stored, *self.following.slots):
                self.tiers.ahead(tensor)

    def route(self, layout: FlatLayout) -> Route:
        """Of optimizer state with that layout."""
        return Route(
            layout=layout,
            tiers=self.tiers,
            kept=self.step.optimizer,
            updated=self.step.updated,
            tier=self.step.optimizer_tier,
            update_tier=self.step.update_tier,
        )

    def value(self) -> torch.Tensor:
        """Theta's part over the update's axes on the update's tier: in place where it is that."""
        parameters, cut = self.parameters, self.step.updated
        held, tier, now = parameters.stored, parameters.tier, parameters.cut
        if parameters.is_materialized:
            return parameters.route.fetch(held)
        if tier is Tier.FILE:
            held, tier = self.tiers.move(held, Tier.HOST, State.PARAMETERS), Tier.HOST
        missing = tuple(axis for axis in now if axis not in cut)
        if missing:
            if tier is Tier.HOST:
                held, tier = self.tiers.move(held, Tier.DEVICE, State.PARAMETERS), Tier.DEVICE
            held = self.layout.gather(held, now, missing, State.PARAMETERS)
            now = tuple(axis for axis in now if axis in cut)
        held = self.layout.take(held, now, cut)
        if tier is not self.step.update_tier:
            held = self.tiers.move(held, self.step.update_tier, State.PARAMETERS)
        return held

    def store(self, value: torch.Tensor) -> None:
        """Write an updated shard back to where Theta lives, gathering it where Theta is wider."""
        parameters, step, cut = self.parameters, self.step, self.step.updated
        value = cast(value, parameters.dtypes.stored)
        if parameters.is_materialized:
            parameters.route.put(parameters.stored, value)
            return
        missing = tuple(axis for axis in cut if axis not in parameters.cut)
        extra = tuple(axis for axis in parameters.cut if axis not in cut)
        part, tier = value, step.update_tier
        if extra:
            part = self.layout.take(value, cut, parameters.cut)
        if missing:
            if tier is not Tier.DEVICE:
                part = self.tiers.move(part, Tier.DEVICE, State.PARAMETERS)
            parameters.spread(part, (*cut, *extra), missing, step.gather_after_update)
        elif not same_memory(part, parameters.stored):
            if parameters.tier is Tier.FILE and tier is Tier.DEVICE:
                part = self.tiers.move(part, Tier.HOST, State.PARAMETERS)
            parameters.stored.copy_(part)

    def whole(self, layout: FlatLayout, part: torch.Tensor, cut: Sequence[Axis]) -> torch.Tensor:
        """A stored tensor made whole on the device, of its own memory."""
        held = self.tiers.empty(part.numel(), part.dtype, Tier.DEVICE, State.OTHER).copy_(part)
        return layout.gather(held, cut, cut, State.OTHER) if cut else held

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as a checkpoint wants it: cut over the ranks that keep shards of it."""
        if not self.layout.axes:
            return tensor.clone()
        return distribute_rows(tensor, self.layout.mesh.submesh(self.layout.axes))


class FlatTarget:
    """One unit: its shard over the axes of the update."""

    def __init__(self, unit: FlatState) -> None:
        self.unit = unit
        self.owns_master = unit.parameters.is_materialized

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.unit.gradients.kept

    def cut_and_whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        gradients = self.unit.gradients
        held = gradients.kept
        if held is None:
            return [], []
        runs = self.unit.parameters.cut_runs(gradients.now)
        views = [(held[start:end], is_cut) for start, end, is_cut in runs]
        return [v for v, is_cut in views if is_cut], [v for v, is_cut in views if not is_cut]

    def working_gradient(self) -> torch.Tensor | None:
        self.unit.read_ahead()
        return self.unit.gradients.working()

    def value(self) -> torch.Tensor:
        return self.unit.value()

    def store(self, value: torch.Tensor) -> None:
        self.unit.store(value)

    def slot(self, initial: torch.Tensor) -> Slot:
        route = self.unit.route(self.unit.layout)
        if not route.missing and route.tier is route.update_tier is Tier.DEVICE:
            self.unit.layout.registry.tag(initial, State.OPTIMIZER)
            return Resident(initial)
        slot = RoutedSlot(route, initial)
        self.unit.slots.append(slot.stored)
        return slot

    def split(self, part: torch.Tensor) -> Named:
        """Rows of the named tensors: gathers one unit, keeps this rank's share of every tensor."""
        if part.dim() == 0:
            return {name: part for name, _ in self.unit.parameters.named}
        return self._rows(part, self.unit.step.optimizer)

    def named(self, part: torch.Tensor) -> Named:
        return self._rows(part, self.unit.step.updated)

    def join(self, named: Named) -> torch.Tensor:
        first = named[self.unit.parameters.named[0][0]]
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

    def _rows(self, part: torch.Tensor, cut: tuple[Axis, ...]) -> Named:
        named = self.unit.parameters.named
        whole = self.unit.whole(self.unit.layout, part, cut)
        return {
            name: self.unit.rows(whole_of(parameter, piece))
            for (name, parameter), piece in zip(named, pieces(whole, named), strict=True)
        }

    def _shard(self, named: Named, cut: tuple[Axis, ...]) -> torch.Tensor:
        parameters = self.unit.parameters
        first = named[parameters.named[0][0]]
        whole = torch.zeros(
            parameters.layout.padded, dtype=first.dtype, device=self.unit.tiers.device
        )
        named_pieces = zip(parameters.named, pieces(whole, parameters.named), strict=True)
        for (name, parameter), piece in named_pieces:
            piece.copy_(part_of(parameter, full(named[name])))
        return parameters.layout.take(whole, (), cut)


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
