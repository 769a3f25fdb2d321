"""The closed forms of a plan's data axes, whatever wraps it: the second opinion on its life.

Written from what the modes mean and what is known of torch, they share no text with what runs or
with what predicts: a needless allocation, a late release, a doubled call, a wider dtype or a larger
group in one of those is a difference from these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic, add_traffic
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from tests.oracles.data.chain import NoClosedForm, Resident, UnitChain
from tests.oracles.data.flat import FlatUnitsForm
from tests.oracles.data.flat_peaks import flat_peaks
from tests.oracles.data.flat_traffic import flat_traffic_rows
from tests.oracles.data.fully_sharded import FullyShardedForm
from tests.oracles.data.fully_sharded_peaks import fully_sharded_peaks
from tests.oracles.data.replicated import ReplicatedForm


class WrapForm(Protocol):
    """The closed forms of one wrapper; `index` is a rank's position along the axes on which ranks
    differ."""

    def resident(self, index: int) -> Resident:
        """Return bytes by state and tier: parameters and optimizer state after the update,
        gradients at the end of the last backward pass."""
        ...

    def transient(self) -> int:
        """Return the bytes of gathered units at the end of the last forward pass."""
        ...

    def peaks(self, index: int) -> dict[Phase, int]:
        """Return device bytes of the data axes by phase above parameters and optimizer state,
        without activations."""
        ...

    def sent(self) -> Iterable[Traffic]:
        """Return the collectives and copies of the wrapper in a steady step, and once (setup)."""
        ...


@dataclass(frozen=True, slots=True)
class _FlatForm:
    flat: FlatUnitsForm

    def resident(self, index: int) -> Resident:
        return self.flat.resident()

    def transient(self) -> int:
        return self.flat.transient()

    def peaks(self, index: int) -> dict[Phase, int]:
        return flat_peaks(self.flat)

    def sent(self) -> Iterable[Traffic]:
        return flat_traffic_rows(self.flat)


@dataclass(frozen=True, slots=True)
class _ShardedForm:
    sharded: FullyShardedForm

    def resident(self, index: int) -> Resident:
        return self.sharded.resident(index)

    def transient(self) -> int:
        return self.sharded.transient()

    def peaks(self, index: int) -> dict[Phase, int]:
        return fully_sharded_peaks(self.sharded, index)

    def sent(self) -> Iterable[Traffic]:
        return self.sharded.sent()


def closed_form(spec: Spec, plan: Plan, chain: UnitChain) -> WrapForm:
    """Return the formulas of the plan's wrap step on a chain of units. Raises NoClosedForm for a
    pipeline stage, whose passes interleave with those of other micro-batches."""
    if plan.pipeline is not None:
        raise NoClosedForm("pipeline: micro-batches in flight lie between a unit's passes")
    match plan.wrap:
        case LocalGradients() | Replicate() as step:
            return ReplicatedForm(spec, plan, step, chain)
        case FullyShard() as step:
            return _ShardedForm(FullyShardedForm(spec, plan, step, chain))
        case FlatUnits() as step:
            return _FlatForm(FlatUnitsForm(spec, plan, step, chain))


def step_traffic(spec: Spec, plan: Plan, chain: UnitChain) -> tuple[Traffic, ...]:
    """Return all traffic of a step: the wrapper's, and the scalars of the norm and of a scaled
    loss, one along every axis that shards gradients."""
    return add_traffic((*closed_form(spec, plan, chain).sent(), *_scalars(spec, plan)))


def _scalars(spec: Spec, plan: Plan) -> Iterator[Traffic]:
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    if plan.clip is not None:
        size = max(DType.FP32.itemsize, plan.update.layout.gradients.itemsize)
        for axis in plan.clip.reduced_axes:
            yield calls.traffic(Group((axis,), spec.degree(axis)), size)
    for axis in plan.update.scale_axes:
        yield calls.traffic(Group((axis,), spec.degree(axis)), DType.FP32.itemsize)
