"""Records a rank's step (live bytes, traffic and time), and defines the interface between wraps and
a model's timeline.

Activation modes add copies and collectives to a step (`kept_traffic`). Offloaded tensors are copied
off the device and back. A recomputation repeats the collectives of its forward pass over tp.
Parameters of a data axis are not gathered again: their unit is already all-gathered for the
backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ptrain.axes.ring import Calls, Group, group_over
from ptrain.cost import Collective, Footprint, Phase, Spent, State, Traffic, TrafficKey
from ptrain.derivation.clock import Arrival, Clock
from ptrain.derivation.layers import Representatives
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.runtime.interface import Shape
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType, Layout
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
    """The traffic of one step, counted for `times` identical units."""

    spec: Spec
    times: int = 1
    rows: list[Traffic] = field(default_factory=list)

    def count_traffic(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        state: State,
        phase: Phase,
        payload: int,
        via: str | None,
        ranks: int | None = None,
    ) -> None:
        """Count a collective over the group along `axes`, or over `ranks` neighbours of it, with a
        full tensor of `payload` bytes.

        Args:
            collective: The collective.
            axes: Axes of the group, in any order.
            state: The state whose bytes are sent.
            phase: The phase that sends them.
            payload: Bytes of the full tensor, before sharding.
            via: Name of the collective that replaces it. None if it runs itself.
            ranks: Neighbours of the group that take part. None for all ranks of the group.
        """
        calls = Calls(collective, state, phase, self.times, via)
        ordered = [factor.axis for factor in self.spec.factors if factor.axis in axes]
        group = group_over(self.spec, ordered)
        self.rows.append(calls.traffic(Group(group.axes, ranks or group.ranks), payload))

    def count_copy(self, source: Tier, target: Tier, state: State, phase: Phase, size: int) -> None:
        """Count a copy of `size` bytes between two tiers.

        Args:
            source: Tier that is read.
            target: Tier that is written. Copies are between device and host, or host and file.
            state: The state whose bytes are copied.
            phase: The phase that copies them.
            size: Bytes of one copy. `times` of the account multiplies them.
        """
        key = TrafficKey(axes=(), collective=_COPIES[source, target], state=state, phase=phase)
        times = self.times
        self.rows.append(Traffic(key=key, calls=times, payload_bytes=times * size, sent_bytes=0))


class PeakExceeded(Exception):
    """The peak of a step exceeds the limit of the simulation."""


@dataclass(eq=False, repr=False, slots=True)
class Tape:
    """A record of a rank's step.

    Attributes:
        level: Device bytes above the memory that lives for the full step.
        peak: Maximum of `level` in the current phase.
        peaks: Maximum of `level` in each finished phase.
        phase: The current phase.
        account: Records traffic. None records none.
        is_reading: False to ignore allocations, traffic and compute.
        clock: Records time. None records none.
        hooks: The hook that each collective runs on the host.
        most: The highest allowed peak in bytes.
    """

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
        """Start a phase, whose peak includes live memory.

        Args:
            phase: The phase to start.

        Raises:
            PeakExceeded: The peak of the last phase exceeds `most` bytes.
        """
        # Checked once per phase, because `add` runs at every allocation and must be fast.
        if self.peak > self.most:
            raise PeakExceeded
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.peak)
        self.phase, self.peak = phase, self.level
        if self.clock is not None:
            self.clock.phase = phase

    def add(self, size: int) -> None:
        """Allocate bytes, or free them if `size` is negative."""
        self.level += size
        if self.level > self.peak:
            self.peak = self.level

    def spike(self, size: int) -> None:
        """Allocate bytes and free them at once."""
        if self.is_reading:
            self.peak = max(self.peak, self.level + size)

    def repeat(self, times: int, act: Callable[[], None]) -> None:
        """Count the memory and time of `act` `times` times, but execute it once.

        Args:
            times: Repetitions to count.
            act: Called once. It may change the level, by equal bytes in each repetition.
        """
        if times == 1:
            act()
            return
        # An account multiplies by its own `times`. Counting repeated blocks there again would count
        # twice.
        assert self.account is None, "who counts what is sent has units by kind"
        level, peak = self.level, self.peak
        self.peak = level
        self.in_time(times, act)
        net, rise = self.level - level, self.peak - level
        self.level = level + times * net
        # If the action leaves bytes allocated, its last repetition starts highest. If it frees
        # bytes, the first one does.
        self.peak = max(peak, level + rise + max(0, (times - 1) * net))

    def in_time(self, times: int, act: Callable[[], None]) -> None:
        """Count the time of `act` `times` times and its memory once. It is executed once.

        Args:
            times: Repetitions to count. Without a clock they have no effect.
            act: Called once.
        """
        if self.clock is None:
            act()
        else:
            self.clock.repeat(times, act)

    def record_allocation(self, size: int, tier: Tier) -> None:
        """Count bytes that a runtime allocates on the device. Other tiers are ignored.

        Args:
            size: Bytes to allocate, or to free if negative.
            tier: The tier of the storage.
        """
        if tier is Tier.DEVICE and self.is_reading:
            self.add(size)

    def record_collective(
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
        """Record a collective.

        Args:
            collective: The collective.
            axes: Axes of the group, in any order.
            state: The state whose bytes are sent.
            payload: Bytes of the full tensor, before sharding.
            via: Name of the collective that replaces it. Empty if it runs itself.
            ranks: Neighbours of the group that take part. None for all ranks of the group.
            is_awaited: True if the caller waits at once.
            since: Earliest start in the clock's seconds. None starts now.

        Returns:
            The arrival if there is a clock and the collective is not awaited at once, else None.
        """
        if not self.is_reading:
            return None
        if self.account is not None and self.account.times:
            self.account.count_traffic(
                collective, axes, state, self.phase, payload, via or None, ranks
            )
        if self.clock is None:
            return None
        if collective in self.hooks:
            self.clock.run_hook(self.hooks[collective])
        stand_in = Collective(via) if via else None
        arrival = self.clock.send_payload(
            collective, axes, payload, via=stand_in, ranks=ranks, since=since
        )
        if is_awaited:
            arrival.wait()
            return None
        return arrival

    def record_copy(self, source: Tier, target: Tier, state: State, size: int) -> None:
        """Record a copy between two tiers, and wait for it.

        Args:
            source: Tier that is read.
            target: Tier that is written. Copies are between device and host, or host and file.
            state: The state whose bytes are copied.
            size: Bytes of the copy.
        """
        if not self.is_reading:
            return
        if self.account is not None:
            self.account.count_copy(source, target, state, self.phase, size)
        if self.clock is not None:
            self.clock.copy(_COPIES[source, target], size).wait()

    def hook(self, hook: Hook) -> None:
        """Run a hook of a wrapper on the host."""
        if self.clock is not None and self.is_reading:
            self.clock.run_hook(hook)

    def record_operator(
        self, kind: OperatorKind, dtype: DType, size: int, spent: Spent = Spent.WRAPPERS
    ) -> None:
        """Time an operator outside the model that reads and writes `size` bytes.

        Args:
            kind: Selects the rate of the cluster.
            dtype: The dtype of the operator's tensors.
            size: Bytes read plus bytes written.
            spent: The activity to which the seconds are attributed.
        """
        if self.clock is not None and self.is_reading:
            self.clock.run_operator(spent, kind, dtype, size)

    def computed_beside(self, kind: OperatorKind, dtype: DType, size: int) -> None:
        """Time an operator on a separate stream. It takes no time if the device overlaps
        streams.

        Args:
            kind: Selects the rate of the cluster.
            dtype: The dtype of the operator's tensors.
            size: Bytes read plus bytes written.
        """
        if self.clock is not None and not self.clock.pace.overlaps:
            self.record_operator(kind, dtype, size)

    def record_update(self, rule: str, dtype: DType, tier: Tier, shapes: Sequence[Shape]) -> None:
        """Time an optimizer step on the runtime's tensors. The runtime times the casts around
        it separately.

        Args:
            rule: Name of the update rule, a key of `OPTIMIZERS`.
            dtype: The dtype of all tensors of the update.
            tier: Tier of the updated tensors. On a GPU cluster, the host updates other tiers than
                the device.
            shapes: Shapes of the tensors that this rank updates.
        """
        if self.clock is None or not self.is_reading:
            return
        # On a CPU cluster the device is the host, so its measured update rates hold for every tier.
        if tier is not Tier.DEVICE and self.clock.pace.overlaps:
            self.clock.update_on_host(rule, dtype, shapes)
        else:
            self.clock.run_update(rule, _uncast_layout(dtype), shapes)


def _uncast_layout(dtype: DType) -> Layout:
    """Return a layout in which an update casts nothing."""
    return Layout(
        name=dtype.value,
        parameters=dtype,
        gradients=dtype,
        master=None,
        moments=dtype,
        reduced=dtype,
    )


class Scene(NamedTuple):
    """The inputs of every wrap: the tape to record on, and the model and plan to read.

    `representatives` are the units that are simulated for equal ones. None simulates every unit.
    """

    tape: Tape
    spec: Spec
    facts: ModelFacts
    plan: Plan
    timeline: Timeline
    representatives: Representatives | None = None

    @property
    def units(self) -> tuple[UnitFacts, ...]:
        """The simulated units, by their places in the timeline."""
        return self.facts.units if self.representatives is None else self.representatives.units

    @property
    def times(self) -> tuple[int, ...]:
        """The number of equal units that each simulated unit represents."""
        return (
            (1,) * len(self.facts.units)
            if self.representatives is None
            else self.representatives.times
        )

    def order(self, mark: Mark) -> tuple[int, ...]:
        """Return the units in the order in which a forward pass reaches their `mark`."""
        marks = boundaries(self.timeline.forward)
        return tuple(dict.fromkeys(item.unit for item in marks if item.mark is mark))

    def unit_of(self) -> dict[str, int]:
        """Return the index of each parameter's unit, by parameter name."""
        return {
            tensor.name: index for index, unit in enumerate(self.units) for tensor in unit.tensors
        }


class Marks:
    """The callbacks at the marks of a model's timeline and at completed gradients. By default they
    do nothing."""

    def enter(self, unit: int) -> None:
        """Begin a unit's forward pass."""

    def leave(self, unit: int) -> None:
        """End a unit's forward pass."""

    def before_backward(self, unit: int) -> None:
        """Begin a unit's backward pass: the gradient of its output is available."""

    def after_backward(self, unit: int) -> None:
        """End a unit's backward pass: the gradient of its input is available. The root ends
        backward."""

    def complete(self, gradient: Complete) -> None:
        """Accept a parameter's gradient, to be kept, or copied if it is `cloned`."""


class Wrap(Marks):
    """The simulation of a wrap along a model's timeline. A wrap overrides the callbacks at which it
    acts.

    `updates_alike` is True if the update is equal on all ranks and leaves no state to simulate
    another.
    """

    scene: Scene
    updates_alike: bool = False

    def begin_passes(self) -> None:
        """Begin the passes of a pipeline step."""

    def end_pass(self) -> None:
        """End one pass of a pipeline step, after its output is sent."""

    def end_passes(self) -> None:
        """End the passes of a pipeline step."""

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch.

        Args:
            is_first: True for the first micro-batch of a step.
            is_last: True for the last one. It may be the first one too.
        """

    def gathered_bytes(self) -> int:
        """Return the bytes of units that are all-gathered now."""
        return 0

    def begin_half(self, kind: Kind) -> None:
        """Begin a half of a backward pass, for the gradients of inputs or of weights.

        Args:
            kind: `INPUT` or `WEIGHT`.
        """

    def end_half(self, kind: Kind) -> None:
        """End a half of a backward pass."""

    def lingering_bytes(self) -> int:
        """Return the bytes that outlive a backward pass and are not gradients."""
        return 0

    def signature(self) -> Hashable:
        """Return the state that a pass depends on. Passes with equal state are equal."""
        return None

    def reduce(self) -> None:
        """Reduce partial gradients."""

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return a key that is equal for shards with equal norm and update.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        return 0

    def norm_groups(self, shard: int) -> list[list[int]] | None:
        """Return the elements of each gradient on the rank with this shard, by group of the norm.

        The result is None if the gradients are not on the device.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        return None

    def update(self, shard: int) -> None:
        """Run the optimizer on the rank with this shard."""

    def finish_update(self) -> None:
        """Complete the work that the update left running."""


Moved = Sequence[tuple[str, int]]
Repeated = Sequence[tuple[str, int, int]]

COPIES = {
    Tier.HOST: (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE),
    Tier.FILE: (Collective.FILE_WRITE, Collective.FILE_READ),
}


def kept_traffic(
    spec: Spec, plan: Plan, moved: Moved, repeated: Repeated, times: int | None = None
) -> Iterator[Traffic]:
    """Yield the copies and collectives that one rank's activation modes add to a step.

    Args:
        spec: The spec, for the degree of the tensor axis.
        plan: The plan of the step.
        moved: (tier, bytes) of each tensor that leaves the device in one micro-batch.
        repeated: (collective, bytes of the full tensor, ranks or 0 for all) of each repeated call
            in one micro-batch.
        times: How many micro-batches to count. None counts all micro-batches of a step.
    """
    times = plan.accumulate.micro_batches if times is None else times
    for tier, (out, back) in COPIES.items():
        sizes = [size for name, size in moved if name == tier.value]
        for collective, phase in ((out, Phase.FORWARD), (back, Phase.BACKWARD)):
            if sizes:
                key = TrafficKey(
                    axes=(), collective=collective, state=State.ACTIVATIONS, phase=phase
                )
                # Copies go out in forward and back in backward, with equal bytes: a storage is
                # moved as it is saved.
                payload = times * sum(sizes)
                yield Traffic(
                    key=key, calls=times * len(sizes), payload_bytes=payload, sent_bytes=0
                )
    if plan.tensor is None:
        assert not repeated, "what is sent over no axis by name is sent over tp"
        return
    degree = spec.degree(plan.tensor.axis)
    for (name, size, ranks), number in Counter(repeated).items():
        group = Group((plan.tensor.axis,), ranks or degree)
        calls = Calls(Collective(name), State.ACTIVATIONS, Phase.BACKWARD, number * times)
        yield calls.traffic(group, size)


def activation_row(rank: int, device_bytes: int, moved: Moved) -> Footprint:
    """Return one rank's memory row of activations.

    Args:
        rank: The rank of the row.
        device_bytes: Bytes of activations on the device.
        moved: (tier, bytes) of the activations on other tiers.
    """
    off = {tier: sum(size for name, size in moved if name == tier.value) for tier in COPIES}
    return Footprint(
        state=State.ACTIVATIONS,
        rank=rank,
        device_bytes=device_bytes,
        host_bytes=off[Tier.HOST],
        file_bytes=off[Tier.FILE],
    )
