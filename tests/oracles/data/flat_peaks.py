"""The peaks of flat units in closed form: by phase the largest of explicit sums over a chain.

Prefetch starts the gathers of the next units in the order of use, whose full parameters (and
communication buffers until the wait) then coexist with the unit in use. An overlapped reduction is
awaited when the next one starts, so it lives through the next unit's backward. During a unit's
turn, later units in this order have released their transient memory, earlier ones have not started,
and the root around them is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptrain.cost import Phase
from ptrain.spec.placement import Tier
from tests.oracles.data.chain import MicroBatchPlace, micro_batches
from tests.oracles.data.flat import FlatUnit, FlatUnitsForm
from tests.oracles.data.optimizer import norm

FLAG_BYTES = 4  # fp32: whether a gradient of a scaled loss overflowed


def flat_peaks(flat: FlatUnitsForm) -> dict[Phase, int]:
    """Return device bytes above the resident parameters and optimizer state, by phase."""
    kinds = micro_batches(flat.plan.accumulate.micro_batches)
    return {
        Phase.FORWARD: max(max(_forward(flat, kind)) for kind in kinds),
        Phase.BACKWARD: max(max(_Backward(flat, kind).moments()) for kind in kinds),
        Phase.UPDATE: max(_update(flat)),
    }


def _whole(units: Iterable[FlatUnit]) -> int:
    return sum(unit.parameters.whole for unit in units)


def _gathering(units: Iterable[FlatUnit]) -> int:
    return sum(unit.parameters.gathering for unit in units)


def _forward(flat: FlatUnitsForm, kind: MicroBatchPlace) -> Iterator[int]:
    """Unit by unit: its gather beside those begun before it, the gathers ahead beside it, and in a
    step's first pass what the update left open."""
    order, ahead = flat.entered, flat.step.prefetch
    base = sum(unit.moments(kind).before for unit in order)
    yield base
    if not (kind.is_first or flat.step.sync.reshard_after_backward):
        yield base + _whole(order)  # as the backward pass before left them
        return
    for place, unit in enumerate(order):
        theta = unit.parameters
        stay = (other for other in order[:place] if other.parameters.stays or other.is_root)
        held = base + _whole(stay)
        begun = order[place + 1 : place + ahead] if place else ()
        following = order[place + 1 : place + 1 + ahead]
        yield held + theta.gathering + _gathering(begun)
        yield held + theta.whole + _gathering(following)
        if kind.is_first:
            yield held + theta.completing + (0 if ahead and place else _gathering(begun))
            for at, other in enumerate(following):
                open_ = other.parameters.completing if place == 0 or at == ahead - 1 else 0
                yield held + theta.whole + _gathering(following[:at]) + open_


@dataclass(frozen=True)
class _Backward:
    """One backward pass: a turn for each block, the last one first, within the root's."""

    flat: FlatUnitsForm
    kind: MicroBatchPlace

    @property
    def blocks(self) -> tuple[FlatUnit, ...]:
        return tuple(unit for unit in self.flat.units if not unit.is_root)

    @property
    def root(self) -> tuple[FlatUnit, ...]:
        """Return the root in a list, or an empty list if it has no parameters."""
        return tuple(unit for unit in self.flat.units if unit.is_root)

    @property
    def releases(self) -> bool:
        """Return True if a finished unit frees its gathered parameters."""
        return self.kind.is_last or self.flat.step.sync.reshard_after_backward

    def _rest(self, unit: FlatUnit) -> int:
        """Return the bytes of a finished unit's gradients; if they are consumed, of its update."""
        consumed = self.flat.step.consumed
        return unit.update.stays if consumed else unit.moments(self.kind).after

    def _autograd(self, unit: FlatUnit, tensors: Iterable[int]) -> int:
        """Return the bytes of the largest gradient in addition to the buffer: a separate tensor, or
        the copy that autograd makes unless it adds a view in place."""
        layout, numels = self.flat.plan.update.layout, unit.unit.numels
        is_added = layout.parameters is layout.reduced and not unit.moments(self.kind).is_anew
        if is_added and not self.flat.chain.is_fresh:
            return 0
        most = max((numels[index] for index in tensors), default=0)
        return most * layout.parameters.itemsize

    def moments(self) -> Iterator[int]:
        kind, blocks = self.kind, self.blocks
        before = sum(unit.moments(kind).before for unit in self.flat.units)
        stay = _whole(unit for unit in self.flat.units if unit.parameters.stays)
        yield before + stay
        for root in self.root:
            theta, gradients = root.parameters, root.moments(kind)
            yield before + stay + (0 if theta.stays else theta.gathering)
            whole = stay + (0 if theta.stays else theta.whole)
            head = self._autograd(root, self.flat.chain.head)
            yield before - gradients.before + gradients.opened + whole + head
        for place in range(len(blocks)):
            yield from self._block(place)
        done = sum(map(self._rest, blocks))
        held = 0 if self.releases else _whole(blocks)
        for root in self.root:
            late = {*range(len(root.unit.numels))} - self.flat.chain.head
            yield from self._turn(root, done, held, blocks[:1], late)
        # the last transfer is awaited
        finished = (*self.root, *blocks)[:1]
        held = 0 if self.releases else _whole(self.flat.units)
        for unit in finished:
            others = sum(map(self._rest, self.flat.units)) - self._rest(unit)
            yield held + others + (self._flying(finished) and unit.moments(kind).keeping)

    def _block(self, place: int) -> Iterator[int]:
        """Return the peak of a block's turn: first the gathers, in addition to those started in the
        turn before. The root starts none, as no unit was used before it."""
        kind, blocks, ahead = self.kind, self.blocks, self.flat.step.prefetch
        unit, earlier, done = blocks[place], blocks[:place], blocks[place + 1 :]
        stay = [other for other in earlier if other.parameters.stays]
        held = _whole((*self.root, *stay, *(() if self.releases else done)))
        gradients = (
            sum(root.moments(kind).opened for root in self.root)
            + sum(other.moments(kind).before for other in earlier)
            + sum(map(self._rest, done))
        )
        begun = _gathering(_next(earlier, ahead - 1)) if done else 0
        theta, before = unit.parameters, unit.moments(kind).before + self._flying(done[:1])
        gather = theta.whole if theta.stays else theta.gathering
        yield gradients + before + held + begun + gather
        held += _gathering(_next(earlier, ahead))
        yield gradients + before + held + theta.whole
        tensors = range(len(unit.unit.numels))
        yield from self._turn(unit, gradients, held, done[:1], tensors)

    def _flying(self, finished: Sequence[FlatUnit]) -> int:
        """Return the bytes of a pending reduction above its result."""
        if self.flat.step.consumed:
            return 0
        gradients = (unit.moments(self.kind) for unit in finished)
        return sum(moments.flying - moments.after for moments in gradients)

    def _turn(
        self,
        unit: FlatUnit,
        gradients: int,
        held: int,
        finished: Sequence[FlatUnit],
        tensors: Iterable[int],
    ) -> Iterator[int]:
        """Return the peak while a unit's gradients arrive and it finishes; `gradients` and `held`
        are the gradients and parameters of the others. The pending reduction of the previous unit
        is awaited first."""
        moments, flies = unit.moments(self.kind), self._flying(finished)
        beside = gradients + held + unit.parameters.whole
        yield beside + flies + moments.opened + self._autograd(unit, tensors)
        if flies:
            before = (other.moments(self.kind) for other in finished)
            awaiting = sum(other.keeping - other.after for other in before)
            yield beside + awaiting + moments.opened
        yield beside + moments.reducing
        if not unit.gradients.overlaps:
            yield beside + moments.keeping
        if self.flat.step.consumed:
            yield beside + unit.preparation.peak
            yield gradients + held + unit.preparation.after + unit.update.peak


def _next(earlier: Sequence[FlatUnit], ahead: int) -> list[FlatUnit]:
    """Return the given number of blocks before this one, if they are gathered again."""
    near = earlier[max(0, len(earlier) - ahead) :] if ahead > 0 else ()
    return [unit for unit in near if not unit.parameters.stays]


def _update(flat: FlatUnitsForm) -> Iterator[int]:
    """Return the peak of the update: each unit's gradients are prepared in turn, then the norm is
    computed, then the units are updated in turn."""
    units, last = flat.units, micro_batches(flat.plan.accumulate.micro_batches)[-1]
    if flat.step.consumed:
        yield sum(unit.update.stays for unit in units)
        return
    comes = [unit.moments(last).after for unit in units]
    ready = [unit.preparation.after for unit in units]
    yield sum(comes)
    for place, unit in enumerate(units):
        yield sum(ready[:place]) + unit.preparation.peak + sum(comes[place + 1 :])
    is_on_device = flat.step.gradients_tier is Tier.DEVICE
    base = sum(ready)
    yield base + FLAG_BYTES * (flat.plan.update.layout.scales_loss and is_on_device)
    at_once, stays = _norm(flat, is_on_device=is_on_device)
    yield base + at_once
    for place, unit in enumerate(units):
        flying = sum(other.update.stays for other in units[:place])
        yield base + stays + flying + unit.update.peak
    yield base + stays + sum(unit.update.stays for unit in units)


def _norm(flat: FlatUnitsForm, *, is_on_device: bool) -> tuple[int, int]:
    """Return the bytes of the norm of the units' shards; if they are off the device, only the
    reduced scalar is on it."""
    clip = flat.plan.clip
    if is_on_device:
        return norm(flat.spec, flat.plan, flat.chain, len(flat.units))
    scalar = max(4, flat.plan.update.layout.gradients.itemsize)
    return (scalar if clip is not None and clip.axes else 0), 0
