"""A rank's time as it passes in a step: what it computes, what moves beside that, and where it
waits.

Every second of the rank's own time is spent on one thing (`TimeKey`). What is sent or copied goes
on a lane, one call after the other: a lane for each group of mesh axes, and one for each direction
between two tiers. Where cores both compute and send (`Pace.overlaps` is false), what is sent takes
the rank's own time at once.

Where they do not, the host runs ahead of the device. So what a wrapper does on the host costs
nothing until the host is behind, and a call may start before what was computed when it was issued
is there: `since` says from when on, where that is not the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ptrain.costs import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.network import Network
from ptrain.facts.operators import Exchange, Operator, OperatorKind, PassWork
from ptrain.rates.pace import Hook, Pace
from ptrain.spec.axis import Axis
from ptrain.spec.precision import DType, Layout

Seconds = dict[TimeKey, float]


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """What a pass takes of a layer's operators, of the collectives between them and of the
    hooks of these."""

    compute: float = 0.0
    sums: tuple[tuple[Collective, float], ...] = ()
    hooks: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a lane, from when to when; None is the lane of the rank itself."""

    lane: Hashable
    key: TimeKey
    start: float
    end: float


class Arrival:
    """Something that is on its way."""

    __slots__ = ("_clock", "at", "key")

    def __init__(self, clock: Clock, key: TimeKey, at: float) -> None:
        self._clock, self.key, self.at = clock, key, at

    def wait(self) -> None:
        """The rank has nothing to do until it is there."""
        self._clock.spend_until(self.key, self.at)


@dataclass(frozen=True, slots=True)
class Moment:
    """A clock's state, to which it can go back."""

    now: float
    issued: float
    free: dict[Hashable, float]
    own: Seconds
    moving: Seconds


class Clock:
    """`now` is the rank's own time, without what repetitions add: what they take is counted with
    their number, and everything on its way keeps its distance to now. `tensor_axis` is the axis
    whose collectives stand between operators. `spans` are noted where a list is given."""

    def __init__(
        self,
        pace: Pace,
        network: Network,
        tensor_axis: Axis | None = None,
        spans: list[Span] | None = None,
    ) -> None:
        self.pace, self.network, self.tensor_axis, self.spans = pace, network, tensor_axis, spans
        self.now = self.issued = 0.0
        self.phase = Phase.FORWARD
        self.free: dict[Hashable, float] = {}
        self.own: Seconds = {}
        self.moving: Seconds = {}
        self._seconds_of: dict[Hashable, float] = {}

    # -- the rank's own time

    def spend(self, key: TimeKey, seconds: float) -> None:
        """The rank does something, or waits for it."""
        if seconds <= 0:
            return
        self.own[key] = self.own.get(key, 0.0) + seconds
        if self.spans is not None:
            self.spans.append(Span(None, key, self.now, self.now + seconds))
        self.now += seconds

    def spend_until(self, key: TimeKey, moment: float) -> None:
        """The rank waits for a moment, if it is not over."""
        self.spend(key, moment - self.now)

    def compute(self, work: PassSeconds, share: float = 1.0) -> None:
        """Compute a share of a layer's pass, with the collectives within it."""
        self.spend(TimeKey(Spent.COMPUTE, self.phase), work.compute * share)
        axes = (self.tensor_axis.value,) if self.tensor_axis else ()
        for collective, seconds in work.sums:
            key = TimeKey(Spent.COLLECTIVES, self.phase, axes, collective)
            self._issue(axes, key, seconds * share, None).wait()
        if work.hooks:
            self._on_host(work.hooks * share)

    def operator(self, spent: Spent, kind: OperatorKind, dtype: DType, size: int) -> None:
        """An operator reads and writes `size` bytes."""
        operator = Operator(kind, dtype, (size,))
        seconds = self._once(operator, self.pace.operator_seconds, operator) if size else 0.0
        self.spend(TimeKey(spent, self.phase), seconds)

    def update(self, optimizer: str, layout: Layout, *, elements: int, tensors: int) -> None:
        """The optimizer steps."""
        if elements:
            seconds = self.pace.update_seconds(
                optimizer, layout, elements=elements, tensors=tensors
            )
            self.spend(TimeKey(Spent.UPDATE, self.phase), seconds)

    def hook(self, hook: Hook) -> None:
        """A wrapper does one of its parts on the host."""
        self._on_host(self._once(hook, self.pace.hook_seconds, hook))

    def _on_host(self, seconds: float) -> None:
        self.issued = (self.issued if self.pace.overlaps else self.now) + seconds
        self.spend_until(TimeKey(Spent.WRAPPERS, self.phase), self.issued)

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
        question = (via or collective, names, ranks, payload)
        seconds = self._once(question, self._collective_seconds, *question)
        return self._issue(names, key, seconds, since)

    def _collective_seconds(
        self, collective: Collective, names: tuple[str, ...], ranks: int | None, payload: int
    ) -> float:
        number, nodes = self.network.group(names, ranks)
        if number == 1:
            return 0.0
        return self.pace.collective_seconds(
            collective, ranks=number, nodes=nodes, payload=payload
        )

    def copy(self, copy: Collective, size: int) -> Arrival:
        """Issue a copy between two tiers."""
        key = TimeKey(Spent.COPIES, self.phase, (), copy)
        seconds = self._once((copy, size), self.pace.copy_seconds, copy, size)
        return self._issue(copy, key, seconds, None)

    def _issue(
        self, lane: Hashable, key: TimeKey, seconds: float, since: float | None
    ) -> Arrival:
        self.moving[key] = self.moving.get(key, 0.0) + seconds
        if not self.pace.overlaps:
            self.spend(key, seconds)
            return Arrival(self, key, self.now)
        ready = self.now if since is None else max(since, self.issued)
        start = max(ready, self.free.get(lane, 0.0))
        self.free[lane] = end = start + seconds
        if self.spans is not None:
            self.spans.append(Span(lane, key, start, end))
        return Arrival(self, key, end)

    # -- what comes several times

    def repeat(self, times: int, act: Callable[[], None]) -> None:
        """Count what `act` takes so many times: it is done once."""
        before = self.moment()
        act()
        if times > 1:
            self.add(self.since(before), times - 1)

    def moment(self) -> Moment:
        """Return the state of now."""
        return Moment(self.now, self.issued, dict(self.free), dict(self.own), dict(self.moving))

    def back_to(self, moment: Moment) -> None:
        """What was done since then is not done."""
        self.now, self.issued, self.free = moment.now, moment.issued, dict(moment.free)
        self.own, self.moving = dict(moment.own), dict(moment.moving)

    def since(self, moment: Moment) -> tuple[Seconds, Seconds]:
        """Return what was spent since then, and how long something moved."""
        return _more(self.own, moment.own), _more(self.moving, moment.moving)

    def add(self, spent: tuple[Seconds, Seconds], times: int = 1) -> None:
        """Count what was spent at another time once more, or so many times."""
        for sums, more in zip((self.own, self.moving), spent, strict=True):
            for key, seconds in more.items():
                sums[key] = sums.get(key, 0.0) + times * seconds

    # -- what it says

    @property
    def seconds(self) -> float:
        """All that was spent."""
        return sum(self.own.values())

    def step_time(self) -> StepTime:
        """Return a step that is over."""
        return step_time(self.own, self.moving)

    def pass_seconds(self, work: PassWork) -> PassSeconds:
        """Return how long a pass of a layer takes."""
        compute, hooks, sums = 0.0, 0.0, dict[Collective, float]()
        axes = (self.tensor_axis,) if self.tensor_axis else ()
        names = self.network.ordered(axes)
        for item in work:
            if isinstance(item, Exchange):
                question = (item.collective, names, None, item.payload)
                seconds = self._once(question, self._collective_seconds, *question)
                sums[item.collective] = sums.get(item.collective, 0.0) + item.times * seconds
                hooks += item.times * self._once(
                    Hook.TENSOR_SUM, self.pace.hook_seconds, Hook.TENSOR_SUM
                )
            else:
                compute += self.pace.operator_seconds(item)
        return PassSeconds(compute, tuple(sums.items()), hooks)

    def _once(self, question: Hashable, ask: Callable[..., float], *words: object) -> float:
        """The machine's answer, which is asked for once."""
        if question not in self._seconds_of:
            self._seconds_of[question] = ask(*words)
        return self._seconds_of[question]


def step_time(own: Seconds, moving: Seconds) -> StepTime:
    """Return a step in which this was spent, and so long something moved."""
    return StepTime(
        rows=tuple(
            TimeRow(key=key, seconds=own.get(key, 0.0), moving=moving.get(key, 0.0))
            for key in dict.fromkeys((*own, *moving))
        )
    )


def _more(after: Seconds, before: Seconds) -> Seconds:
    more = {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}
    return {key: seconds for key, seconds in more.items() if seconds}
