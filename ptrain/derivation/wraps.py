"""What each wrap but the flat units allocates, in torch's own order: one device, DDP, FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import local_rows, padded_rows
from ptrain.derivation.facts import UnitFacts
from ptrain.derivation.tape import Scene
from ptrain.plan.step import FullyShard
from ptrain.spec.batch import GradientSync, ReduceScatterVia
from ptrain.timeline import Complete

Shapes = tuple[tuple[int, ...], ...]


def clip_and_cast(scene: Scene, groups: Sequence[Sequence[int]]) -> None:
    """The update of tensors that stay in place: the norm's scalars, and with a master copy each
    group's gradients cast to its dtype. `groups` are the local elements of each tensor."""
    layout = scene.plan.update.layout
    if scene.plan.clip is not None:
        clip(scene, sum(map(len, groups)))
    if layout.master is not None and layout.master is not layout.gradients:
        largest = max((sum(group) for group in groups), default=0)
        scene.tape.spike(largest * layout.master.itemsize)


def clip(scene: Scene, num_tensors: int) -> None:
    """A norm per tensor, stacked for the norm of all; one scalar stays until the step is over. The
    quotient max_norm / (norm + eps) takes a sum, a reciprocal and a product."""
    scalar = max(4, scene.plan.update.layout.gradients.itemsize)
    scene.tape.spike(max(2 * num_tensors + 1, num_tensors + 4) * scalar)
    scene.tape.add(scalar)


class Local:
    """One device: autograd's gradients stay where they are; later ones are added to them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.tape = scene, scene.tape
        self.is_first = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first = is_first

    def enter(self, unit: int) -> None:
        """Nothing is gathered."""

    leave = before_backward = after_backward = enter

    def complete(self, gradient: Complete) -> None:
        if not self.is_first:
            self.tape.add(0 if gradient.cloned else -gradient.size)
        elif gradient.cloned:
            self.tape.add(gradient.size)

    def gathered(self) -> int:
        return 0

    def update(self, shard: int) -> None:
        groups = [[tensor.numel for tensor in unit.tensors] for unit in self.scene.facts.units]
        clip_and_cast(self.scene, groups)


class Replicated(Local):
    """DDP: buckets live always. Where they are added to (K > 1) or copied into, autograd's own
    gradient goes at once."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        itemsize = scene.plan.update.layout.gradients.itemsize
        self.tape.add(scene.facts.numel * itemsize)
        self.copies = scene.plan.accumulate.micro_batches == 1

    def complete(self, gradient: Complete) -> None:
        if not gradient.cloned:
            self.tape.add(-gradient.size)
        elif self.copies:
            self.tape.spike(gradient.size)


class FullySharded:
    """FSDP2. A gather is a buffer and then a tensor per parameter. In forward the buffer lives
    until the next unit is gathered; in backward it goes at once, and the next unit's gather starts
    before this unit's backward. A reduction's input lives until the next unit's begins."""

    def __init__(self, scene: Scene, step: FullyShard) -> None:
        self.scene, self.tape, self.step = scene, scene.tape, step
        self.ranks = ranks_over(scene.spec, step.shard_axes)
        layout = scene.plan.update.layout
        rows: dict[Shapes, int] = {}
        for unit in scene.facts.units:
            shapes = _shapes(unit)
            if shapes not in rows:
                rows[shapes] = sum(padded_rows(shape, self.ranks) for shape in shapes)
        padded = [rows[_shapes(unit)] for unit in scene.facts.units]
        self.whole = [size * self.ranks * layout.parameters.itemsize for size in padded]
        self.shard = [size * layout.gradients.itemsize for size in padded]
        self.unit_of = scene.unit_of()
        self.last_tensors = {u.tensors[-1].name for u in scene.facts.units if u.tensors}
        num_units = len(scene.facts.units)
        self.root = num_units - 1
        self.is_gathered = [False] * num_units
        self.is_pending = [False] * num_units
        self.has_shard = [False] * num_units
        self.whole_gradients = [0] * num_units
        self.last_gradient = [0] * num_units
        self.accumulates = [False] * num_units
        self.order: list[int] = []
        self.forward_buffer = self.reduce_input = self.all_reduced = 0
        self.reduces = self.is_last = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_last = is_last
        self.reduces = is_last or self.step.sync.gradients is GradientSync.EVERY
        self.order = []

    def enter(self, unit: int) -> None:
        if self.is_gathered[unit] or not self.whole[unit]:
            return
        self.tape.add(2 * self.whole[unit])
        self.tape.add(-self.forward_buffer)
        self.forward_buffer = self.whole[unit]
        self.is_gathered[unit] = True

    def leave(self, unit: int) -> None:
        if self.step.sync.reshard_after_forward:
            self._reshard(unit)
        if self.whole[unit]:
            self.order.append(unit)
        if unit == self.root:
            self.tape.add(-self.forward_buffer)
            self.forward_buffer = 0

    def before_backward(self, unit: int) -> None:
        if not self.whole[unit]:
            return
        self._start_gather(unit)
        if self.is_pending[unit]:
            self.tape.add(self.whole[unit])
            self.tape.add(-self.whole[unit])
            self.is_pending[unit], self.is_gathered[unit] = False, True
        place = self.order.index(unit)
        if place:
            self._start_gather(self.order[place - 1])

    def _start_gather(self, unit: int) -> None:
        if not (self.is_gathered[unit] or self.is_pending[unit]):
            self.is_pending[unit] = True
            self.tape.add(self.whole[unit])

    def _reshard(self, unit: int) -> None:
        if self.is_gathered[unit]:
            self.is_gathered[unit] = False
            self.tape.add(-self.whole[unit])

    def complete(self, gradient: Complete) -> None:
        unit = self.unit_of[gradient.parameter]
        if self.accumulates[unit]:
            self.tape.add(0 if gradient.cloned else -gradient.size)
            return
        if gradient.cloned:
            self.tape.add(gradient.size)
        self.whole_gradients[unit] += gradient.size
        if gradient.parameter in self.last_tensors:
            self.last_gradient[unit] = gradient.size

    def after_backward(self, unit: int) -> None:
        if self.is_last or self.step.sync.reshard_after_backward:
            self._reshard(unit)
        if self.reduces:
            self.tape.add(-self.reduce_input)
            self.reduce_input = 0
            if self.whole_gradients[unit]:
                self._reduce(unit)
        else:
            self.accumulates[unit] = self.whole_gradients[unit] > 0
        if unit == self.root:
            self.tape.add(-self.reduce_input - self.all_reduced)
            self.reduce_input = self.all_reduced = 0

    def _reduce(self, unit: int) -> None:
        """The last gradient outlives the others: torch's loop variable still names it."""
        whole = self.shard[unit] * self.ranks
        gradients, last = self.whole_gradients[unit], self.last_gradient[unit]
        self.tape.add(whole)
        self.tape.add(last - gradients)
        self.tape.add(self.shard[unit])
        if self.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL:
            self.tape.spike(whole)
        if self.has_shard[unit] and self.step.replicate_axes:
            self.all_reduced += self.shard[unit]
        elif self.has_shard[unit]:
            self.tape.add(-self.shard[unit])
        self.tape.add(-last)
        self.has_shard[unit] = True
        self.reduce_input = whole
        self.whole_gradients[unit] = self.last_gradient[unit] = 0
        self.accumulates[unit] = False

    def gathered(self) -> int:
        return sum(
            size for size, is_there in zip(self.whole, self.is_gathered, strict=True) if is_there
        )

    def update(self, shard: int) -> None:
        counts = Counter(_shapes(unit) for unit in self.scene.facts.units)
        local = {
            shapes: [local_rows(shape, self.ranks, shard) for shape in shapes] for shapes in counts
        }
        clip_and_cast(self.scene, [local[shapes] for shapes in counts.elements()])


def _shapes(unit: UnitFacts) -> Shapes:
    return tuple(tensor.shape for tensor in unit.tensors)
