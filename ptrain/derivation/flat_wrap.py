"""What flat units allocate: gathered parameters, gradient buffers, moves between layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import padded_flat
from ptrain.derivation.tape import Scene
from ptrain.derivation.wraps import clip
from ptrain.plan.step import FlatUnits
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.batch import GradientSync, ReduceScatterVia
from ptrain.timeline import Complete

Axes = tuple[Axis, ...]


class Buffer:
    """The shape [|dp_shard|, |dp_replicate|, c] of one unit's buffer, and which moves within it
    need a copy."""

    def __init__(self, scene: Scene, step: FlatUnits, numel: int) -> None:
        cut = {*step.parameters, *step.optimizer, *step.gradients}
        self.axes = tuple(axis for axis in reversed(DATA_AXES) if axis in cut)
        self.degrees = {axis: scene.spec.degree(axis) for axis in step.axes}
        self.mesh_order = step.axes
        self.padded = padded_flat(numel, ranks_over(scene.spec, self.axes))

    def numel(self, cut: Axes) -> int:
        """Elements of a shard over `cut`."""
        return self.padded // math.prod(self.degrees[axis] for axis in cut)

    def dims(self, cut: Axes) -> tuple[int, ...]:
        """Dimensions of a shard over `cut`."""
        dims = tuple(1 if axis in cut else self.degrees[axis] for axis in self.axes)
        return (*dims, self.numel(self.axes))

    def in_place(self, kept: Axes, over: Axes) -> bool:
        """Whether the parts along `over` of a shard over `kept` lie in the order of the group."""
        first = [self.axes.index(axis) for axis in self.mesh_order if axis in over]
        rest = [dim for dim in range(len(self.axes) + 1) if dim not in first]
        dims = self.dims(kept)
        significant = [dim for dim in (*first, *rest) if dims[dim] > 1]
        return significant == sorted(significant)

    def is_view(self, had: Axes, wanted: Axes) -> bool:
        """Whether the part of a shard over `had` along what `wanted` adds is contiguous in it."""
        dims = list(self.dims(had))
        narrowed = [
            dim
            for dim, axis in enumerate(self.axes)
            if axis in wanted and axis not in had and dims[dim] > 1
        ]
        for dim in narrowed:
            dims[dim] = 1
        return all(size == 1 for dim in narrowed for size in dims[:dim])


class Flat:
    """Flat units, one after the other in forward, backward and update."""

    def __init__(self, scene: Scene, step: FlatUnits) -> None:
        self.scene, self.tape, self.step = scene, scene.tape, step
        layout = scene.plan.update.layout
        self.e_parameters = layout.parameters.itemsize
        self.e_gradients = layout.gradients.itemsize
        units = scene.facts.units
        buffers = {unit.numel: Buffer(scene, step, unit.numel) for unit in units}
        self.buffers = [buffers[unit.numel] for unit in units]
        self.num_tensors = [len(unit.tensors) for unit in units]
        self.unit_of = scene.unit_of()
        self.is_gathered = [not step.parameters] * len(units)
        self.is_open = [False] * len(units)
        self.has_shard = [False] * len(units)
        self.pending = [0] * len(units)
        self.is_last = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_last = is_last

    def enter(self, unit: int) -> None:
        if self.is_gathered[unit]:
            return
        buffer, cut = self.buffers[unit], self.step.parameters
        size = buffer.padded * self.e_parameters
        self.tape.add(size)
        if not buffer.in_place((), cut):
            self.tape.spike(size)
        self.is_gathered[unit] = True

    def _release(self, unit: int) -> None:
        if self.step.parameters and self.is_gathered[unit]:
            self.tape.add(-self.buffers[unit].padded * self.e_parameters)
            self.is_gathered[unit] = False

    def leave(self, unit: int) -> None:
        if self.step.sync.reshard_after_forward:
            self._release(unit)

    def before_backward(self, unit: int) -> None:
        self.enter(unit)
        if self.pending[unit]:
            return
        self.pending[unit] = self.num_tensors[unit]
        if not self.is_open[unit]:
            self.is_open[unit] = True
            self.tape.add(self.buffers[unit].padded * self.e_gradients)

    def complete(self, gradient: Complete) -> None:
        """Added to the unit's buffer, and gone before the unit's hook runs."""
        if not gradient.cloned:
            self.tape.add(-gradient.size)
        unit = self.unit_of[gradient.parameter]
        self.pending[unit] -= 1
        if self.pending[unit] == 0:
            self._finish(unit)

    def after_backward(self, unit: int) -> None:
        """A parameter that had no part in the loss leaves its unit open until the pass is over."""
        if unit == len(self.buffers) - 1:
            for late, pending in enumerate(self.pending):
                if pending:
                    self.pending[late] = 0
                    self._finish(late)

    def _finish(self, unit: int) -> None:
        cut = self.step.gradients
        if cut and (self.is_last or self.step.sync.gradients is GradientSync.EVERY):
            buffer = self.buffers[unit]
            size = self._reduce_scatter(buffer, (), cut)
            self.tape.add(-buffer.padded * self.e_gradients)
            self.is_open[unit] = False
            if self.has_shard[unit]:
                self.tape.add(-size)
            self.has_shard[unit] = True
        if self.is_last or self.step.sync.reshard_after_backward:
            self._release(unit)

    def _reduce_scatter(self, buffer: Buffer, cut: Axes, over: Axes) -> int:
        """Allocates the result; copies and receive buffers are gone when it is there."""
        whole = buffer.numel(cut) * self.e_gradients
        size = buffer.numel((*cut, *over)) * self.e_gradients
        self.tape.add(size)
        copies = not buffer.in_place(cut, over)
        exchanges = self.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL
        self.tape.spike(whole * (copies + exchanges))
        return size

    def _gather_spike(self, buffer: Buffer, cut: Axes, over: Axes, itemsize: int) -> None:
        kept = _without(cut, over)
        if not buffer.in_place(kept, over):
            self.tape.spike(buffer.numel(kept) * itemsize)

    def gathered(self) -> int:
        if not self.step.parameters:
            return 0
        return sum(
            buffer.padded * self.e_parameters
            for buffer, is_there in zip(self.buffers, self.is_gathered, strict=True)
            if is_there
        )

    def update(self, shard: int) -> None:
        used = [buffer for buffer in self.buffers if buffer.padded]
        for buffer in used:
            self._reduce_for_update(buffer)
        if self.scene.plan.clip is not None:
            clip(self.scene, len(used))
        for buffer in used:
            if self.scene.plan.update.layout.master is None:
                self._update_parameters(buffer)
            else:
                self._update_master(buffer)

    def _reduce_for_update(self, buffer: Buffer) -> None:
        had, wanted = self.step.gradients, self.step.optimizer
        narrower, wider = _without(wanted, had), _without(had, wanted)
        now, before = had, buffer.numel(had) * self.e_gradients
        held = before
        if narrower:
            held = self._reduce_scatter(buffer, now, narrower)
            now = (*now, *narrower)
            if not had:
                self.tape.add(-before)
        if wider:
            kept = _without(now, wider)
            self.tape.add(buffer.numel(kept) * self.e_gradients)
            self._gather_spike(buffer, now, wider, self.e_gradients)
            if narrower:
                self.tape.add(-held)
        if had and (narrower or wider):
            self.tape.add(-before)

    def _update_parameters(self, buffer: Buffer) -> None:
        """The shard that the optimizer updates, as a view where it can be one."""
        had, wanted = self.step.parameters, self.step.optimizer
        missing, now, size = _without(had, wanted), had, 0
        if missing:
            now = _without(had, missing)
            size = buffer.numel(now) * self.e_parameters
            self.tape.add(size)
            self._gather_spike(buffer, had, missing, self.e_parameters)
        if not buffer.is_view(now, wanted):
            part = buffer.numel((*now, *_without(wanted, now))) * self.e_parameters
            self.tape.add(part)
            self.tape.add(-size)
            size = part
        self._store(buffer)
        self.tape.add(-size)

    def _update_master(self, buffer: Buffer) -> None:
        layout = self.scene.plan.update.layout
        assert layout.master is not None
        numel = buffer.numel(self.step.optimizer)
        if layout.master is not layout.gradients:
            self.tape.spike(numel * layout.master.itemsize)
        size = numel * self.e_parameters if layout.master is not layout.parameters else 0
        self.tape.add(size)
        self._store(buffer)
        self.tape.add(-size)

    def _store(self, buffer: Buffer) -> None:
        """An updated shard goes back to where Theta lives."""
        had, wanted = self.step.optimizer, self.step.parameters
        missing, extra = _without(had, wanted), _without(wanted, had)
        part = 0
        if extra and not buffer.is_view(had, wanted):
            part = buffer.numel((*had, *extra)) * self.e_parameters
            self.tape.add(part)
        if missing:
            self._gather_spike(buffer, (*had, *extra), missing, self.e_parameters)
        self.tape.add(-part)


def _without(axes: Sequence[Axis], others: Sequence[Axis]) -> Axes:
    return tuple(axis for axis in axes if axis not in others)
