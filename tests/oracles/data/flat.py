"""Flat units in closed form: resident bytes by tier, and gathered units at the end of a forward
pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ptrain.cost import State
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from tests.oracles.data.buffer import Buffer
from tests.oracles.data.chain import (
    ChainUnit,
    MicroBatchPlace,
    Resident,
    UnitChain,
    micro_batches,
)
from tests.oracles.data.gradients import GradientsForm, Moments, Preparation
from tests.oracles.data.parameters import ParametersForm
from tests.oracles.data.update import UnitUpdate, UpdateTarget


@dataclass(frozen=True, slots=True, eq=False)
class FlatUnit:
    """A unit with parameters."""

    unit: ChainUnit
    parameters: ParametersForm
    gradients: GradientsForm
    update: UnitUpdate
    preparation: Preparation

    @property
    def is_root(self) -> bool:
        return self.unit.is_root

    def moments(self, kind: MicroBatchPlace) -> Moments:
        """Return the bytes of its gradients at the moments of such a micro-batch."""
        return self.gradients.moments(is_first=kind.is_first, is_last=kind.is_last)


@dataclass(frozen=True)
class FlatUnitsForm:
    """A plan of flat units on a chain."""

    spec: Spec
    plan: Plan
    step: FlatUnits
    chain: UnitChain

    @cached_property
    def units(self) -> tuple[FlatUnit, ...]:
        """Return the units with parameters in the order of wrapping and update, the root last."""
        return tuple(self._unit(unit) for unit in self.chain.units if unit.numel)

    def _unit(self, unit: ChainUnit) -> FlatUnit:
        step, experts = self.step, self.plan.experts
        if unit.is_apart and experts is not None:
            step = step.drop_axis(experts.axis)
        layout, buffer = self.plan.update.layout, Buffer.of(self.spec, step, unit.numel)
        parameters = ParametersForm(step, layout, buffer, unit.is_root)
        gradients = GradientsForm(step, layout, buffer)
        update = UnitUpdate(self.spec, unit, parameters, gradients)
        return FlatUnit(unit, parameters, gradients, update, gradients.preparation())

    @property
    def entered(self) -> tuple[FlatUnit, ...]:
        """Return the units in the order of a forward pass: the root first."""
        return tuple(sorted(self.units, key=lambda unit: not unit.unit.is_root))

    def resident(self) -> Resident:
        """Return bytes by tier, equal on all ranks: parameters and optimizer state after the
        update, gradients at the end of the last backward pass."""
        step, layout = self.step, self.plan.update.layout
        theta, omega, gradients = Counter[Tier](), Counter[Tier](), Counter[Tier]()
        for unit in self.units:
            holder = omega if step.materialized else theta
            holder[step.parameters_tier] += unit.parameters.stored
            omega[step.optimizer_tier] += sum(map(_kept, unit.update.targets))
            gradients[Tier.DEVICE] += self._kept_gradients(unit)
            if step.gradients_tier is not Tier.DEVICE:
                part = unit.gradients.buffer.shard(unit.gradients.step.gradients)
                gradients[step.gradients_tier] += part * layout.gradients.itemsize
        return {State.PARAMETERS: theta, State.OPTIMIZER: omega, State.GRADIENTS: gradients}

    def _kept_gradients(self, unit: FlatUnit) -> int:
        if self.step.consumed:
            return 0
        last = micro_batches(self.plan.accumulate.micro_batches)[-1]
        return unit.moments(last).after

    def transient(self) -> int:
        """Return the bytes of units that stay gathered at the end of the last forward pass."""
        return sum(unit.parameters.whole for unit in self.units if unit.parameters.stays)


def _kept(target: UpdateTarget) -> int:
    """Return the bytes of one target's state on a rank."""
    master = target.master.part if target.master else 0
    return master + sum(tensor.part for tensor in target.state)
