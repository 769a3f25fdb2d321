"""The types of all cost figures: predicted, simulated and measured figures share them.

A verdict subtracts two values of one type. Bytes are integers, so a difference is exact.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ptrain.by_rank import distinct_values, of_ranks
from ptrain.codec import FLAT, RARE, encode
from ptrain.errors import input_error
from ptrain.units import sum_by_key
from ptrain.word import Word
from ptrain.wording import Worded, data_frame


class State(Word):
    """The four training states (Definition 1), and two categories for all other memory."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    TRANSIENT = "transient"  # all-gathered units and reduce buffers, freed before the step ends
    OTHER = "other"  # buffers of the model, the batch itself


PLACED = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.ACTIVATIONS)


class Phase(Word):
    """The phase of a training in which bytes move or are allocated."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Collective(Word):
    """An operation that moves bytes between ranks, or between the memory tiers of one rank."""

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
        """True if the operation moves bytes between the tiers of one rank and sends none."""
        return self in (
            Collective.HOST_TO_DEVICE,
            Collective.DEVICE_TO_HOST,
            Collective.FILE_READ,
            Collective.FILE_WRITE,
        )


class Column(Word):
    """The source of a figure.

    PAPER is the paper's theorems, EXACT the derivation from the spec, COUNTED the derivation with
    the routing counts of a run, SIMULATED an execution on fake ranks, and MEASURED the run.
    """

    PAPER = "paper"
    EXACT = "exact"
    COUNTED = "counted"
    SIMULATED = "simulated"
    MEASURED = "measured"


TIERS = ("device_bytes", "host_bytes", "file_bytes")  # the fields of a Footprint, by tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The resident bytes of one state on one rank, by tier.

    Attributes:
        state: The state.
        rank: The rank.
        device_bytes: Bytes on the device; the upper bound if they depend on data.
        host_bytes: Bytes in host memory.
        file_bytes: Bytes in files.
        lower_bytes: The lower bound of `device_bytes`. None: they do not depend on data.
    """

    state: State
    rank: int
    device_bytes: int
    host_bytes: int = 0
    file_bytes: int = 0
    lower_bytes: int | None = field(default=None, metadata=RARE)

    def of_rank(self, rank: int) -> Footprint:
        """Return a copy for another rank."""
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

    Attributes:
        phase: The phase.
        rank: The rank.
        device_bytes: The live bytes; the upper bound if they depend on data.
        allocator_bytes: The peak of the CUDA allocator, which includes its rounding and memory that
            operators allocate and free inside themselves. 0 on CPUs, and in predictions.
        lower_bytes: The lower bound of `device_bytes`. None: they do not depend on data.
    """

    phase: Phase
    rank: int
    device_bytes: int
    allocator_bytes: int = field(default=0, metadata=RARE)
    lower_bytes: int | None = field(default=None, metadata=RARE)

    def of_rank(self, rank: int) -> Peak:
        """Return a copy for another rank."""
        return Peak(
            phase=self.phase,
            rank=rank,
            device_bytes=self.device_bytes,
            allocator_bytes=self.allocator_bytes,
            lower_bytes=self.lower_bytes,
        )


def lower_bytes(row: Footprint | Peak) -> int:
    """Return the lower bound of the device bytes of a row.

    Args:
        row: A memory or peak row.

    Returns:
        Bytes on the device.
    """
    return row.device_bytes if row.lower_bytes is None else row.lower_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKey:
    """The key under which calls are summed: mesh axes, collective, state, phase, and substitute.

    `via` names the collective that was called as a substitute for this one, if any.
    """

    axes: tuple[str, ...]
    collective: Collective
    state: State
    phase: Phase
    via: str | None = field(default=None, metadata=RARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The calls of one kind on one rank in one steady step.

    Attributes:
        key: The kind of call.
        calls: The number of calls.
        payload_bytes: The sum over the calls of the full tensor's bytes.
        sent_bytes: The bytes that one rank sends under the ring model (Theorem 2), rounded up per
            call.
    """

    key: TrafficKey = field(metadata=FLAT)
    calls: int
    payload_bytes: int
    sent_bytes: int


def add_traffic(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Sum the rows with equal keys, and sort them, so that two accounts compare by position.

    Args:
        rows: Traffic rows, in any order.

    Returns:
        One row per key, sorted by key.
    """
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
        for key, (calls, payload, sent) in sorted(
            totals.items(), key=lambda item: _sort_key(item[0])
        )
    )


@lru_cache(maxsize=2**10)
def _sort_key(key: TrafficKey) -> str:
    """Return the sort key of a traffic key."""
    return repr(key)


def busiest(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return one row per kind of call: the row of the rank that sends most.

    The accounts of ranks differ if the shards of an operator have unequal sizes.

    Args:
        rows: Traffic rows of several ranks.

    Returns:
        One row per kind of call.
    """
    most: dict[TrafficKey, Traffic] = {}
    for row in rows:
        known = most.setdefault(row.key, row)
        most[row.key] = max(
            known, row, key=lambda account: (account.sent_bytes, account.payload_bytes)
        )
    return tuple(most.values())


class Wire(NamedTuple):
    """The bytes that one rank's sockets sent for the group over `axes` in a steady step.

    The kernel counts them. They include the headers of the backend, and exclude retransmissions.
    """

    axes: tuple[str, ...]
    rank: int
    sent_bytes: int


class Blocked(NamedTuple):
    """The seconds that one rank's main thread waited for the collectives over `axes` in a step.

    They include waiting for a slower rank.
    """

    axes: tuple[str, ...]
    rank: int
    seconds: float


OPERATIONS = ("forward", "backward", "again")  # the fields of Operations, by pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The floating-point operations of one rank's matrix products in a step.

    A multiply-add counts as two.

    Attributes:
        rank: The rank.
        forward: Operations of the forward pass.
        backward: Operations of the backward pass, without recomputation.
        again: Operations of the forward pass that backward recomputes.
    """

    rank: int
    forward: int
    backward: int
    again: int = 0

    def of_rank(self, rank: int) -> Operations:
        """Return a copy for another rank."""
        return Operations(rank=rank, forward=self.forward, backward=self.backward, again=self.again)


class Spent(Word):
    """A category of a rank's time."""

    COMPUTE = "compute"  # the model's operators, and autograd's sums of gradients
    WRAPPERS = "wrappers"  # host code of the wrappers, and their copies within the device
    LAUNCHES = "launches"  # the device waits until its host launches the next kernel
    COLLECTIVES = "collectives"  # waiting for collectives
    COPIES = "copies"  # waiting for copies between tiers
    UPDATE = "update"  # the gradient norm and the optimizer
    BUBBLE = "bubble"  # a rank of a pipeline idles
    INTERFERENCE = "interference"  # kernels slow down while a collective runs
    STRAGGLERS = "stragglers"  # waiting for the slowest of many nodes, congestion included


class TimeKey(NamedTuple):
    """The key under which seconds are summed.

    `axes` and `collective` are set for collectives, `collective` for copies, and `axes` for a
    pipeline bubble.
    """

    spent: Spent
    phase: Phase
    axes: tuple[str, ...] = ()
    collective: Collective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """The seconds of a steady step in one category.

    Attributes:
        key: The category.
        seconds: The seconds. For transfers, only the exposed part, in which the rank idles.
        moving: The seconds of the transfer, overlapped or exposed.
    """

    key: TimeKey = field(metadata=FLAT)
    seconds: float
    moving: float = 0.0


class StepTime(NamedTuple):
    """The time of one steady step, on the slowest rank.

    Attributes:
        rows: The categories; their seconds sum to the step time.
        assumed: Sentences about figures that the rates of the machine do not contain.
        interval: The seconds between which nearly all published steps of this kind are. None if
            none were published.
    """

    rows: tuple[TimeRow, ...]
    assumed: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return sum(row.seconds for row in self.rows)

    def seconds_in(self, spent: Spent) -> float:
        """Return the seconds in one category.

        Args:
            spent: The category, such as compute or exposed communication.

        Returns:
            Seconds.
        """
        return sum(row.seconds for row in self.rows if row.key.spent is spent)

    def of_phase(self, phase: Phase) -> float:
        """Return the seconds of a phase. The bubble belongs to no phase and is left out.

        Args:
            phase: Forward, backward or update.

        Returns:
            Seconds.
        """
        rows = (row for row in self.rows if row.key.spent is not Spent.BUBBLE)
        return sum(row.seconds for row in rows if row.key.phase is phase)

    def exposed_seconds(self, *, idle: bool = False) -> dict[tuple[str, ...], float]:
        """Return the seconds by mesh axes in which a rank only waits for collectives.

        Args:
            idle: Include the pipeline bubble, in which a rank waits for messages of other ranks.
        """
        waits = (Spent.COLLECTIVES, *[Spent.BUBBLE] * idle)
        return sum_by_key(
            (row.key.axes, row.seconds) for row in self.rows if row.key.spent in waits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Worded):
    """One account of one run: a prediction (paper, exact), a simulation or a measurement.

    Attributes:
        column: The source of the figures.
        world_size: The number of ranks.
        memory: Resident bytes by state and rank.
        peak: Peak bytes by phase and rank.
        traffic: Collectives and copies of a step; one row per kind of call and account.
        wire: Bytes that the kernel counted on the sockets.
        blocked: Seconds that ranks waited for collectives.
        undefined: The reason why the column lacks some or all figures of a kind ("traffic", "peak",
            "wire", "blocked_seconds", "step_seconds").
        unclaimed: The reason why the figures of a kind ("activations", "peak", "traffic") are not
            claimed for the device of the run.
        by_data: The reason why the figures of a kind ("activations", "peak") are bounds.
        assumed: The assumption about data on which the figures of a kind depend ("activations",
            "peak", and "traffic" with axes and collective). A run is not compared with these.
        counted: The counts of a run that the figures of a kind were derived from.
        notes: Remarks.
        warnings: Warnings to read before the run.
        accounts: The traffic of each kind of rank, if ranks send different amounts. All kinds have
            equally many ranks.
        account_of: The index into `accounts` of each rank.
        operations: Floating-point operations by rank.
        step: The time of a steady step.
        startup_bytes: Host bytes that a rank needs before the first step, in addition to the
            resident ones.
        builds_whole: True if each rank builds the full model.
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
        return f"Estimate({self.column} of {self.world_size} ranks)"  # without thousands of rows

    def to_pandas(self, kind: str = "memory") -> Any:
        """Return the rows of one kind as a pandas DataFrame.

        Args:
            kind: `memory`, `peak` or `traffic`.

        Returns:
            The DataFrame, with one row per rank and state, phase or kind of call. Sizes in bytes.

        Raises:
            SpecError: The kind is unknown, or pandas is not installed.
        """
        kinds = {"memory": self.memory, "peak": self.peak, "traffic": self.traffic}
        if kind not in kinds:
            raise input_error("kind", f"got {kind!r}", "Use `memory`, `peak` or `traffic`.")
        return data_frame([encode(row) for row in kinds[kind]], "Estimate.to_pandas")

    def peak_bytes(self) -> int | None:
        """Return the largest peak over phases and ranks, None if no peak is known.

        Returns:
            Bytes on the device, or None.
        """
        return max((row.device_bytes for row in distinct_values(self.peak)), default=None)

    def lower_peak_bytes(self) -> int | None:
        """Return the lower bound of the largest peak; `peak_bytes` unless it depends on data.

        Returns:
            Bytes on the device, or None if no peak is known.
        """
        return max(map(lower_bytes, distinct_values(self.peak)), default=None)

    def bytes_of(self, state: State, rank: int | None = None) -> int:
        """Return the device bytes of a state on a rank. None: the maximum over the ranks.

        Args:
            state: The state, such as `State.PARAMETERS`.
            rank: Rank in the mesh, from 0. None: the maximum over the ranks.

        Returns:
            Bytes on the device.
        """
        rows = distinct_values(self.memory, None if rank is None else {rank})
        sizes = [row.device_bytes for row in rows if row.state is state]
        return max(sizes, default=0)

    def copied_bytes(self) -> int:
        """Return the bytes that one rank copies between its tiers in a steady step, at most.

        Returns:
            Bytes per step, summed over both directions and all tiers.
        """
        return max(
            sum(
                row.payload_bytes
                for row in rows
                if row.key.collective.is_copy and row.key.phase is not Phase.SETUP
            )
            for rows in self.by_rank()
        )

    def sent_bytes(self, *, setup: bool = False) -> int:
        """Return the bytes that the busiest rank sends in a steady step, or once during set-up.

        Args:
            setup: Count the calls of set-up instead of a steady step.

        Returns:
            Bytes under the ring model.
        """
        return max(
            sum(row.sent_bytes for row in rows if (row.key.phase is Phase.SETUP) is setup)
            for rows in self.by_rank()
        )

    def of_rank(self, rank: int) -> Estimate:
        """Return the figures of one rank, with only the calls that it makes.

        Args:
            rank: Rank in the mesh, from 0.

        Returns:
            An estimate with rows of this rank only.
        """
        traffic = self.accounts[self.account_of[rank]] if self.accounts else self.traffic
        sent = tuple(row for row in traffic if row.calls)
        return replace(self.of_ranks({rank}), traffic=sent, accounts=(), account_of=())

    def of_ranks(self, ranks: Container[int]) -> Estimate:
        """Return the estimate without per-rank rows of other ranks; its traffic is unchanged.

        Args:
            ranks: Ranks in the mesh, from 0.

        Returns:
            An estimate with memory and peak rows of these ranks.
        """
        return replace(
            self,
            memory=of_ranks(self.memory, ranks),
            peak=of_ranks(self.peak, ranks),
            wire=tuple(row for row in self.wire if row.rank in ranks),
            blocked=tuple(row for row in self.blocked if row.rank in ranks),
            operations=of_ranks(self.operations, ranks),
        )

    def by_rank(self) -> tuple[tuple[Traffic, ...], ...]:
        """Return the traffic of each kind of rank.

        Without `accounts` it is one tuple, which has the row of the busiest rank for each kind of
        call.

        Returns:
            One tuple of traffic rows per kind of rank.
        """
        return self.accounts or (busiest(self.traffic),)
