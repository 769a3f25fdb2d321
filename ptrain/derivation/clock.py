"""A rank's time as it passes in a step: what it computes, what moves beside that, and where it
waits.

Every second of the rank's own time is spent on one thing (`TimeKey`). What is sent or copied goes
on a lane, one call after the other: a lane for each group of mesh axes, and one for each direction
between two tiers. Where cores both compute and send (`Pace.overlaps` is false), what is sent takes
the rank's own time at once.

Where they do not, the host runs ahead of the device: what it does is on a lane of its own, of which
`launches` says what a step waits for. So a call may start before what was computed when it was
issued is there: `since` says from when on, where that is not the moment.
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
from ptrain.optimizers.ghost import muon_operators
from ptrain.rates.pace import (
    Pace,
    TimedOperators,
    UnknownRate,
    around_seconds,
    cut_seconds,
    operators_seconds,
)
from ptrain.rooms.room import Shape
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.placement import Axis, axes_named
from ptrain.spec.precision import DType, Layout
from ptrain.spec.rates import Hook, OperatorKind

# What a clock notes: what lies on its lanes, what is on its way, and how far everything is.


Seconds = dict[TimeKey, float]


class LaneSpan(NamedTuple):
    """Something on a lane, from when to when; None is the lane of the rank itself."""

    lane: Hashable
    key: TimeKey
    start: float
    end: float


class Arrival(NamedTuple):
    """Something that is on its way, and there `at` a moment, until which somebody may wait."""

    spend_until: Callable[[TimeKey, float], None]
    key: TimeKey
    at: float

    def wait(self) -> None:
        """The rank has nothing to do until it is there."""
        self.spend_until(self.key, self.at)


class ClockState(NamedTuple):
    """A clock's state, to which it can go back; `met`: its own seconds at the last collective."""

    now: float
    free: dict[Hashable, float]
    own: Seconds
    moving: Seconds
    spans: tuple[LaneSpan, ...]
    met: float


# What a pass takes, and what it sends beside its operators: a message sets out where the pass
# sends it and is awaited where the pass reads it, and of its way the operators between the two
# hide what they take.
#
# Messages over one axis move one after the other. A ring's hop sets out ahead of the block's
# product and is read behind it (Liu et al. 2023).


Sent = tuple[str, Collective]  # over an axis


class Messages(NamedTuple):
    """Messages of a kind: how long they are on their way, and how long the rank waits for them;
    `spare` is how much later the first could set out without a wait."""

    moving: float
    waited: float
    spare: float

    def and_then(self, other: Messages) -> Messages:
        """Return both as one, the other behind it."""
        return Messages(self.moving + other.moving, self.waited + other.waited, self.spare)


class PassSeconds(NamedTuple):
    """What a pass takes of a layer's operators, of the collectives between them that are awaited at
    once, by axis, and of the hooks of these. `messages`: those that are awaited later. `launches`:
    in which the host issues the operators, where a device computes beside it."""

    compute: float = 0.0
    sums: tuple[tuple[Sent, float], ...] = ()
    hooks: float = 0.0
    messages: tuple[tuple[Sent, Messages], ...] = ()
    launches: float = 0.0

    def in_a_row(self, pace: Pace) -> float:
        """Return the seconds of all this, one thing after the other; of a device that computes by
        itself without its host's, which meet them in whole steps (`Launches`)."""
        sums = sum(seconds for _, seconds in self.sums)
        taken = self.compute + sums + sum(messages.waited for _, messages in self.messages)
        return taken if pace.overlaps else taken + self.on_host

    @property
    def on_host(self) -> float:
        """Return the seconds of the host's."""
        return self.launches + self.hooks


def messages_of(
    work: PassWork,
    operator_seconds: Callable[[Operator], float],
    message_seconds: Callable[[InnerCollective], float],
) -> Iterator[tuple[InnerCollective, Messages]]:
    """Yield each message of a pass, as it is awaited. Collectives that are awaited at once are not
    among them."""
    if not any(isinstance(item, InnerCollective) and item.beside for item in work):
        return  # then nobody asks how long the operators take
    now, free = 0.0, dict[str, float]()
    under_way = dict[int, list[tuple[InnerCollective, float, float]]]()  # by who awaits them

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


# The lane of launches: what a device waits for its host.
#
# The host issues one thing after the other, and what it has issued begins when the device is done
# with all before it. Nothing that the device does is read between two steps (`train.loop`), so
# that the host of a steady step is as far ahead as the device is behind, up to a whole step. A
# step then takes as long as the longer of both chains, for they meet in nothing but this (the
# greatest mean of a cycle, Baccelli et al. 1992). The driver's queue, of a thousand launches or
# so, is not counted.


def with_launches(rows: Sequence[TimeRow], seconds: float) -> tuple[TimeRow, ...]:
    """Return the rows of a step whose host issues for so many seconds: those by which it takes
    longer than the rest are spent in the phases in which the host does, where these are longer."""
    late = seconds - sum(row.seconds for row in rows)
    issuing = {row.key.phase: row.moving for row in rows if row.key.spent is Spent.LAUNCHES}
    if late <= 0 or not any(issuing.values()):  # a stage that issues nothing waits in the bubble
        return tuple(rows)
    own = {phase: sum(row.seconds for row in rows if row.key.phase is phase) for phase in issuing}
    longer = {phase: max(0.0, taken - own[phase]) for phase, taken in issuing.items()}
    weights = longer if any(longer.values()) else issuing  # it is another rank's host that is late
    share = late / sum(weights.values())
    return tuple(
        replace(row, seconds=share * weights[row.key.phase])
        if row.key.spent is Spent.LAUNCHES
        else row
        for row in rows
    )


def with_stragglers(rows: Sequence[TimeRow], network: Network) -> tuple[TimeRow, ...]:
    """Return the rows of a step with the time by which many nodes make it longer."""
    seconds = network.straggling * sum(row.seconds for row in rows)
    key = TimeKey(Spent.STRAGGLERS, Phase.UPDATE)
    return (*rows, TimeRow(key=key, seconds=seconds)) if seconds else tuple(rows)


_AGREED = 64  # bytes: a few numbers of 8
_NEVER_BEHIND = "the host never limits its devices: the cluster has no rate for issuing operators"
_MOST_NODES = 64  # of a published job by which the default of `stragglers` is known
_MANY_NODES = (
    "stragglers and congestion grow with each doubling of the nodes as they do up to "
    f"{_MOST_NODES} nodes; beyond that they are unknown"
)
_EXPOSED_SUMS = (
    "tp collectives are exposed; runtimes that overlap them (asynchronous TP) are faster"
)
_NO_DISPATCH = "the host's time for sharded products is unknown and not included"


class Clock:
    """`now` is the rank's own time, without what repetitions add: what they take is counted with
    their number, and everything on its way keeps its distance to now. `tensor_axis` is the axis
    whose collectives stand between operators. `spans` are noted where a list is given."""

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
        self._met = 0.0  # own seconds up to the last collective
        self._seconds_of: dict[Hashable, float] = {}
        self._operators = TimedOperators(pace)
        self._passes: dict[tuple[int, float], tuple[PassWork, PassSeconds]] = {}

    def another(self) -> Clock:
        """Return the clock of another rank of the same machine, at the beginning of a step."""
        clock = Clock(self.pace, self.network, self.tensor_axis)
        clock._seconds_of, clock._passes = self._seconds_of, self._passes
        clock._operators = self._operators
        return clock

    # -- the rank's own time

    def spend(self, key: TimeKey, seconds: float) -> None:
        """The rank does something, or waits for it."""
        if seconds <= 0:
            return
        self.own[key] = self.own.get(key, 0.0) + seconds
        if self.spans is not None:
            self.spans.append(LaneSpan(None, key, self.now, self.now + seconds))
        self.now += seconds

    def spend_until(self, key: TimeKey, moment: float) -> None:
        """The rank waits for a moment, if it is not over."""
        self.spend(key, moment - self.now)

    def compute(self, work: PassSeconds, share: float = 1.0) -> None:
        """Compute a share of a layer's pass, with the collectives within it."""
        began, seconds = self.now, work.compute * share
        self.spend(_key(Spent.COMPUTE, self.phase), seconds)
        if self._slowdown:
            ends = [end for lane, end in self.free.items() if isinstance(lane, tuple)]  # of groups
            if (under_way := max(ends, default=0.0) - began) > 0:
                self._interfere(seconds, under_way)
        for sent, messages in work.messages:
            self._beside(_key(Spent.COLLECTIVES, self.phase, *sent), began, messages, share)
        for sent, seconds in work.sums:
            key = _key(Spent.COLLECTIVES, self.phase, *sent)
            self.spend_until(key, self._occupy(key.axes, key, seconds * share, None))
        if work.on_host:
            self._on_host(work.on_host * share)
        if work.sums or work.messages:
            self.meet()

    def _interfere(self, computed: float, under_way: float) -> None:
        """Spend the time by which compute takes longer because a collective is under way, for as
        long as it is."""
        longer = min(computed * self._slowdown, under_way * self._slowdown / (1 + self._slowdown))
        self.spend(_key(Spent.INTERFERENCE, self.phase), longer)

    def operator(self, spent: Spent, kind: OperatorKind, dtype: DType, size: int) -> None:
        """An operator reads and writes `size` bytes."""
        seconds = self._operator_seconds(Operator(kind, dtype, (size,))) if size else 0.0
        self.spend(_key(spent, self.phase), seconds)

    def update(self, optimizer: str, layout: Layout, shapes: Sequence[Shape]) -> None:
        """The optimizer steps, by one of its rules, on tensors of these shapes. What Muon does is
        made of operators, a matrix after the other."""
        if not OPTIMIZERS[optimizer].is_elementwise:
            for shape in shapes:
                seconds = self._once((optimizer, shape, layout.updated), self._muon, shape, layout)
                self.spend(_key(Spent.UPDATE, self.phase), seconds)
            return
        numels = [math.prod(shape) for shape in shapes]
        elements, tensors = sum(numels), sum(numel > 0 for numel in numels)
        if elements:
            seconds = self.pace.update_seconds(
                optimizer, layout, elements=elements, tensors=tensors
            )
            self.spend(_key(Spent.UPDATE, self.phase), seconds)

    def update_on_host(self, optimizer: str, dtype: DType, shapes: Sequence[Shape]) -> None:
        """The host reads parameters, gradients and moments, and writes all except gradients."""
        row = OPTIMIZERS[optimizer]
        if not row.is_elementwise:
            raise UnknownRate(f"the host computes the {optimizer} update, which has no rate")
        accesses = 3 + 2 * len(row.moments)
        self.use_host(accesses * dtype.itemsize * sum(map(math.prod, shapes)))

    def use_host(self, size: int) -> None:
        """The host reads and writes so many bytes for the update."""
        self.spend(_key(Spent.UPDATE, self.phase), self.network.host_seconds(size))

    def _muon(self, shape: Shape, layout: Layout) -> float:
        return sum(map(self.pace.operator_seconds, muon_operators(shape, layout.updated)))

    def clip(self, layout: Layout, numels: Sequence[int]) -> None:
        """Gradients of so many elements have a norm, and are scaled."""
        elements, tensors = sum(numels), sum(numel > 0 for numel in numels)
        if elements:
            seconds = self.pace.clip_seconds(layout, elements=elements, tensors=tensors)
            self.spend(_key(Spent.UPDATE, self.phase), seconds)

    def hook(self, hook: Hook) -> None:
        """A wrapper does one of its parts on the host."""
        self._on_host(self._once(hook, self.pace.hook_seconds, hook))

    def _on_host(self, seconds: float) -> None:
        if not self.pace.overlaps:
            self.spend(_key(Spent.WRAPPERS, self.phase), seconds)
        elif seconds:
            key = _key(Spent.LAUNCHES, self.phase)
            self.moving[key] = self.moving.get(key, 0.0) + seconds

    # -- beside it

    def send(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        payload: int,
        *,
        via: Collective | None = None,
        ranks: int | None = None,
        since: float | None = None,
    ) -> Arrival:
        """Issue a collective over the group along `axes` (or so many neighbours of it), of a full
        tensor of `payload` bytes; `via` is the one that stands for it."""
        names = self.network.ordered(axes)
        key = TimeKey(Spent.COLLECTIVES, self.phase, names, collective)
        seconds = self._group_seconds(via or collective, names, ranks, payload)
        return self._issue_collective(names, key, seconds, since)

    def between_ends(self, collective: Collective, axis: Axis, payload: int) -> None:
        """The first and the last rank along an axis meet in a collective, and wait for it."""
        names = (axis.value,)
        key = TimeKey(Spent.COLLECTIVES, self.phase, names, collective)
        seconds = self.pace.collective_seconds(
            collective, ranks=2, nodes=self.network.ends(axis), payload=payload
        )
        self._issue_collective(names, key, seconds, None).wait()

    def agree(self) -> None:
        """All ranks agree on the loss before they update (`train.finite`): between nodes over a
        group of processors, which takes as long as is known where ranks are on such; those of one
        node over its sockets, of which no rate tells, in some 0.1 ms."""
        sums, world, nodes = Collective.ALL_REDUCE, self.network.world, self.network.nodes
        if nodes > 1 and not self.pace.overlaps:
            key = TimeKey(Spent.COLLECTIVES, self.phase, ("world",), sums)
            seconds = self.pace.collective_seconds(sums, ranks=world, nodes=nodes, payload=_AGREED)
            self._issue_collective("world", key, seconds, None)

    def message_seconds(self, axis: Axis, payload: int) -> float:
        """Return how long a message to the next rank along an axis is under way."""
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
        seconds = self._once((copy, size), self.pace.copy_seconds, copy, size)
        return self._issue(copy, key, seconds, since)

    def _issue_collective(
        self, lane: Hashable, key: TimeKey, seconds: float, since: float | None
    ) -> Arrival:
        """Issue a collective. On cores it takes longer the more the rank did since the last one, of
        whatever that was: copies, updates and hooks keep it as computing does."""
        if self.pace.overlaps or not seconds:
            return self._issue(lane, key, seconds, since)
        arrival = self._issue(lane, key, seconds + self.pace.late_seconds(self.since_met), since)
        self.meet()
        return arrival

    def meet(self, since: float = 0.0) -> None:
        """Ranks met so long ago, in a collective or by a message that a schedule places. Where
        devices send beside what they compute nobody asks."""
        if not self.pace.overlaps:
            self._met = self.seconds - since

    @property
    def since_met(self) -> float:
        """Return how long ago ranks met, in the rank's own seconds."""
        return self.seconds - self._met

    def _issue(self, lane: Hashable, key: TimeKey, seconds: float, since: float | None) -> Arrival:
        return Arrival(self.spend_until, key, self._occupy(lane, key, seconds, since))

    def _occupy(self, lane: Hashable, key: TimeKey, seconds: float, since: float | None) -> float:
        """Return until when something is on a lane that takes so long."""
        self.moving[key] = self.moving.get(key, 0.0) + seconds
        if not self.pace.overlaps:
            self.spend(key, seconds)
            return self.now
        ready = self.now if since is None else since
        start = max(ready, self.free.get(lane, 0.0))
        self.free[lane] = end = start + seconds
        if self.spans is not None:
            self.spans.append(LaneSpan(lane, key, start, end))
        if start < self.now and isinstance(lane, tuple):  # beside what was computed since then
            self._interfere(self.now - start, seconds)
        return end

    def _beside(self, key: TimeKey, began: float, messages: Messages, share: float) -> None:
        """A share of these moved beside what was computed since then. Where others had the lane all
        are later, and the rank waits for what the first has not to spare."""
        held_up = max(0.0, self.free.get(key.axes, 0.0) - began)
        moving = share * messages.moving
        late = max(0.0, held_up - share * messages.spare)
        self.moving[key] = self.moving.get(key, 0.0) + moving
        if self.spans is not None and self.pace.overlaps:
            start = began + held_up
            self.spans.append(LaneSpan(key.axes, key, start, start + moving))
        self.spend(key, min(moving, share * messages.waited + late))
        self.free[key.axes] = max(self.free.get(key.axes, 0.0), self.now)

    # -- what comes several times

    def repeat(self, times: int, act: Callable[[], None]) -> None:
        """Count what `act` takes so many times: it is done once. A lane that falls behind in it
        falls behind as far each time."""
        before = self.moment()
        act()
        if times > 1:
            self.add(self.since(before), times - 1)
            for lane, end in self.free.items():
                late = max(0.0, before.free.get(lane, 0.0) - before.now)
                later = end - self.now - late
                if later > 0:
                    self.free[lane] = end + (times - 1) * later

    def moment(self) -> ClockState:
        """Return the state of now."""
        return ClockState(
            self.now,
            dict(self.free),
            dict(self.own),
            dict(self.moving),
            tuple(self.spans or ()),
            self._met,
        )

    def back_to(self, moment: ClockState) -> None:
        """What was done since then is not done."""
        self.now, self.free = moment.now, dict(moment.free)
        self.own, self.moving, self._met = dict(moment.own), dict(moment.moving), moment.met
        if self.spans is not None:
            self.spans[:] = moment.spans

    def since(self, moment: ClockState) -> tuple[Seconds, Seconds]:
        """Return what was spent since then, and how long something moved."""
        return _more(self.own, moment.own), _more(self.moving, moment.moving)

    def add(self, spent: tuple[Seconds, Seconds], times: int = 1) -> None:
        """Count what was spent at another time once more, or so many times."""
        for sums, more in zip((self.own, self.moving), spent, strict=True):
            for key, seconds in more.items():
                sums[key] = sums.get(key, 0.0) + times * seconds
        if not self.pace.overlaps and any(key.spent is Spent.COLLECTIVES for key in spent[0]):
            self._met += times * sum(spent[0].values())  # the last is as long ago

    # -- what it says

    @property
    def seconds(self) -> float:
        """All that was spent."""
        return sum(self.own.values())

    def step_time(self) -> StepTime:
        """Return a step that is over."""
        rows = with_stragglers(with_launches(self.rows(), self.launches), self.network)
        return StepTime(rows=rows, assumed=self.assumed)

    def rows(self) -> tuple[TimeRow, ...]:
        """Return what was spent up to now, as if the host had been ahead of it."""
        return tuple(
            TimeRow(key=key, seconds=self.own.get(key, 0.0), moving=self.moving.get(key, 0.0))
            for key in dict.fromkeys((*self.own, *self.moving))
        )

    @property
    def launches(self) -> float:
        """The seconds of a host's that issues to a device."""
        return sum(taken for key, taken in self.moving.items() if key.spent is Spent.LAUNCHES)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the machine's rates do not say."""
        if not self.pace.overlaps:
            return ()
        is_cut, seconds = self.tensor_axis is not None, self.pace.hook_seconds
        noted = {
            _NEVER_BEHIND: not seconds(Hook.FORWARD_OPERATOR),
            _MANY_NODES: self.network.straggling > 0 and self.network.nodes > _MOST_NODES,
            _EXPOSED_SUMS: is_cut,
            _NO_DISPATCH: is_cut and not seconds(Hook.CUT_PRODUCT),
        }
        return tuple(sentence for sentence, is_noted in noted.items() if is_noted)

    def pass_seconds(self, work: PassWork, around: Hook) -> PassSeconds:
        """Return how long a pass of a layer takes; equal layers are asked about once."""
        key = id(work), self._once(around, self.pace.hook_seconds, around)
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
                sent = self._sent(item)
                sums[sent] = sums.get(sent, 0.0) + item.times * inner(item)
        launches = around_seconds(self.pace, work, around) if self.pace.overlaps else 0.0
        messages = self._messages(work, inner)
        return PassSeconds(compute, tuple(sums.items()), hooks, messages, launches)

    def _inner_of(self, work: PassWork, computed: float) -> Callable[[InnerCollective], float]:
        """Return what a collective within a pass takes."""
        number = sum(item.times for item in work if isinstance(item, InnerCollective))
        if self.pace.overlaps or not number:
            return self._inner_seconds
        late = self.pace.late_seconds(computed / number)
        return lambda item: (seconds := self._inner_seconds(item)) and seconds + late

    def _messages(
        self, work: PassWork, inner: Callable[[InnerCollective], float]
    ) -> tuple[tuple[Sent, Messages], ...]:
        of_kind: dict[Sent, Messages] = {}
        for item, message in messages_of(work, self._operator_seconds, inner):
            if not self.pace.overlaps:
                message = message._replace(waited=message.moving)
            sent = self._sent(item)
            of_kind[sent] = of_kind[sent].and_then(message) if sent in of_kind else message
        return tuple(of_kind.items())

    def _operator_seconds(self, operator: Operator) -> float:
        return self._once(operator, self.pace.operator_seconds, operator)

    def _sent(self, item: InnerCollective) -> Sent:
        return item.axis or str(self.tensor_axis or ""), item.collective

    def _inner_seconds(self, item: InnerCollective) -> float:
        axis, _ = self._sent(item)
        if item.collective is Collective.SEND:  # all to the next rank
            return self.message_seconds(Axis(axis), item.payload)
        return self._group_seconds(
            item.collective, axes_named(axis), item.ranks or None, item.payload
        )

    def _once(self, question: Hashable, ask: Callable[..., float], *words: object) -> float:
        """The machine's answer, which is asked for once."""
        if question not in self._seconds_of:
            self._seconds_of[question] = ask(*words)
        return self._seconds_of[question]


@cache  # of the few that a mesh has: layers are many
def _key(
    spent: Spent, phase: Phase, axis: str = "", collective: Collective | None = None
) -> TimeKey:
    return TimeKey(spent, phase, axes_named(axis) if axis else (), collective)


def _more(after: Seconds, before: Seconds) -> Seconds:
    more = {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}
    return {key: seconds for key, seconds in more.items() if seconds}
