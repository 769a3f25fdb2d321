"""The clock of one rank in a training step: compute, communication that overlaps it, and waiting.

Every second of a rank's time is attributed to one `TimeKey`. Collectives and copies run on lanes,
one call at a time: one lane for each group of mesh axes, one for each direction between two tiers.
If cores both compute and communicate (`Pace.overlaps` is false), communication takes the rank's
time. Otherwise the host runs ahead of the device on a lane of its work, and `launches` is how long
a step waits for it. A call may then start before the compute that preceded its issue has ended:
`since` is the earliest start, if that is not the present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from ptrain.cost import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.interconnect import Network
from ptrain.facts.model import InnerCollective, Operator, PassWork
from ptrain.optimizers.ghost import update_operators
from ptrain.rates.pace import (
    Pace,
    TimedOperators,
    UnknownRate,
    around_seconds,
    cut_seconds,
    operators_seconds,
)
from ptrain.runtime.interface import Shape
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.placement import Axis, axes_named
from ptrain.spec.precision import DType, Layout

Seconds = dict[TimeKey, float]


class LaneSpan(NamedTuple):
    """An interval of activity on a lane. The rank's compute has the lane None."""

    lane: Hashable
    key: TimeKey
    start: float
    end: float


class Arrival(NamedTuple):
    """A collective or copy in progress that completes at the time `at`."""

    spend_until: Callable[[TimeKey, float], None]
    key: TimeKey
    at: float

    def wait(self) -> None:
        """Make the rank wait for the completion."""
        self.spend_until(self.key, self.at)


class ClockState(NamedTuple):
    """A snapshot of a clock. `met` is the rank's time at its last collective."""

    now: float
    free: dict[Hashable, float]
    own: Seconds
    moving: Seconds
    spans: tuple[LaneSpan, ...]
    met: float


# Time of a pass, with messages that overlap its operators: a message starts where the pass sends it
# and is awaited where the pass reads it. The operators in between overlap its transit.
#
# Messages over one axis move one at a time. A hop of a ring starts before the block's product and
# is read after it (Liu et al. 2023).


Sent = tuple[str, Collective]  # over an axis


class Messages(NamedTuple):
    """The messages of one kind: seconds in transit (`moving`), seconds that the rank waits for them
    (`waited`), and the delay of the first one's start that causes no wait (`slack`)."""

    moving: float
    waited: float
    slack: float

    def add(self, other: Messages) -> Messages:
        """Return the sum of two consecutive groups of messages."""
        return Messages(self.moving + other.moving, self.waited + other.waited, self.slack)


class PassSeconds(NamedTuple):
    """The seconds of one pass of a layer: its operators, the collectives that are awaited at once
    by axis (`sums`), their hooks, the `messages` that are awaited later, and, if a device computes
    while its host runs ahead, the host's seconds to issue the operators (`launches`)."""

    compute: float = 0.0
    sums: tuple[tuple[Sent, float], ...] = ()
    hooks: float = 0.0
    messages: tuple[tuple[Sent, Messages], ...] = ()
    launches: float = 0.0

    def in_a_row(self, pace: Pace) -> float:
        """Return the sum of all seconds. The host's are left out for a device that computes by
        itself: device and host synchronize only over full steps (`with_launches`)."""
        sums = sum(seconds for _, seconds in self.sums)
        taken = self.compute + sums + sum(messages.waited for _, messages in self.messages)
        return taken if pace.overlaps else taken + self.on_host

    @property
    def on_host(self) -> float:
        """The seconds of the host."""
        return self.launches + self.hooks


def messages_of(
    work: PassWork,
    operator_seconds: Callable[[Operator], float],
    message_seconds: Callable[[InnerCollective], float],
) -> Iterator[tuple[InnerCollective, Messages]]:
    """Yield each message of a pass when it is awaited. Collectives that are awaited at once are
    left out."""
    if not any(isinstance(item, InnerCollective) and item.beside for item in work):
        return  # no need to time the operators
    now, free = 0.0, dict[str, float]()
    under_way = dict[int, list[tuple[InnerCollective, float, float]]]()  # by place of the wait

    def awaited(
        arriving: list[tuple[InnerCollective, float, float]],
    ) -> Iterator[tuple[InnerCollective, Messages]]:
        nonlocal now
        for item, seconds, arrival in arriving:
            yield item, Messages(seconds, max(0.0, arrival - now), max(0.0, now - arrival))
            now = max(now, arrival)

    for place, item in enumerate(work):
        yield from awaited(under_way.pop(place, []))
        if isinstance(item, Operator):
            now += operator_seconds(item)
        elif item.beside:
            seconds = message_seconds(item)
            free[item.axis] = arrival = max(now, free.get(item.axis, 0.0)) + seconds
            following = place + 1 + item.beside
            under_way.setdefault(following, []).append((item, seconds, arrival))
    yield from awaited([*chain.from_iterable(under_way.values())])


# The lane of launches: how long a device waits for its host.
#
# The host issues operators in order, and the device starts each one when all earlier ones are done.
# The host reads no device result between two steps (`train.loop`), so in a steady state it runs
# ahead of the device by up to a full step. A step therefore takes the longer of the two chains,
# which depend on each other in nothing else (maximum cycle mean, Baccelli et al. 1992). The limit
# of the driver's queue, about a thousand launches, is not modelled.


def with_launches(rows: Sequence[TimeRow], seconds: float) -> tuple[TimeRow, ...]:
    """Return the rows of a step whose host issues for `seconds`. Time beyond the other rows is
    attributed to the phases in which the host takes longer than they do."""
    late = seconds - sum(row.seconds for row in rows)
    issuing = {row.key.phase: row.moving for row in rows if row.key.spent is Spent.LAUNCHES}
    if late <= 0 or not any(issuing.values()):  # a stage without launches waits in the bubble
        return tuple(rows)
    own = {phase: sum(row.seconds for row in rows if row.key.phase is phase) for phase in issuing}
    longer = {phase: max(0.0, taken - own[phase]) for phase, taken in issuing.items()}
    weights = longer if any(longer.values()) else issuing  # another rank's host is late
    share = late / sum(weights.values())
    return tuple(
        replace(row, seconds=share * weights[row.key.phase])
        if row.key.spent is Spent.LAUNCHES
        else row
        for row in rows
    )


def with_stragglers(rows: Sequence[TimeRow], network: Network) -> tuple[TimeRow, ...]:
    """Return the rows of a step with the delay of stragglers among many nodes."""
    seconds = network.straggler_share * sum(row.seconds for row in rows)
    key = TimeKey(Spent.STRAGGLERS, Phase.UPDATE)
    return (*rows, TimeRow(key=key, seconds=seconds)) if seconds else tuple(rows)


_AGREED = 64  # bytes: a few numbers of 8
_NEVER_BEHIND = "the host never limits its devices: the cluster has no rate for issuing operators"
_MOST_NODES = 64  # of the published job that gave the default of `stragglers`
_MANY_NODES = (
    "stragglers and congestion grow with each doubling of the nodes as they do up to "
    f"{_MOST_NODES} nodes; beyond that they are unknown"
)
_EXPOSED_SUMS = (
    "tp collectives are exposed; runtimes that overlap them (asynchronous TP) are faster"
)
_NO_DISPATCH = "the host's time for sharded products is unknown and not included"


class Clock:
    """The clock of a rank. `now` excludes the added time of repetitions, which are counted in
    `own`; activities in progress keep their distance to `now`. `tensor_axis` is the axis whose
    collectives lie between operators. `spans` collects activity if it is a list."""

    def __init__(
        self,
        pace: Pace,
        network: Network,
        tensor_axis: Axis | None = None,
    ) -> None:
        self.pace, self.network, self.tensor_axis = pace, network, tensor_axis
        self.spans: list[LaneSpan] | None = None
        self._slowdown = network.interference if pace.overlaps else 0.0
        self.now = 0.0
        self.phase = Phase.FORWARD
        self.free: dict[Hashable, float] = {}
        self.own: Seconds = {}
        self.moving: Seconds = {}
        self._met = 0.0  # the rank's time at its last collective
        self._seconds_of: dict[Hashable, float] = {}
        self._operators = TimedOperators(pace)
        self._passes: dict[tuple[int, float], tuple[PassWork, PassSeconds]] = {}

    def for_other_rank(self) -> Clock:
        """Return a clock for another rank of the same machine, at the start of a step."""
        clock = Clock(self.pace, self.network, self.tensor_axis)
        clock._seconds_of, clock._passes = self._seconds_of, self._passes
        clock._operators = self._operators
        return clock

    # -- the rank's own time

    def spend_seconds(self, key: TimeKey, seconds: float) -> None:
        """Attribute seconds of the rank's time to an activity or a wait."""
        if seconds <= 0:
            return
        self.own[key] = self.own.get(key, 0.0) + seconds
        if self.spans is not None:
            self.spans.append(LaneSpan(None, key, self.now, self.now + seconds))
        self.now += seconds

    def spend_until(self, key: TimeKey, moment: float) -> None:
        """Wait for a moment, unless it has passed."""
        self.spend_seconds(key, moment - self.now)

    def compute(self, work: PassSeconds, share: float = 1.0) -> None:
        """Compute a share of a layer's pass, including its collectives."""
        began, seconds = self.now, work.compute * share
        self.spend_seconds(_time_key(Spent.COMPUTE, self.phase), seconds)
        if self._slowdown:
            ends = [end for lane, end in self.free.items() if isinstance(lane, tuple)]  # of groups
            if (under_way := max(ends, default=0.0) - began) > 0:
                self._interfere(seconds, under_way)
        for sent, messages in work.messages:
            self._overlap(_time_key(Spent.COLLECTIVES, self.phase, *sent), began, messages, share)
        for sent, seconds in work.sums:
            key = _time_key(Spent.COLLECTIVES, self.phase, *sent)
            self.spend_until(key, self._occupy(key.axes, key, seconds * share, None))
        if work.on_host:
            self._on_host(work.on_host * share)
        if work.sums or work.messages:
            self.note_meeting()

    def _interfere(self, computed: float, under_way: float) -> None:
        """Add the slowdown of compute while a collective runs, for at most as long as it runs."""
        # Compute and the collective are slowed only while both run: at most all of the compute, or
        # the part that fits into the rest of the collective.
        longer = min(computed * self._slowdown, under_way * self._slowdown / (1 + self._slowdown))
        self.spend_seconds(_time_key(Spent.INTERFERENCE, self.phase), longer)

    def run_operator(self, spent: Spent, kind: OperatorKind, dtype: DType, size: int) -> None:
        """Run an operator that reads and writes `size` bytes."""
        seconds = self._operator_seconds(Operator(kind, dtype, (size,))) if size else 0.0
        self.spend_seconds(_time_key(spent, self.phase), seconds)

    def run_update(self, optimizer: str, layout: Layout, shapes: Sequence[Shape]) -> None:
        """Run the optimizer's update on tensors of these shapes. Muon and Adafactor are timed as
        operators, tensor by tensor."""
        if not OPTIMIZERS[optimizer].is_elementwise:
            for shape in shapes:
                key = optimizer, shape, layout.update_dtype
                seconds = self._remember(key, self._tensor_seconds, *key)
                self.spend_seconds(_time_key(Spent.UPDATE, self.phase), seconds)
            return
        numels = [math.prod(shape) for shape in shapes]
        elements, tensors = sum(numels), sum(numel > 0 for numel in numels)
        if elements:
            seconds = self.pace.update_seconds(
                optimizer, layout, elements=elements, tensors=tensors
            )
            self.spend_seconds(_time_key(Spent.UPDATE, self.phase), seconds)

    def update_on_host(self, optimizer: str, dtype: DType, shapes: Sequence[Shape]) -> None:
        """Update on the host, which reads parameters, gradients and moments and writes all except
        gradients."""
        row = OPTIMIZERS[optimizer]
        if not row.is_elementwise:
            raise UnknownRate(f"the host computes the {optimizer} update, which has no rate")
        # Read parameters, gradients and moments, write parameters and moments.
        accesses = 3 + 2 * len(row.moments)
        self.use_host(accesses * dtype.itemsize * sum(map(math.prod, shapes)))

    def use_host(self, size: int) -> None:
        """Let the host read and write `size` bytes for the update."""
        self.spend_seconds(_time_key(Spent.UPDATE, self.phase), self.network.host_seconds(size))

    def _tensor_seconds(self, optimizer: str, shape: Shape, dtype: DType) -> float:
        return sum(map(self.pace.operator_seconds, update_operators(optimizer, shape, dtype)))

    def run_clipping(self, layout: Layout, numels: Sequence[int]) -> None:
        """Compute the norm of gradients with these numbers of elements, and scale them."""
        elements, tensors = sum(numels), sum(numel > 0 for numel in numels)
        if elements:
            seconds = self.pace.clip_seconds(layout, elements=elements, tensors=tensors)
            self.spend_seconds(_time_key(Spent.UPDATE, self.phase), seconds)

    def run_hook(self, hook: Hook) -> None:
        """Run a hook of a wrapper on the host."""
        self._on_host(self._remember(hook, self.pace.hook_seconds, hook))

    def _on_host(self, seconds: float) -> None:
        if not self.pace.overlaps:
            self.spend_seconds(_time_key(Spent.WRAPPERS, self.phase), seconds)
        elif seconds:
            key = _time_key(Spent.LAUNCHES, self.phase)
            self.moving[key] = self.moving.get(key, 0.0) + seconds

    # -- communication and copies

    def send_payload(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        payload: int,
        *,
        via: Collective | None = None,
        ranks: int | None = None,
        since: float | None = None,
    ) -> Arrival:
        """Issue a collective over the group along `axes` (or `ranks` neighbours of it), of a full
        tensor of `payload` bytes. `via` is a collective that replaces it."""
        names = self.network.axis_names(axes)
        key = TimeKey(Spent.COLLECTIVES, self.phase, names, collective)
        seconds = self._group_seconds(via or collective, names, ranks, payload)
        return self._issue_collective(names, key, seconds, since)

    def between_ends(self, collective: Collective, axis: Axis, payload: int) -> None:
        """Run a collective of the first and the last rank along an axis, and wait for it."""
        names = (axis.value,)
        key = TimeKey(Spent.COLLECTIVES, self.phase, names, collective)
        seconds = self.pace.collective_seconds(
            collective, ranks=2, nodes=self.network.ends(axis), payload=payload
        )
        self._issue_collective(names, key, seconds, None).wait()

    def agree_on_loss(self) -> None:
        """Let all ranks agree on the loss before the update (`train.finite`). This is timed only
        for CPU ranks on several nodes. Within a node it takes about 0.1 ms."""
        sums, world, nodes = Collective.ALL_REDUCE, self.network.world, self.network.nodes
        if nodes > 1 and not self.pace.overlaps:
            key = TimeKey(Spent.COLLECTIVES, self.phase, ("world",), sums)
            seconds = self.pace.collective_seconds(sums, ranks=world, nodes=nodes, payload=_AGREED)
            self._issue_collective("world", key, seconds, None)

    def message_seconds(self, axis: Axis, payload: int) -> float:
        """Return the transit seconds of a message to the next rank along an axis."""
        return self.pace.collective_seconds(
            Collective.SEND, ranks=2, nodes=self.network.pair(axis), payload=payload
        )

    def _group_seconds(
        self, collective: Collective, names: tuple[str, ...], ranks: int | None, payload: int
    ) -> float:
        question = (collective, names, ranks, payload)
        if question not in self._seconds_of:
            number, nodes = self.network.group(names, ranks)
            self._seconds_of[question] = (
                self.pace.collective_seconds(collective, ranks=number, nodes=nodes, payload=payload)
                if number > 1
                else 0.0
            )
        return self._seconds_of[question]

    def copy(self, copy: Collective, size: int, since: float | None = None) -> Arrival:
        """Issue a copy between two tiers."""
        key = TimeKey(Spent.COPIES, self.phase, (), copy)
        seconds = self._remember((copy, size), self.pace.copy_seconds, copy, size)
        return self._issue(copy, key, seconds, since)

    def _issue_collective(
        self, lane: Hashable, key: TimeKey, seconds: float, since: float | None
    ) -> Arrival:
        """Issue a collective. On cores its time grows with the rank's time since the last
        collective, whatever the rank did: copies, updates and hooks delay it like compute."""
        if self.pace.overlaps or not seconds:
            return self._issue(lane, key, seconds, since)
        arrival = self._issue(lane, key, seconds + self.pace.late_seconds(self.since_met), since)
        self.note_meeting()
        return arrival

    def note_meeting(self, since: float = 0.0) -> None:
        """Note that ranks synchronized `since` seconds ago, in a collective or by a message of the
        schedule. This has no effect on devices that overlap communication."""
        if not self.pace.overlaps:
            self._met = self.seconds - since

    @property
    def since_met(self) -> float:
        """The rank's seconds since the ranks last synchronized."""
        return self.seconds - self._met

    def _issue(self, lane: Hashable, key: TimeKey, seconds: float, since: float | None) -> Arrival:
        return Arrival(self.spend_until, key, self._occupy(lane, key, seconds, since))

    def _occupy(self, lane: Hashable, key: TimeKey, seconds: float, since: float | None) -> float:
        """Occupy a lane for some seconds and return the time at which the activity ends."""
        self.moving[key] = self.moving.get(key, 0.0) + seconds
        if not self.pace.overlaps:
            self.spend_seconds(key, seconds)
            return self.now
        ready = self.now if since is None else since
        start = max(ready, self.free.get(lane, 0.0))
        self.free[lane] = end = start + seconds
        if self.spans is not None:
            self.spans.append(LaneSpan(lane, key, start, end))
        if start < self.now and isinstance(lane, tuple):  # it overlapped compute
            self._interfere(self.now - start, seconds)
        return end

    def _overlap(self, key: TimeKey, began: float, messages: Messages, share: float) -> None:
        """Add a share of messages that were sent while the share of compute since `began` ran. If
        other activity held the lane, all messages are late, and the rank waits for the delay beyond
        `slack`."""
        held_up = max(0.0, self.free.get(key.axes, 0.0) - began)
        moving = share * messages.moving
        late = max(0.0, held_up - share * messages.slack)
        self.moving[key] = self.moving.get(key, 0.0) + moving
        if self.spans is not None and self.pace.overlaps:
            start = began + held_up
            self.spans.append(LaneSpan(key.axes, key, start, start + moving))
        self.spend_seconds(key, min(moving, share * messages.waited + late))
        self.free[key.axes] = max(self.free.get(key.axes, 0.0), self.now)

    # -- repetition

    def repeat(self, times: int, act: Callable[[], None]) -> None:
        """Count the time of `act` `times` times, but execute it once. The backlog of a
        lane grows by the same amount in each repetition."""
        before = self.snapshot()
        act()
        if times > 1:
            self.add(self.seconds_since(before), times - 1)
            for lane, end in self.free.items():
                late = max(0.0, before.free.get(lane, 0.0) - before.now)
                later = end - self.now - late
                if later > 0:
                    self.free[lane] = end + (times - 1) * later

    def snapshot(self) -> ClockState:
        """Return a snapshot of the clock."""
        return ClockState(
            self.now,
            dict(self.free),
            dict(self.own),
            dict(self.moving),
            tuple(self.spans or ()),
            self._met,
        )

    def back_to(self, moment: ClockState) -> None:
        """Restore a snapshot."""
        self.now, self.free = moment.now, dict(moment.free)
        self.own, self.moving, self._met = dict(moment.own), dict(moment.moving), moment.met
        if self.spans is not None:
            self.spans[:] = moment.spans

    def seconds_since(self, moment: ClockState) -> tuple[Seconds, Seconds]:
        """Return the rank's time and the time in transit since a snapshot."""
        return _subtract_seconds(self.own, moment.own), _subtract_seconds(
            self.moving, moment.moving
        )

    def add(self, spent: tuple[Seconds, Seconds], times: int = 1) -> None:
        """Add `times` times the seconds that `seconds_since` returned."""
        for sums, more in zip((self.own, self.moving), spent, strict=True):
            for key, seconds in more.items():
                sums[key] = sums.get(key, 0.0) + times * seconds
        if not self.pace.overlaps and any(key.spent is Spent.COLLECTIVES for key in spent[0]):
            self._met += times * sum(spent[0].values())  # the distance to the last one stays

    # -- results

    @property
    def seconds(self) -> float:
        """The rank's total time."""
        return sum(self.own.values())

    def step_time(self) -> StepTime:
        """Return the time of the finished step."""
        rows = with_stragglers(with_launches(self.time_rows(), self.launches), self.network)
        return StepTime(rows=rows, assumed=self.assumptions)

    def time_rows(self) -> tuple[TimeRow, ...]:
        """Return the time up to now, as if the host had always been ahead of the device."""
        return tuple(
            TimeRow(key=key, seconds=self.own.get(key, 0.0), moving=self.moving.get(key, 0.0))
            for key in dict.fromkeys((*self.own, *self.moving))
        )

    @property
    def launches(self) -> float:
        """The seconds in which the host issues work to a device."""
        return sum(taken for key, taken in self.moving.items() if key.spent is Spent.LAUNCHES)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences about effects that the machine's rates do not cover."""
        if not self.pace.overlaps:
            return ()
        is_cut, seconds = self.tensor_axis is not None, self.pace.hook_seconds
        noted = {
            _NEVER_BEHIND: not seconds(Hook.FORWARD_OPERATOR),
            _MANY_NODES: self.network.straggler_share > 0 and self.network.nodes > _MOST_NODES,
            _EXPOSED_SUMS: is_cut,
            _NO_DISPATCH: is_cut and not seconds(Hook.CUT_PRODUCT),
        }
        return tuple(sentence for sentence, is_noted in noted.items() if is_noted)

    def pass_seconds(self, work: PassWork, around: Hook) -> PassSeconds:
        """Return the seconds of one pass of a layer. Results of equal layers are cached."""
        key = id(work), self._remember(around, self.pace.hook_seconds, around)
        if key not in self._passes:
            self._passes[key] = work, self._pass_seconds(work, around)
        return self._passes[key][1]

    def _pass_seconds(self, work: PassWork, around: Hook) -> PassSeconds:
        compute = operators_seconds(self.pace, work, around, self._operators.seconds)
        hooks = cut_seconds(self.pace, work) if self.tensor_axis else 0.0
        inner = self._inner_of(work, compute + hooks)
        sums = dict[Sent, float]()
        for item in work:
            if isinstance(item, InnerCollective) and not item.beside:
                sent = self._sent_key(item)
                sums[sent] = sums.get(sent, 0.0) + item.times * inner(item)
        launches = around_seconds(self.pace, work, around) if self.pace.overlaps else 0.0
        messages = self._sum_messages(work, inner)
        return PassSeconds(compute, tuple(sums.items()), hooks, messages, launches)

    def _inner_of(self, work: PassWork, computed: float) -> Callable[[InnerCollective], float]:
        """Return a function that gives the seconds of a collective within a pass."""
        number = sum(item.times for item in work if isinstance(item, InnerCollective))
        if self.pace.overlaps or not number:
            return self._inner_seconds
        late = self.pace.late_seconds(computed / number)
        return lambda item: (seconds := self._inner_seconds(item)) and seconds + late

    def _sum_messages(
        self, work: PassWork, inner: Callable[[InnerCollective], float]
    ) -> tuple[tuple[Sent, Messages], ...]:
        of_kind: dict[Sent, Messages] = {}
        for item, message in messages_of(work, self._operator_seconds, inner):
            if not self.pace.overlaps:
                message = message._replace(waited=message.moving)
            sent = self._sent_key(item)
            of_kind[sent] = of_kind[sent].add(message) if sent in of_kind else message
        return tuple(of_kind.items())

    def _operator_seconds(self, operator: Operator) -> float:
        return self._remember(operator, self.pace.operator_seconds, operator)

    def _sent_key(self, item: InnerCollective) -> Sent:
        return item.axis or str(self.tensor_axis or ""), item.collective

    def _inner_seconds(self, item: InnerCollective) -> float:
        axis, _ = self._sent_key(item)
        if item.collective is Collective.SEND:  # every rank sends to the next one
            return self.message_seconds(Axis(axis), item.payload)
        return self._group_seconds(
            item.collective, axes_named(axis), item.ranks or None, item.payload
        )

    def _remember(self, question: Hashable, ask: Callable[..., float], *words: object) -> float:
        """Return the cached result of `ask(*words)`."""
        if question not in self._seconds_of:
            self._seconds_of[question] = ask(*words)
        return self._seconds_of[question]


@cache  # a mesh has few keys, and many layers use them
def _time_key(
    spent: Spent, phase: Phase, axis: str = "", collective: Collective | None = None
) -> TimeKey:
    return TimeKey(spent, phase, axes_named(axis) if axis else (), collective)


def _subtract_seconds(after: Seconds, before: Seconds) -> Seconds:
    more = {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}
    return {key: seconds for key, seconds in more.items() if seconds}
