"""The tensors of one unit as targets of their own, for an update that needs whole matrices.

What is gathered or moved for the update is gathered or moved once for the unit: its gradient, its
value where Theta is not whole in place, and what is written back. Optimizer state is kept by
tensor.
"""

from __future__ import annotations

import torch

from ptrain.axes.data.run.flat_parameters import pieces
from ptrain.axes.data.run.flat_shard import Route, TensorSlot
from ptrain.axes.data.run.flat_target import FlatState, FlatTarget, full
from ptrain.axes.data.run.layout import FlatLayout, same_memory
from ptrain.axes.data.run.target import Named, Resident, Slot
from ptrain.costs import State
from ptrain.spec.placement import Tier


class UnitUpdate:
    """One unit while its tensors are updated."""

    def __init__(self, unit: FlatState) -> None:
        assert not unit.step.updated, "whole tensors are updated where the update is on no shard"
        self.unit = unit
        self.whole = FlatTarget(unit)
        self.num_tensors = len(unit.parameters.named)
        self._gradient: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._asked = 0
        self._stored = 0

    def gradient(self, index: int) -> torch.Tensor | None:
        """One tensor's gradient; the unit's is forgotten here when all have theirs."""
        if self._asked == 0:
            self._gradient = self.whole.working_gradient()
        held = self._gradient
        self._asked = (self._asked + 1) % self.num_tensors
        if self._asked == 0:
            self._gradient = None
        return None if held is None else self._piece(held, index)

    def value(self, index: int) -> torch.Tensor:
        """One tensor's value, of the unit's whole one."""
        if self._value is None:
            self._value = self.unit.value()
        return self._piece(self._value, index)

    def forget(self) -> None:
        """Values were looked at, not updated."""
        self._value = None

    def store(self, index: int, value: torch.Tensor) -> None:
        """Write one tensor back; the last one takes the unit to where Theta lives."""
        if self._value is None:
            self._value = self._room()
        place = self._piece(self._value, index)
        if not same_memory(place, value):
            place.copy_(value)
        self._stored = (self._stored + 1) % self.num_tensors
        if self._stored == 0:
            whole, self._value = self._value, None
            self.unit.store(whole)

    def _room(self) -> torch.Tensor:
        """Somewhere for the unit's updated tensors: Theta itself where it is whole there."""
        parameters, step = self.unit.parameters, self.unit.step
        if not parameters.cut and parameters.tier is step.update_tier:
            return parameters.stored
        made = self.unit.tiers.empty(
            parameters.layout.padded, parameters.dtypes.stored, step.update_tier, State.PARAMETERS
        )
        made[parameters.layout.numel :].zero_()
        return made

    def _piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        return list(pieces(whole, self.unit.parameters.named))[index]


class FlatTensorTarget:
    """One whole tensor of a unit."""

    def __init__(self, update: UnitUpdate, index: int) -> None:
        self.update = update
        self.unit = update.unit
        self.index = index
        self.name, parameter = self.unit.parameters.named[index]
        self.shape = parameter.shape
        self.owns_master = self.unit.parameters.is_materialized
        outer = self.unit.layout
        self.layout = FlatLayout.over(
            outer.mesh, parameter.numel(), self.unit.step.optimizer, outer.registry, outer.via
        )

    @property
    def gradient(self) -> torch.Tensor | None:
        """The unit's, as it is kept, told once."""
        return self.update.whole.gradient if self.index == 0 else None

    def cut_and_whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.update.whole.cut_and_whole() if self.index == 0 else ([], [])

    def working_gradient(self) -> torch.Tensor | None:
        return self.update.gradient(self.index)

    def value(self) -> torch.Tensor:
        return self.update.value(self.index)

    def store(self, value: torch.Tensor) -> None:
        self.update.store(self.index, value)

    def slot(self, initial: torch.Tensor) -> Slot:
        self.update.forget()
        route = self._route()
        if not route.kept and route.tier is route.update_tier is Tier.DEVICE:
            self.layout.registry.tag(initial, State.OPTIMIZER)
            return Resident(initial)
        slot: Slot = TensorSlot(route, initial)
        self.unit.slots.append(slot.stored)
        return slot

    def named(self, part: torch.Tensor) -> Named:
        return {self.name: self.unit.rows(part.view(self.shape))}

    def split(self, part: torch.Tensor) -> Named:
        if part.dim() == 0:
            return {self.name: part}
        if part.shape != self.shape:
            flat = self.unit.whole(self.layout, part, self.unit.step.optimizer)
            part = flat[: self.shape.numel()].view(self.shape)
        return {self.name: self.unit.rows(part)}

    def join(self, named: Named) -> torch.Tensor:
        whole = full(named[self.name])
        route = self._route()
        if whole.dim() == 0 or (not route.kept and route.tier is route.update_tier is Tier.DEVICE):
            return whole
        flat = whole.new_zeros(self.layout.padded)
        flat[: whole.numel()].copy_(whole.reshape(-1))
        return self.layout.take(flat, (), route.kept)

    def export(self) -> Named:
        return self.update.whole.export() if self.index == 0 else {}

    def load(self, named: Named) -> None:
        if self.index == 0:
            self.update.whole.load(named)

    def _route(self) -> Route:
        return self.unit.route(self.layout)
