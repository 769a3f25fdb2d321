"""What one device and DDP allocate, in torch's own order; and the update of tensors that stay in
place, whoever wrapped them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ptrain.derivation.optimizer_state import is_hidden, kept_tensors, needs_whole_tensors
from ptrain.derivation.tape import Scene
from ptrain.facts.model import UnitFacts
from ptrain.optimizers.ghost import muon_temporaries
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec
from ptrain.steps.step import LONG_NORM, NORM_ROW
from ptrain.timeline import Complete, Kind


def cast_units(scene: Scene, groups: Sequence[Sequence[int]]) -> None:
    """The update of tensors that stay in place: unit by unit what is cast to the dtype that is
    updated (gradients, moments). `groups` are the local elements of each tensor."""
    layout, optimizer = scene.plan.update.layout, scene.spec.optimizer
    by_hidden = {hidden: _num_casts(optimizer, layout, hidden) for hidden in (False, True)}
    for group, unit in zip(groups, scene.facts.units, strict=True):
        elements = sum(
            numel * by_hidden[is_hidden(unit, tensor)]
            for numel, tensor in zip(group, unit.tensors, strict=True)
        )
        scene.tape.spike(elements * layout.updated.itemsize + _of_largest_matrix(scene, unit))


def _num_casts(optimizer: OptimizerSpec, layout: Layout, is_hidden: bool) -> int:
    """How many tensors are cast for the update of one."""
    moments = kept_tensors(optimizer, layout, is_hidden=is_hidden)
    num_moments = sum(not kept.is_scalar for kept in moments)
    return (layout.gradients is not layout.updated) + num_moments * (
        layout.moments is not layout.updated
    )


def _of_largest_matrix(scene: Scene, unit: UnitFacts) -> int:
    """Matrix after matrix, with nothing of the one before; 0 where slices are updated."""
    layout = scene.plan.update.layout
    if not needs_whole_tensors(scene.spec.optimizer):
        return 0
    shapes = {tensor.shape for tensor in unit.tensors if is_hidden(unit, tensor)}
    return max(
        (muon_temporaries(shape, layout.updated, scaled=layout.scales_loss) for shape in shapes),
        default=0,
    )


def by_operator(scene: Scene, numels: Sequence[int]) -> list[list[int]]:
    """Elements of each tensor: within tp those that are cut, then those that its ranks have alike,
    for each of which there is a norm."""
    clip = scene.plan.clip
    if clip is None or not clip.operator_axes:
        return [list(numels)]
    known = list(zip(numels, scene.facts.tensors, strict=True))
    return [[numel for numel, tensor in known if tensor.is_cut is cut] for cut in (True, False)]


def clipping(scene: Scene, groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Bytes at once, and until the step is over: the norm of each group of tensors, of which a
    scalar stays meanwhile, and one at last. `groups` are the elements of each tensor."""
    scalar = max(4, scene.plan.update.layout.gradients.itemsize)
    is_cpu = scene.spec.device != "cuda"
    most = max(before + _norm(sizes, is_cpu=is_cpu) for before, sizes in enumerate(groups))
    return most * scalar, scalar


def _norm(sizes: Sequence[int], *, is_cpu: bool) -> int:
    """How many scalars there are at once: a norm per tensor, on a processor one per row of a long
    tensor first, and one of what is left of it; all stacked for the norm of all."""
    long = [numel for numel in sizes if is_cpu and numel > LONG_NORM]
    alive = most = len(sizes) - len(long)
    rows = 0  # of the tensor before, which live until those of the next are there
    for numel in long:
        most = max(most, alive + rows + numel // NORM_ROW)
        rows, alive = numel // NORM_ROW, alive + 2
        most = max(most, alive + rows)
    return max(most, 2 * alive + 1)


class Local:
    """One device: autograd's gradients stay where they are; later ones are added to them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.tape = scene, scene.tape
        self.is_first = True

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self.is_first = is_first

    def begin_half(self, kind: Kind) -> None:
        """A gradient is where it is kept, whoever computed it."""

    def end_half(self, kind: Kind) -> None:
        """Nothing is reduced."""

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

    def lingering(self) -> int:
        return 0

    def signature(self) -> Hashable:
        return self.is_first

    def reduce(self) -> None:
        """They are where the optimizer wants them."""

    def clipped(self, shard: int) -> list[list[int]] | None:
        return by_operator(self.scene, [tensor.numel for tensor in self.scene.facts.tensors])

    def update(self, shard: int) -> None:
        groups = [[tensor.numel for tensor in unit.tensors] for unit in self.scene.facts.units]
        cast_units(self.scene, groups)

    def finish_update(self) -> None:
        """Nothing is on its way."""


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
