"""A rank's step as it happens: live bytes as they rise and fall, what is sent, and the time; and
what every wrap says to a model's timeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from ptrain.axes.ring import Calls, Group, group_over
from ptrain.cost import Collective, Phase, Spent, State, Traffic, TrafficKey
from ptrain.derivation.clock import Arrival, Clock
from ptrain.derivation.layers import Representatives
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.rooms.room import Shape
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType, Layout
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Complete, Kind, Mark, Timeline, boundaries

_COPIES = {
    (Tier.HOST, Tier.DEVICE): Collective.HOST_TO_DEVICE,
    (Tier.DEVICE, Tier.HOST): Collective.DEVICE_TO_HOST,
    (Tier.FILE, Tier.HOST): Collective.FILE_READ,
    (Tier.HOST, Tier.FILE): Collective.FILE_WRITE,
}


@dataclass(eq=False, repr=False, slots=True)
class Account:
    """Calls and copies of one step, for `times` units that do the same."""

    spec: Spec
    times: int = 1
    rows: list[Traffic] = field(default_factory=list)

    def sent(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        state: State,
        phase: Phase,
        payload: int,
        via: str | None,
        ranks: int | None = None,
    ) -> None:
        """One collective over the group along `axes`, of a full tensor of `payload` bytes; or
        over so many neighbours of it."""
        calls = Calls(collective, state, phase, self.times, via)
        ordered = [factor.axis for factor in self.spec.factors if factor.axis in axes]
        group = group_over(self.spec, ordered)
        self.rows.append(calls.over(Group(group.axes, ranks or group.ranks), payload))

    def moved(self, source: Tier, target: Tier, state: State, phase: Phase, size: int) -> None:
        """One copy of `size` bytes between two tiers."""
        key = TrafficKey(axes=(), collective=_COPIES[source, target], state=state, phase=phase)
        times = self.times
        self.rows.append(Traffic(key=key, calls=times, payload_bytes=times * size, sent_bytes=0))


class TooLarge(Exception):
    """The peak of a step is above the limit up to which it is played."""


@dataclass(eq=False, repr=False, slots=True)
class Tape:
    """A rank's step as it happens. Of device memory: bytes above what lives for the whole step, and
    their maximum by phase. Of what is sent: where there is an `account`; of time, where there is a
    `clock`. `hooks` are what a room's collectives take of the host. Nothing is read unless
    `is_reading`. A peak above `most` ends the step."""

    level: int = 0
    peak: int = 0
    peaks: dict[Phase, int] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    account: Account | None = None
    is_reading: bool = True
    clock: Clock | None = None
    hooks: dict[Collective, Hook] = field(default_factory=dict)
    most: float = inf

    def enter(self, phase: Phase) -> None:
        """What follows counts for `phase`, what lives already included. Raises TooLarge for a peak
        above `most`."""
        if self.peak > self.most:
            raise TooLarge
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.peak)
        self.phase, self.peak = phase, self.level
        if self.clock is not None:
            self.clock.phase = phase

    def add(self, size: int) -> None:
        """Allocates, or frees where `size` is negative."""
        self.level += size
        if self.level > self.peak:
            self.peak = self.level

    def spike(self, size: int) -> None:
        """Allocates and frees at once."""
        if self.is_reading:
            self.peak = max(self.peak, self.level + size)

    def repeat(self, times: int, act: Callable[[], None]) -> None:
        """Count what `act` allocates and frees so many times, one by one: it is done once."""
        if times == 1:
            act()
            return
        assert self.account is None, "who counts what is sent has units by kind"
        level, peak = self.level, self.peak
        self.peak = level
        self.in_time(times, act)
        net, rise = self.level - level, self.peak - level
        self.level = level + times * net
        self.peak = max(peak, level + rise + max(0, (times - 1) * net))

    def in_time(self, times: int, act: Callable[[], None]) -> None:
        """Count what `act` takes of time, and nothing else, so many times: it is done once."""
        if self.clock is None:
            act()
        else:
            self.clock.repeat(times, act)

    def allocated(self, size: int, tier: Tier) -> None:
        if tier is Tier.DEVICE and self.is_reading:
            self.add(size)

    def sent(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        state: State,
        payload: int,
        via: str,
        *,
        ranks: int | None = None,
        is_awaited: bool = True,
        since: float | None = None,
    ) -> Arrival | None:
        """Return what is on its way, where there is a clock and it is not awaited at once. It may
        start from `since` on (`Clock`)."""
        if not self.is_reading:
            return None
        if self.account is not None and self.account.times:
            self.account.sent(collective, axes, state, self.phase, payload, via or None, ranks)
        if self.clock is None:
            return None
        if collective in self.hooks:
            self.clock.hook(self.hooks[collective])
        stand_in = Collective(via) if via else None
        arrival = self.clock.send(collective, axes, payload, via=stand_in, ranks=ranks, since=since)
        if is_awaited:
            arrival.wait()
            return None
        return arrival

    def moved(self, source: Tier, target: Tier, state: State, size: int) -> None:
        if not self.is_reading:
            return
        if self.account is not None:
            self.account.moved(source, target, state, self.phase, size)
        if self.clock is not None:
            self.clock.copy(_COPIES[source, target], size).wait()

    def hook(self, hook: Hook) -> None:
        """A wrapper does one of its parts on the host."""
        if self.clock is not None and self.is_reading:
            self.clock.hook(hook)

    def computed(
        self, kind: OperatorKind, dtype: DType, size: int, spent: Spent = Spent.WRAPPERS
    ) -> None:
        """An operator that is not the model's reads and writes `size` bytes."""
        if self.clock is not None and self.is_reading:
            self.clock.operator(spent, kind, dtype, size)

    def computed_beside(self, kind: OperatorKind, dtype: DType, size: int) -> None:
        """The same on a stream of its own, where there are any: it takes no time there."""
        if self.clock is not None and not self.clock.pace.overlaps:
            self.computed(kind, dtype, size)

    def updated(self, rule: str, dtype: DType, tier: Tier, shapes: Sequence[Shape]) -> None:
        """An optimizer steps on a room's tensors, where what is cast around it is cast by the
        room."""
        if self.clock is None or not self.is_reading:
            return
        if tier is not Tier.DEVICE and self.clock.pace.overlaps:
            self.clock.update_on_host(rule, dtype, shapes)
        else:
            self.clock.update(rule, _uncast(dtype), shapes)


def _uncast(dtype: DType) -> Layout:
    """A layout in which an update casts nothing."""
    return Layout(
        name=dtype.value,
        parameters=dtype,
        gradients=dtype,
        master=None,
        moments=dtype,
        reduced=dtype,
    )


class Scene(NamedTuple):
    """What every wrap is made from: the tape it writes to, and what it may read."""

    tape: Tape
    spec: Spec
    facts: ModelFacts
    plan: Plan
    timeline: Timeline
    representatives: Representatives | None = (
        None  # who is played, where that is not every unit by itself
    )

    @property
    def units(self) -> tuple[UnitFacts, ...]:
        """The units that are played, by their places in the timeline."""
        return self.facts.units if self.representatives is None else self.representatives.units

    @property
    def times(self) -> tuple[int, ...]:
        """How many equal units each of them stands for."""
        return (
            (1,) * len(self.facts.units)
            if self.representatives is None
            else self.representatives.times
        )

    def order(self, mark: Mark) -> tuple[int, ...]:
        """The units in the order in which a forward pass comes by their `mark`."""
        marks = boundaries(self.timeline.forward)
        return tuple(dict.fromkeys(item.unit for item in marks if item.mark is mark))

    def unit_of(self) -> dict[str, int]:
        """Parameter name -> index of its unit."""
        return {
            tensor.name: index for index, unit in enumerate(self.units) for tensor in unit.tensors
        }


class Marks(Protocol):
    """What acts at the marks of a model's timeline, and as gradients complete."""

    def enter(self, unit: int) -> None:
        """A unit's forward begins."""

    def leave(self, unit: int) -> None:
        """A unit's forward is over."""

    def before_backward(self, unit: int) -> None:
        """The gradient of a unit's output is there."""

    def after_backward(self, unit: int) -> None:
        """The gradient of a unit's input is there; for the root, backward is over."""

    def complete(self, gradient: Complete) -> None:
        """A parameter's gradient stands alive (`gradient.cloned`: is to be copied)."""


class Wrap(Marks, Protocol):
    """A wrap's own allocations at the boundaries of a model's timeline."""

    scene: Scene
    updates_alike: bool  # on all ranks; and an update leaves nothing to play another one with

    def begin_passes(self) -> None:
        """The passes of a step in a pipeline begin."""

    def settle(self) -> None:
        """One of them is over, and what it made is sent."""

    def end_passes(self) -> None:
        """They are over."""

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """A micro-batch begins."""

    def gathered(self) -> int:
        """Bytes of units that are gathered now."""
        ...

    def begin_half(self, kind: Kind) -> None:
        """A half of a backward pass begins: of the gradients of inputs, or of weights."""

    def end_half(self, kind: Kind) -> None:
        """It is over."""

    def lingering(self) -> int:
        """Bytes that outlive a backward pass and are no gradients."""
        ...

    def signature(self) -> Hashable:
        """Return what a pass depends on: with equal ones it does the same."""
        ...

    def reduce(self) -> None:
        """Reduce what is partial."""

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return what the norm and the update of the rank with this shard depend on."""
        ...

    def clipped(self, shard: int) -> list[list[int]] | None:
        """Elements of each gradient on the rank with this shard, in groups of which there is a norm
        each; None where they are not on the device."""
        ...

    def update(self, shard: int) -> None:
        """The optimizer, on the rank with this shard."""

    def finish_update(self) -> None:
        """Complete what the update left running."""
