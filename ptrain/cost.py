"""The one vocabulary of costs: predicted, simulated and measured figures have these types.

A verdict is a subtraction of two values of the same type. Bytes are integers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from ptrain.by_rank import of_ranks, unranked
from ptrain.codec import FLAT, RARE
from ptrain.units import summed
from ptrain.word import Word
from ptrain.wording import Worded


class State(Word):
    """The four training states (Definition 1), and two rooms for what belongs to none."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TRANSIENT = "transient"  # gathered units, reduce buffers: gone when the step is over
    OTHER = "other"  # buffers of the model, the batch itself


PLACED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)


class Phase(Word):
    """When bytes move or live."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Collective(Word):
    """Everything that moves bytes between ranks or between tiers."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    FILE_READ = "file_read"
    FILE_WRITE = "file_write"

    @property
    def is_copy(self) -> bool:
        """Whether it moves bytes between a rank's own tiers, and sends none."""
        return self in (
            Collective.HOST_TO_DEVICE,
            Collective.DEVICE_TO_HOST,
            Collective.FILE_READ,
            Collective.FILE_WRITE,
        )


class Column(Word):
    """Who says so: the paper's theorems, our derivation, the same with where tokens went in a run,
    an execution on fake ranks, the run."""

    PAPER = "paper"
    EXACT = "exact"
    COUNTED = "counted"
    SIMULATED = "simulated"
    MEASURED = "measured"


TIERS = ("device_bytes", "host_bytes", "file_bytes")  # of a Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resident bytes of one state on one rank, by tier. `lower_bytes`, where what the device holds
    depends on data: it is at least this, and `device_bytes` at most."""

    state: State
    rank: int
    device_bytes: int
    host_bytes: int = 0
    file_bytes: int = 0
    lower_bytes: int | None = field(default=None, metadata=RARE)

    def of_rank(self, rank: int) -> Footprint:
        """Return the same on another rank."""
        return Footprint(
            state=self.state,
            rank=rank,
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            file_bytes=self.file_bytes,
            lower_bytes=self.lower_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The maximum of live device bytes on one rank during one phase of a steady step.

    `allocator_bytes` is what a GPU's allocator says of the same moment's rounding and operators'
    insides; 0 where there is no such allocator, and in predictions. `lower_bytes` as a footprint's.
    """

    phase: Phase
    rank: int
    device_bytes: int
    allocator_bytes: int = field(default=0, metadata=RARE)
    lower_bytes: int | None = field(default=None, metadata=RARE)

    def of_rank(self, rank: int) -> Peak:
        """Return the same on another rank."""
        return Peak(
            phase=self.phase,
            rank=rank,
            device_bytes=self.device_bytes,
            allocator_bytes=self.allocator_bytes,
            lower_bytes=self.lower_bytes,
        )


def lower_bytes(row: Footprint | Peak) -> int:
    """Return the device bytes that it is at least."""
    return row.device_bytes if row.lower_bytes is None else row.lower_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKey:
    """What calls are added up over: mesh axes x collective x state x phase (x substitute)."""

    axes: tuple[str, ...]
    collective: Collective
    state: State
    phase: Phase
    via: str | None = field(default=None, metadata=RARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls of one kind on one rank in one steady step.

    `payload_bytes` adds the full tensor of each call; `sent_bytes` what one rank sends of it
    under the ring model (Theorem 2), rounded up per call.
    """

    key: TrafficKey = field(metadata=FLAT)
    calls: int
    payload_bytes: int
    sent_bytes: int


def add_traffic(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Rows with equal keys become one; sorted, so that two accounts compare by position."""
    totals: dict[TrafficKey, tuple[int, int, int]] = {}
    for row in rows:
        calls, payload, sent = totals.get(row.key, (0, 0, 0))
        totals[row.key] = (
            calls + row.calls,
            payload + row.payload_bytes,
            sent + row.sent_bytes,
        )
    return tuple(
        Traffic(key=key, calls=calls, payload_bytes=payload, sent_bytes=sent)
        for key, (calls, payload, sent) in sorted(totals.items(), key=lambda item: _place(item[0]))
    )


@lru_cache(maxsize=2**10)
def _place(key: TrafficKey) -> str:
    """Return what rows are sorted by."""
    return repr(key)


def busiest(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return a row for each kind of call: where the ranks' accounts of it differ (slices of
    operators may be unequal), that of a rank that sends most."""
    most: dict[TrafficKey, Traffic] = {}
    for row in rows:
        known = most.setdefault(row.key, row)
        most[row.key] = max(
            known, row, key=lambda account: (account.sent_bytes, account.payload_bytes)
        )
    return tuple(most.values())


class Wire(NamedTuple):
    """What the kernel says that one rank's sockets of the group over `axes` sent in a steady step:
    payload, headers of the backend included, retransmissions not."""

    axes: tuple[str, ...]
    rank: int
    sent_bytes: int


class Blocked(NamedTuple):
    """How long one rank's main thread waited for the collectives over `axes` in a step: seconds,
    waiting for a slower rank included."""

    axes: tuple[str, ...]
    rank: int
    seconds: float


OPERATIONS = ("forward", "backward", "again")  # the passes of Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Floating-point operations of one rank's matrix products in a step, two for each
    multiplication: its forward and backward passes, and what backward runs `again` of forward."""

    rank: int
    forward: int
    backward: int
    again: int = 0

    def of_rank(self, rank: int) -> Operations:
        """Return the same on another rank."""
        return Operations(rank=rank, forward=self.forward, backward=self.backward, again=self.again)


class Spent(Word):
    """What a rank's time goes to."""

    COMPUTE = "compute"  # the model's operators, and autograd's sums of gradients
    WRAPPERS = "wrappers"  # what wrappers do on the host, and what they copy within the device
    LAUNCHES = "launches"  # a device waits for its host to issue what comes next
    COLLECTIVES = "collectives"  # waiting for them
    COPIES = "copies"  # waiting for what moves between tiers
    UPDATE = "update"  # the norm and the optimizer
    BUBBLE = "bubble"  # a pipeline's rank has nothing to do
    INTERFERENCE = "interference"  # computing takes longer while a collective runs
    STRAGGLERS = "stragglers"  # waiting for the slowest of many nodes, congestion included


class TimeKey(NamedTuple):
    """What seconds are added up over; of collectives mesh axes and which, of copies which, of a
    bubble its axis."""

    spent: Spent
    phase: Phase
    axes: tuple[str, ...] = ()
    collective: Collective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Seconds of a steady step that go to one thing. Of what moves these are exposed: the rank has
    nothing to do meanwhile; `moving` is how long it moves, hidden or not."""

    key: TimeKey = field(metadata=FLAT)
    seconds: float
    moving: float = 0.0


class StepTime(NamedTuple):
    """The time of one steady step, on the rank that decides it. Each of its seconds is in one of
    the rows. `assumed` are sentences on what the machine's rates do not say. `interval`: the
    seconds between which nearly all published steps of its kind lie; None if none were published.
    """

    rows: tuple[TimeRow, ...]
    assumed: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return sum(row.seconds for row in self.rows)

    def spent(self, spent: Spent) -> float:
        """Return the seconds that go to one thing."""
        return sum(row.seconds for row in self.rows if row.key.spent is spent)

    def of_phase(self, phase: Phase) -> float:
        """Return the seconds of a phase, without the bubble, which is of none."""
        rows = (row for row in self.rows if row.key.spent is not Spent.BUBBLE)
        return sum(row.seconds for row in rows if row.key.phase is phase)

    def exposed(self, *, idle: bool = False) -> dict[tuple[str, ...], float]:
        """Return by mesh axes the seconds in which a rank waits for their collectives alone; with
        `idle` a pipeline's bubble too, in which it waits for other ranks' messages."""
        waits = (Spent.COLLECTIVES, *[Spent.BUBBLE] * idle)
        return summed((row.key.axes, row.seconds) for row in self.rows if row.key.spent in waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Worded):
    """One account of one run: a prediction (paper, exact), a simulation or a measurement.

    `undefined` gives, per kind of figure ("traffic", "peak", "wire", "blocked_seconds",
    "step_seconds"), why the column has none, or not all. `unclaimed` gives, per kind
    ("activations", "peak", "traffic"), why those that the column has, if any, are not claimed for
    the device that runs it. `by_data` gives, per kind ("activations", "peak"), why its figures are
    bounds and not sizes. `assumed` gives, per kind ("activations", "peak", and "traffic" with axes
    and collective), what its figures assume of data: a run's are not held against them; `counted`,
    per kind, what of a run they were derived from. `warnings`
    are what somebody should know before it runs.
    `accounts`: where ranks differ in what they send, the traffic of each kind of rank, of which
    there are equally many, and `account_of` by rank which is its own; `traffic` has a row for each
    kind of call and account. `startup_bytes` are the host bytes that a rank needs before the first
    step, besides what it keeps; `builds_whole` if each rank builds the full model.
    """

    column: Column
    world_size: int
    memory: Sequence[Footprint] = ()
    peak: Sequence[Peak] = ()
    traffic: tuple[Traffic, ...] = ()
    wire: tuple[Wire, ...] = ()
    blocked: tuple[Blocked, ...] = field(default=(), metadata={"key": "blocked_seconds"})
    undefined: dict[str, str] = field(default_factory=dict)
    unclaimed: dict[str, str] = field(default_factory=dict)
    by_data: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    accounts: tuple[tuple[Traffic, ...], ...] = ()
    account_of: tuple[int, ...] = ()
    operations: Sequence[Operations] = ()
    step: StepTime | None = None
    startup_bytes: int = 0
    builds_whole: bool = False

    def __repr__(self) -> str:
        return f"Estimate({self.column} of {self.world_size} ranks)"  # rows are thousands

    def peak_bytes(self) -> int | None:
        """The largest peak over phases and ranks; None where no peak is known."""
        return max((row.device_bytes for row in unranked(self.peak)), default=None)

    def lower_peak_bytes(self) -> int | None:
        """The largest peak if as little is allocated as can be: `peak_bytes`, where that depends on
        no data."""
        return max(map(lower_bytes, unranked(self.peak)), default=None)

    def bytes_of(self, state: State, rank: int | None = None) -> int:
        """Device bytes of `state` on `rank`, or the maximum over the ranks."""
        rows = unranked(self.memory, None if rank is None else {rank})
        sizes = [row.device_bytes for row in rows if row.state is state]
        return max(sizes, default=0)

    def copied_bytes(self) -> int:
        """Bytes that one rank copies between its tiers in a steady step."""
        return max(
            sum(
                row.payload_bytes
                for row in rows
                if row.key.collective.is_copy and row.key.phase is not Phase.SETUP
            )
            for rows in self.by_rank()
        )

    def sent_bytes(self, *, setup: bool = False) -> int:
        """Bytes that one rank sends in a steady step (with `setup`: once), the one that sends
        most."""
        return max(
            sum(row.sent_bytes for row in rows if (row.key.phase is Phase.SETUP) is setup)
            for rows in self.by_rank()
        )

    def of_rank(self, rank: int) -> Estimate:
        """Return what this column says of one rank."""
        traffic = self.accounts[self.account_of[rank]] if self.accounts else self.traffic
        sent = tuple(row for row in traffic if row.calls)
        return replace(self.of_ranks({rank}), traffic=sent, accounts=(), account_of=())

    def of_ranks(self, ranks: Container[int]) -> Estimate:
        """Without the rows of other ranks; traffic is that of all."""
        return replace(
            self,
            memory=of_ranks(self.memory, ranks),
            peak=of_ranks(self.peak, ranks),
            wire=tuple(row for row in self.wire if row.rank in ranks),
            blocked=tuple(row for row in self.blocked if row.rank in ranks),
            operations=of_ranks(self.operations, ranks),
        )

    def by_rank(self) -> tuple[tuple[Traffic, ...], ...]:
        """Return the traffic of each kind of rank; of all in one where it is not known apart."""
        return self.accounts or (busiest(self.traffic),)
