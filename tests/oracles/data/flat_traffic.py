"""Traffic of flat units in one steady step in closed form: calls and bytes of each collective and
of each copy between tiers.

A state on another tier is copied for every use on the device: the parameter shard for each use, the
gradient shard when it is stored, reduced further or used, the optimizer state for an update on the
device. A file is read and written through the host. A collective counts the bytes of the full
tensor of its group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.axes.data.cost import count_gathers, count_reductions
from ptrain.axes.ring import Calls, Group
from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey
from ptrain.spec.dials import GatherAfterUpdate, ReduceScatterVia
from ptrain.spec.placement import Tier, exclude_axes
from ptrain.steps.wraps import FlatUnits
from tests.oracles.data.buffer import Axes
from tests.oracles.data.flat import FlatUnit, FlatUnitsForm
from tests.oracles.data.flat_peaks import FLAG_BYTES
from tests.oracles.data.update import StateTensorForm

TO_DEVICE, TO_HOST = Collective.HOST_TO_DEVICE, Collective.DEVICE_TO_HOST
READ, WRITE = Collective.FILE_READ, Collective.FILE_WRITE


def copies(what: Collective, state: State, phase: Phase, size: int, times: int = 1) -> Traffic:
    """Return this many copies of `size` bytes between two tiers."""
    key = TrafficKey(axes=(), collective=what, state=state, phase=phase)
    return Traffic(key=key, calls=times, payload_bytes=times * size, sent_bytes=0)


def flat_traffic_rows(flat: FlatUnitsForm) -> Iterator[Traffic]:
    """Yield the traffic and copies of one rank, unit by unit; then the scalars of gradients on
    another tier."""
    for unit in flat.units:
        sender = _UnitTraffic(flat, unit)
        yield from (row for row in sender.rows() if row.calls)
    yield from _scalars(flat)


def _scalars(flat: FlatUnitsForm) -> Iterator[Traffic]:
    """Yield scalar traffic: the norm is reduced on the device and used on the host, and so is the
    overflow flag; for a scaled loss the host needs flag and scale for clipping and update."""
    step, layout, clip = flat.step, flat.plan.update.layout, flat.plan.clip
    on_host = step.gradients_tier is not Tier.DEVICE
    state, phase = State.GRADIENTS, Phase.UPDATE
    if step.consumed:
        return
    if clip is not None and clip.reduced_axes and on_host:
        scalar = max(FLAG_BYTES, layout.gradients.itemsize)
        yield copies(TO_DEVICE, state, phase, scalar)
        yield copies(TO_HOST, state, phase, scalar)
    if layout.scales_loss and on_host:
        yield copies(TO_DEVICE, state, phase, FLAG_BYTES)
    if layout.scales_loss and (
        step.update_tier is not Tier.DEVICE or (clip is not None and on_host)
    ):
        yield copies(TO_HOST, state, phase, FLAG_BYTES, 2)


@dataclass(frozen=True)
class _UnitTraffic:
    """The traffic of one unit in a step."""

    flat: FlatUnitsForm
    unit: FlatUnit

    @property
    def step(self) -> FlatUnits:
        return self.unit.parameters.step

    @property
    def micro_batches(self) -> int:
        return self.flat.plan.accumulate.micro_batches

    @property
    def updating(self) -> Phase:
        """Return the phase of the unit's update: backward if its gradients are consumed there."""
        return Phase.BACKWARD if self.step.consumed else Phase.UPDATE

    def rows(self) -> Iterator[Traffic]:
        yield from self._uses()
        yield from self._reductions()
        yield from self._preparation()
        yield from self._gradient()
        yield from self._optimizer()
        yield from self._value()
        yield from self._stored()

    def _call(
        self,
        what: Collective,
        over: Axes,
        state: State,
        phase: Phase,
        size: int,
        times: int = 1,
    ) -> Traffic:
        """Yield this many collectives along `over`, of a full tensor of `size` bytes."""
        via = None
        if what is Collective.REDUCE_SCATTER and self.step.reduce_scatter is not (
            ReduceScatterVia.NATIVE
        ):
            via = self.step.reduce_scatter.value
        axes = tuple(axis for axis in self.step.axes if axis in over)
        ranks = math.prod(self.flat.spec.degree(axis) for axis in axes)
        return Calls(what, state, phase, times, via).traffic(Group(axes, ranks), size)

    def _uses(self) -> Iterator[Traffic]:
        """Yield the traffic that makes parameters available for a pass: reads, copies, gathers. The
        first use completes the gather that the update left open."""
        theta, step, state = self.unit.parameters, self.step, State.PARAMETERS
        gather = Collective.ALL_GATHER
        if theta.left_open:
            yield self._call(gather, theta.left_open, state, Phase.FORWARD, theta.stored)
        if not theta.is_transient:
            return
        times = count_gathers(step.sync, self.micro_batches, is_root=theta.is_root)
        stored = State.OPTIMIZER if step.materialized else state
        for phase, count in ((Phase.FORWARD, times.forward), (Phase.BACKWARD, times.backward)):
            if step.parameters_tier is Tier.FILE:
                yield copies(READ, stored, phase, theta.stored, count)
            if step.parameters_tier is not Tier.DEVICE:
                yield copies(TO_DEVICE, state, phase, theta.part, count)
            if step.parameters:
                yield self._call(gather, step.parameters, state, phase, theta.whole, count)

    def _reductions(self) -> Iterator[Traffic]:
        """Yield the reductions of gradients to shards in backward and their storage; with overlap
        the update's first reduction follows the last micro-batch."""
        step, gradients, layout = self.step, self.unit.gradients, self.flat.plan.update.layout
        buffer, state, phase = gradients.buffer, State.GRADIENTS, Phase.BACKWARD
        count = (
            count_reductions(step.sync, self.micro_batches)
            if step.gradients
            else self.micro_batches
        )
        if step.gradients:
            size = buffer.padded * layout.reduced.itemsize
            scatter = Collective.REDUCE_SCATTER
            yield self._call(scatter, step.gradients, state, phase, size, count)
        part = buffer.shard(step.gradients) * layout.gradients.itemsize
        if not gradients.is_on_device:
            yield copies(TO_HOST, state, phase, part, count)
        if step.gradients_tier is Tier.FILE:
            yield copies(READ, state, phase, part, count - 1)
            yield copies(WRITE, state, phase, part, count)
        if gradients.starts_the_update:
            size = buffer.padded * gradients.held.itemsize
            partial = exclude_axes(step.axes, step.updated)
            if step.updated:
                yield self._call(Collective.REDUCE_SCATTER, step.updated, state, phase, size)
            elif partial:
                yield self._call(Collective.ALL_REDUCE, partial, state, phase, size)

    def _preparation(self) -> Iterator[Traffic]:
        """Yield the remaining reductions or gathers before the update, on the device."""
        plan, gradients, state = self.unit.preparation, self.unit.gradients, State.GRADIENTS
        phase, itemsize = self.updating, self.flat.plan.update.layout.gradients.itemsize
        if self.step.gradients_tier is Tier.FILE:
            yield copies(READ, state, phase, plan.bytes(plan.now))
        if plan.travels:
            yield copies(TO_DEVICE, state, phase, plan.bytes(plan.now))
        for what, over, size in (
            (Collective.REDUCE_SCATTER, plan.narrower, plan.bytes(plan.now)),
            (Collective.ALL_REDUCE, plan.partial, plan.bytes(plan.narrow)),
            (Collective.ALL_GATHER, plan.wider, plan.bytes(plan.final)),
        ):
            if over:
                yield self._call(what, over, state, phase, size)
        if plan.travels:
            ready = gradients.buffer.shard(plan.final) * itemsize
            yield copies(TO_HOST, state, phase, ready)

    def _gradient(self) -> Iterator[Traffic]:
        """Yield the move of the gradients to the update's tier, and their gather if the update
        needs it."""
        step, gradients, update = self.step, self.unit.gradients, self.unit.update
        state, phase = State.GRADIENTS, self.updating
        itemsize, final = (
            self.flat.plan.update.layout.gradients.itemsize,
            self.unit.preparation.final,
        )
        gathered = step.gathered_gradients
        used = gradients.buffer.shard(exclude_axes(final, gathered)) * itemsize
        if not gradients.is_on_device and (gathered or update.is_on_device):
            yield copies(TO_DEVICE, state, phase, gradients.buffer.shard(final) * itemsize)
        if gathered:
            yield self._call(Collective.ALL_GATHER, gathered, state, phase, used)
        if not update.is_on_device and (gathered or gradients.is_on_device):
            yield copies(TO_HOST, state, phase, used)

    def _optimizer(self) -> Iterator[Traffic]:
        """Yield the moves of master copies, moments and counters of each target, in both
        directions."""
        for target in self.unit.update.targets:
            for tensor in (*((target.master,) if target.master else ()), *target.state):
                yield from self._fetched(tensor)
                yield from self._put(tensor)

    def _fetched(self, tensor: StateTensorForm) -> Iterator[Traffic]:
        state, phase = State.OPTIMIZER, self.updating
        if self.step.optimizer_tier is Tier.FILE:
            yield copies(READ, state, phase, tensor.part)
        if tensor.comes:
            yield copies(TO_DEVICE, state, phase, tensor.part)
        if tensor.missing:
            gather = Collective.ALL_GATHER
            yield self._call(gather, tensor.missing, state, phase, tensor.gathered)

    def _put(self, tensor: StateTensorForm) -> Iterator[Traffic]:
        state, phase = State.OPTIMIZER, self.updating
        if tensor.comes:
            yield copies(TO_HOST, state, phase, tensor.part)
        if self.step.optimizer_tier is Tier.FILE:
            yield copies(WRITE, state, phase, tensor.part)

    def _value(self) -> Iterator[Traffic]:
        """Yield the move of the parameter shard to the update: read, and gathered if parameters are
        sharded further."""
        step, update, theta = self.step, self.unit.update, self.unit.parameters
        state, phase, itemsize = State.PARAMETERS, self.updating, theta.dtype.itemsize
        if update.has_master:
            return
        if step.materialized:
            yield from self._fetched(update.value)
            return
        missing = exclude_axes(step.parameters, step.updated)
        tier = step.parameters_tier
        if tier is Tier.FILE:
            yield copies(READ, state, phase, theta.stored)
        if missing:
            if tier is not Tier.DEVICE:
                yield copies(TO_DEVICE, state, phase, theta.stored)
            tier = Tier.DEVICE
            whole = theta.buffer.shard(exclude_axes(step.parameters, missing)) * itemsize
            yield self._call(Collective.ALL_GATHER, missing, state, phase, whole)
        part = theta.buffer.shard(step.updated) * itemsize
        if (tier is Tier.DEVICE) is not update.is_on_device:
            yield copies(TO_DEVICE if update.is_on_device else TO_HOST, state, phase, part)

    def _stored(self) -> Iterator[Traffic]:
        """Yield the move of the updated value to the parameters: gathered on the device if they are
        wider."""
        step, update, theta = self.step, self.unit.update, self.unit.parameters
        state, phase, itemsize = State.PARAMETERS, self.updating, theta.dtype.itemsize
        if step.materialized:
            yield from self._put(update.value)
            return
        missing = exclude_axes(step.updated, step.parameters)
        is_on_device = update.is_on_device
        if missing:
            if not is_on_device:
                part = theta.buffer.shard((*step.updated, *step.parameters)) * itemsize
                yield copies(TO_DEVICE, state, phase, part)
            if step.gather_after_update is GatherAfterUpdate.NEXT_FORWARD:
                return
            yield self._call(Collective.ALL_GATHER, missing, state, phase, theta.stored)
            is_on_device = True
            if step.gather_after_update is GatherAfterUpdate.DURING_UPDATE:
                phase = Phase.UPDATE  # awaited when every unit is updated
        if is_on_device and step.parameters_tier is not Tier.DEVICE:
            yield copies(TO_HOST, state, phase, theta.stored)
        if not is_on_device and step.parameters_tier is Tier.DEVICE:
            yield copies(TO_DEVICE, state, phase, theta.stored)
        if step.parameters_tier is Tier.FILE:
            yield copies(WRITE, state, phase, theta.stored)
