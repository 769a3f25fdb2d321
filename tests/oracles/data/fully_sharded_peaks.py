"""The peaks of FSDP2 in closed form: by phase the largest of explicit sums over a chain of units.

In a unit's turn the units behind it have given up what they do not keep, those before it have not
begun or are on their way, and the root around them is gathered. A reduction's input is there until
the next one's begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ptrain.axes.data.fsdp2 import FSDP2Behavior, fsdp2_behavior
from ptrain.cost import Phase
from ptrain.spec.dials import GradientSync, ReduceScatterVia
from ptrain.spec.precision import Layout
from ptrain.steps.wraps import FullyShard
from tests.oracles.data.chain import MicroBatchPlace, micro_batches
from tests.oracles.data.fully_sharded import FullyShardedForm, ShardedUnit
from tests.oracles.data.optimizer import norm, update_casts


def fully_sharded_peaks(sharded: FullyShardedForm, index: int) -> dict[Phase, int]:
    """Return bytes above resident memory on the ranks with shard `index`, by phase."""
    kinds = micro_batches(sharded.plan.accumulate.micro_batches)
    passes = [_Pass(sharded, kind, fsdp2_behavior()) for kind in kinds]
    return {
        Phase.FORWARD: max(size for turns in passes for size in turns.forward()),
        Phase.BACKWARD: max(size for turns in passes for size in turns.backward()),
        Phase.UPDATE: max(_update(sharded, index)),
    }


def _update(sharded: FullyShardedForm, index: int) -> Iterator[int]:
    """Return the peak of the update: the norm of all; then each unit's casts, and for matrices the
    largest orthogonalization."""
    base = sum(unit.kept for unit in sharded.units)
    at_once, stays = norm(sharded.spec, sharded.plan, sharded.chain, len(sharded.chain.tensors))
    yield base + at_once
    yield base + stays
    for unit in sharded.units:
        held = sharded.held(unit, index)
        yield base + stays + update_casts(sharded.spec, sharded.layout, unit.unit, held)


def _wholes(units: Iterable[ShardedUnit]) -> int:
    return sum(unit.whole for unit in units)


@dataclass(frozen=True)
class _Pass:
    """A forward and a backward pass over the units of a chain."""

    sharded: FullyShardedForm
    kind: MicroBatchPlace
    habits: FSDP2Behavior

    @property
    def step(self) -> FullyShard:
        return self.sharded.step

    @property
    def layout(self) -> Layout:
        return self.sharded.layout

    @property
    def inwards(self) -> list[ShardedUnit]:
        """Return the units in the order of a forward pass: the root first."""
        return sorted(self.sharded.units, key=lambda unit: not unit.unit.is_root)

    @property
    def releases(self) -> bool:
        """Return True if backward frees gathered units."""
        return self.kind.is_last or self.step.sync.reshard_after_backward

    @property
    def reduces(self) -> bool:
        return self.kind.is_last or self.step.sync.gradients is GradientSync.EVERY

    @property
    def _waits_unreduced(self) -> bool:
        """Return True if gradients of earlier micro-batches are unreduced."""
        return self.step.sync.gradients is GradientSync.LAST and not self.kind.is_first

    @property
    def _is_cast(self) -> bool:
        return self.layout.reduced is not self.layout.parameters

    @property
    def _casts_arrivals(self) -> bool:
        """Return True if each complete gradient is cast to the dtype of the reduction."""
        return self.habits.casts_on_arrival and self._is_cast and not self.reduces

    @property
    def _adds_in_place(self) -> bool:
        """Return True if autograd adds gradients to those of earlier micro-batches."""
        return self._waits_unreduced and (self.habits.casts_on_arrival or not self._is_cast)

    # ---- forward

    def forward(self) -> Iterator[int]:
        """Return the peak turn by turn: the gather is started and copied out while the previous
        buffer lives; then the next ones are started; at the end a smaller group's shards are
        copied."""
        order, step = self.inwards, self.step
        ahead = (step.prefetch or 0) if step.overlaps else 0
        base = sum(self.before(unit) for unit in order)
        yield base
        is_whole = not self.kind.is_first and not step.sync.reshard_after_backward
        if is_whole:  # as the backward pass before left them
            yield base + _wholes(order)
        for place, unit in enumerate(order):
            buffers = [other.whole * step.overlaps for other in order[max(0, place - 1) : place]]
            held = base + sum(o.whole if o.unit.is_root else o.waits for o in order[:place])
            if is_whole:
                if not unit.unit.is_root:
                    yield held + unit.narrowing + _wholes(order[place + 1 :])
                continue
            begun = _wholes(order[place + 1 : place + ahead]) if place else 0
            own_copy = unit.copy(0) if place == 0 or not ahead else 0
            yield held + sum(buffers) + begun + unit.whole + own_copy
            yield held + sum(buffers) * self.habits.holds_buffer + begun + 2 * unit.whole
            held += unit.whole * step.overlaps
            following = order[place + 1 : place + 1 + ahead]
            yield from _beginning(
                held + unit.whole, [(o, 0) for o in following], ahead if place else 0
            )
            if not unit.unit.is_root:
                yield held + _wholes(following) + unit.narrowing
        for root in order[:1]:
            inner, buffer = order[1:], order[-1].whole * step.overlaps * (not is_whole)
            if root.unit.is_root:
                yield base + sum(unit.waits for unit in inner) + buffer + root.narrowing

    # ---- backward

    def before(self, unit: ShardedUnit) -> int:
        """Return the bytes of the unit's gradients from earlier micro-batches: reduced ones, or
        unreduced ones of autograd or their sum in the dtype of the reduction."""
        if self.kind.is_first:
            return 0
        if not self._waits_unreduced:
            return unit.kept
        return unit.summed if self._is_cast else sum(unit.gradients)

    def arrived(self, unit: ShardedUnit, tensors: Iterable[int]) -> int:
        """Return the bytes when these gradients are complete, in addition to existing memory,
        except for those that autograd adds to earlier ones."""
        if self._adds_in_place:
            return self.before(unit)
        return self.before(unit) + sum(self._complete(unit)[index] for index in tensors)

    def _complete(self, unit: ShardedUnit) -> tuple[int, ...]:
        """Return the bytes of each complete separate gradient."""
        return unit.casts if self._casts_arrivals else unit.gradients

    def _arriving(self, unit: ShardedUnit, tensors: Iterable[int]) -> int:
        """Bytes beside those that have `arrived`, where autograd's gradient is a tensor of its own:
        of the largest that is about to be added to one of before; or of one beside its own cast,
        less the casts of those that come later, the tensors in front of it."""
        if not self.sharded.chain.is_fresh:
            return 0
        if self._adds_in_place:
            return max((unit.gradients[index] for index in tensors), default=0)
        if not self._casts_arrivals:
            return 0
        order = sorted(tensors)
        later = accumulate((unit.casts[index] for index in order), initial=0)
        beside = zip((unit.gradients[index] for index in order), later, strict=False)
        return max((size - casts for size, casts in beside), default=0)

    def rest(self, unit: ShardedUnit) -> int:
        """Return the bytes of a finished unit: its gradients, and the all-reduced replica sum if it
        is a separate tensor."""
        if not self.reduces:
            return unit.summed if self._is_cast else sum(unit.gradients)
        is_other = self._casts_after or not self._is_new
        return unit.kept + unit.output * (is_other and unit.replicas > 1)

    @property
    def _casts_after(self) -> bool:
        return self.layout.reduced is not self.layout.gradients

    @property
    def _is_new(self) -> bool:
        """Return True if no gradients are reduced yet."""
        return self.kind.is_first or self.step.sync.gradients is GradientSync.LAST

    def backward(self) -> Iterator[int]:
        """Return the peak turn by turn, with the root's gather first and its reduction last."""
        order = self.inwards[::-1]
        roots = [unit for unit in order if unit.unit.is_root]
        order = [*roots, *(unit for unit in order if not unit.unit.is_root)]
        blocks = order[len(roots) :]
        head = self.sharded.chain.head
        gradients = sum(self.before(unit) for unit in order)
        yield gradients + sum(unit.waits for unit in order)
        for place, unit in enumerate(order):
            done = [other for other in order[:place] if not other.unit.is_root]
            level = sum(self.before(other) for other in order[place + 1 :])
            level += sum(map(self.rest, done))
            level += sum(other.input for other in done[-1:]) * self.reduces
            level += sum(self.arrived(other, head) for other in roots[:place])
            level += _wholes(roots[:place]) + (0 if self.releases else _wholes(done))
            yield from self._gathering(level + self.before(unit), order, place)
            following = self._ahead(order, place)
            waiting = sum(other.waits for other in order[place + 1 :])
            level += waiting + _wholes(following)
            if unit.unit.is_root:
                arrived = self.arrived(unit, head) + self._arriving(unit, head)
                yield level + unit.whole + arrived
            else:
                yield from self._turn(unit, level, sum(o.input for o in done[-1:]))
        held = 0 if self.releases else _wholes(blocks)
        for root in roots:
            before = sum(unit.input for unit in blocks[-1:])
            level = held + sum(map(self.rest, blocks)) + before * self.reduces
            yield from self._turn(root, level, before)

    def _ahead(self, order: Sequence[ShardedUnit], place: int) -> list[ShardedUnit]:
        """Return the units whose gathers start in a turn or before it; torch's default is the next
        one."""
        prefetch = 1 if self.step.prefetch is None else self.step.prefetch
        ahead = prefetch if self.step.overlaps else 0
        return [unit for unit in order[place + 1 : place + 1 + ahead] if not unit.stays]

    def _gathering(self, level: int, order: Sequence[ShardedUnit], place: int) -> Iterator[int]:
        """Return the peak of a unit's gather, with earlier and later started ones; a smaller
        group's shard stays until the unit is copied out."""
        unit, waiting = order[place], sum(other.waits for other in order[place + 1 :])
        level += waiting
        begun = self._ahead(order, place - 1) if place else []
        beside = _wholes(other for other in begun if other is not unit)
        if unit.stays:
            yield level + unit.whole + beside
        else:
            own_copy = 0 if unit in begun else unit.copy(unit.between)
            yield level + unit.between + beside + unit.whole + own_copy
            yield level + unit.between + beside + 2 * unit.whole
        following = [(other, other.between) for other in self._ahead(order, place)]
        known = sum(other in begun for other, _ in following)
        yield from _beginning(level + unit.whole, following, known + 1 if known else 0)

    def _turn(self, unit: ShardedUnit, level: int, flying: int) -> Iterator[int]:
        """Return the peak while its gradients arrive and it finishes. `level` is the memory of all
        others and, if this pass reduces, `flying` the input of the previous reduction."""
        everything = range(len(unit.gradients))
        arrived = self.arrived(unit, everything)
        late = {*everything} - (self.sharded.chain.head if unit.unit.is_root else set())
        yield level + unit.whole + arrived + self._arriving(unit, late)
        level += 0 if self.releases else unit.whole
        if not self.reduces:
            if self._is_cast and self.kind.is_first and not self._casts_arrivals:
                yield level + _converting(unit, self.layout)
            return
        level -= flying
        kept = 0 if self._is_new else unit.kept
        is_summed = self._waits_unreduced and self._is_cast
        gradients = unit.summed if is_summed else sum(unit.gradients)
        dtype = self.layout.reduced if is_summed else self.layout.parameters
        last = unit.last * dtype.itemsize * self.habits.names_last_gradient
        exchange = unit.input * (self.step.reduce_scatter is ReduceScatterVia.ALL_TO_ALL)
        yield level + kept + gradients + unit.input
        yield level + kept + last + unit.input + unit.output + exchange
        yield level + kept + last + unit.input + unit.output + unit.kept * self._casts_after


def _beginning(
    level: int, following: Sequence[tuple[ShardedUnit, int]], known: int
) -> Iterator[int]:
    """Return the peak of gathers that start one after the other, each with a cast copy that is
    freed after sending; the first `known` - 1 were cast in an earlier step."""
    for place, (unit, sharded) in enumerate(following):
        is_new = place >= known - 1
        before = _wholes(other for other, _ in following[:place])
        yield level + before + unit.whole + unit.copy(sharded) * is_new


def _converting(unit: ShardedUnit, layout: Layout) -> int:
    """Return the peak while gradients are copied to the dtype of the reduction, one by one."""
    copies = [numel * layout.reduced.itemsize for numel in unit.unit.numels]
    left = [
        sum(unit.gradients),
        *(sum(unit.gradients) - size for size in accumulate(unit.gradients)),
    ]
    return max(map(sum, zip(left, accumulate(copies), strict=False)))
