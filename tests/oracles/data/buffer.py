"""The flat buffer of a unit: all its tensors in one, padded so that the ranks divide it.

In memory it is [dp_shard, the axes inside it, dp_replicate, c]: the shard over dp_shard is a
contiguous piece, and the shard over the next axis a contiguous piece of that. A group over several
axes counts its ranks in mesh order (the outermost axis slowest), in which dp_replicate comes first.
If the two orders differ, torch's collectives need a permuted copy, because they only support
contiguous parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ptrain.axes.data.cost import in_memory, lies_in_group_order, padded_flat
from ptrain.spec.placement import Axis, exclude_axes
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import FlatUnits

Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer with sizes in elements; `cut` are the axes that shard it."""

    padded: int
    memory: Axes  # that cut any state, as they lie in memory
    degrees: dict[Axis, int]

    @classmethod
    def of(cls, spec: Spec, step: FlatUnits, numel: int, axes: Axes | None = None) -> Buffer:
        """Return the buffer of `numel` elements that is sharded along `axes` (for a unit: all axes
        along which any of its states is sharded)."""
        if axes is None:
            axes = (*step.parameters, *step.optimizer, *step.gradients)
        memory = in_memory(axes)
        degrees = {axis: spec.degree(axis) for axis in step.axes}
        return cls(padded_flat(numel, math.prod(degrees[a] for a in memory)), memory, degrees)

    def shard(self, cut: Axes) -> int:
        """Return the elements of a shard."""
        return self.padded // math.prod(self.degrees[axis] for axis in {*cut})

    def permuted(self, cut: Axes, over: Axes) -> int:
        """Return the elements of the copy that a collective along `over` makes of a shard over
        `cut`: 0 if the group's parts are consecutive in it."""
        return 0 if lies_in_group_order(self.memory, cut, over) else self.shard(cut)

    def copied(self, had: Axes, cut: Axes) -> int:
        """Return the elements that are copied to take the shard over `had` and `cut` from one over
        `had`: 0 if it is a contiguous piece."""
        new, parts = {*cut} - {*had}, exclude_axes(self.memory, had)
        return 0 if {*parts[: len(new)]} == new else self.shard((*had, *cut))
