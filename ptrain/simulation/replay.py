"""Simulate many equal blocks by running few: a job of 80 layers runs with 4, 5 and 6 of them.

The three runs are compared. If the second run has a piece that the first lacks, the third must have
it twice. Everything else must be equal in all three, except tensors that grow by equal amounts,
such as a list of norms by parameter. The piece is then repeated for the remaining blocks. If
something fits neither (a bucket that ends within a block, a bucket that still grows), every block
is run.

Note: that the remaining blocks behave like the last two is inferred from three runs, not observed.

The stream of a step lists allocations and frees in order, with their states, and the beginnings of
phases. Readers of it are the course of memory, the contents of its peak, and a simulated allocator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

from ptrain.cost import Footprint, Operations, Peak, Phase, State, Traffic
from ptrain.derivation.allocator import COMPUTING, AllocatedStep, AllocatorEvent
from ptrain.meters.traffic import ring_bytes
from ptrain.report.simulation import LiveStorages, MemoryHistory, MemorySample
from ptrain.spec.spec import Spec

_STATES = tuple(State)


@dataclass(frozen=True, slots=True)
class StorageKind:
    """The kind of a storage.

    Attributes:
        what: Its description.
        state: The state that it belongs to.
        micro_batch: The micro-batch in which it was allocated.
        stream: The CUDA stream that owns its memory.
        is_moment: True for optimizer state, which torch's optimizers allocate in their first
            update.
        is_within: True for an internal allocation of a kernel, which only an allocator counts.
    """

    what: str
    state: State
    micro_batch: int = 0
    stream: str = COMPUTING
    is_moment: bool = False
    is_within: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """An allocation of `size` bytes of the storage `key`, or a free if `size` is negative."""

    kind: StorageKind
    size: int
    key: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a phase."""

    phase: Phase
    micro_batch: int


Event = Change | Begin


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """The storages that are alive before a step, and the allocations and frees during it."""

    resident: tuple[Change, ...]
    events: tuple[Event, ...]

    def peaks(self) -> dict[Phase, int]:
        """Return the most live bytes in each phase."""
        live = sum(change.size for change in self.resident)
        phase: Phase | None = None
        most: dict[Phase, int] = {}
        for event in self.events:
            if isinstance(event, Begin):
                phase = event.phase
            elif not event.kind.is_within:
                live += event.size
            if phase is not None:
                most[phase] = max(live, most.get(phase, 0))
        return most

    def fullest_backward(self) -> int:
        """Return the backward pass, counted from 0, that begins with the most live activations."""
        live = sum(change.size for change in self.resident if _is_activation(change))
        begun: list[int] = []
        for event in self.events:
            if isinstance(event, Change):
                live += event.size if _is_activation(event) else 0
            elif event.phase is Phase.BACKWARD:
                begun.append(live)
        return max(range(len(begun)), key=begun.__getitem__, default=0)

    def history(self, rank: int) -> MemoryHistory:
        """Return the course of one rank's memory over the step."""
        moments = tuple(self._memory_samples())
        peak = max(moments, key=lambda moment: moment.total)
        return MemoryHistory(
            rank=rank,
            moments=moments,
            peak=peak,
            held=tuple(live_rows(self._live_storages(peak.event))),
        )

    def _memory_samples(self) -> Iterator[MemorySample]:
        """Yield a sample before all changes, and one after each change."""
        sizes = dict.fromkeys(_STATES, 0)
        for change in self.resident:
            sizes[change.kind.state] += change.size
        phase, micro_batch, number = Phase.FORWARD, 0, 0
        yield MemorySample(event=0, phase=phase, micro_batch=0, device_bytes=tuple(sizes.values()))
        for event in self.events:
            if isinstance(event, Begin):
                phase, micro_batch = event.phase, event.micro_batch
                continue
            if event.kind.is_within:
                continue
            number += 1
            sizes[event.kind.state] += event.size
            yield MemorySample(
                event=number,
                phase=phase,
                micro_batch=micro_batch,
                device_bytes=tuple(sizes.values()),
            )

    def _live_storages(self, changes: int) -> Iterable[Change]:
        """Return every storage with its bytes after a number of changes."""
        living: dict[int, Change] = {}
        seen = (event for event in self.events if isinstance(event, Change))
        counted = [change for change in seen if not change.kind.is_within]
        for change in (*self.resident, *counted[:changes]):
            before = living[change.key].size if change.key in living else 0
            living[change.key] = replace(change, size=before + change.size)
        return living.values()

    def allocated_step(self) -> AllocatedStep:
        """Return the allocations and frees as an allocator handles them."""
        step = AllocatedStep()
        for change in self.resident:
            target = step.moments if change.kind.is_moment else step.resident
            target.append(AllocatorEvent(change.key, change.size))
        for event in self.events:
            if isinstance(event, Change):
                step.events.append(AllocatorEvent(event.key, event.size, event.kind.stream))
            elif event.phase is Phase.UPDATE:
                step.update = len(step.events)
        return step


def _is_activation(change: Change) -> bool:
    return change.kind.state is State.ACTIVATIONS


def live_rows(living: Iterable[Change]) -> list[LiveStorages]:
    """Return one row for each kind of live storage, the largest first."""
    sizes: defaultdict[tuple[str, State], list[int]] = defaultdict(list)
    for storage in living:
        if storage.size:
            sizes[storage.kind.what, storage.kind.state].append(storage.size)
    rows = [
        LiveStorages(what=what, state=state, device_bytes=sum(of_kind), tensors=len(of_kind))
        for (what, state), of_kind in sizes.items()
    ]
    return sorted(rows, key=lambda row: (-row.device_bytes, row.what))


Token = TypeVar("Token", bound=Hashable)
_Places = tuple[int, int, int]
_IN_BUCKETS = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence of `length` events in three runs, beginning at `starts`.

    If it `repeats`, the first run lacks it, the second has it once, and the third twice. Otherwise
    all three have it once.
    """

    starts: _Places
    length: int
    repeats: bool

    @property
    def ends(self) -> _Places:
        """The positions after the piece in the three runs."""
        first, second, third = self.starts
        if self.repeats:
            return first, second + self.length, third + 2 * self.length
        return first + self.length, second + self.length, third + self.length

    def occurrences(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the run and the position of each occurrence of the event at `offset`."""
        first, second, third = (start + offset for start in self.starts)
        if not self.repeats:
            yield 0, first
        yield 1, second
        yield 2, third
        if self.repeats:
            yield 2, third + self.length


class ThreeRuns(Generic[Token]):
    """The events of three runs, to be divided into pieces.

    Args:
        words: The events of each run.
        grows: Returns True if three events, one of each run, are one event that grows by equal
            amounts.
    """

    def __init__(
        self, words: Sequence[Sequence[Token]], grows: Callable[[Sequence[Token]], bool]
    ) -> None:
        known: dict[Token, Token] = {}  # equal tokens become one object, which `is` compares fast
        first, second, third = (
            tuple(known.setdefault(token, token) for token in word) for word in words
        )
        self.words = first, second, third
        self._is_growing = grows

    def pieces(self) -> list[Piece] | None:
        """Return the pieces of the runs in order; None if they do not consist of pieces.

        Backtracking: among pieces that may repeat, the shortest is tried first.
        """
        pieces: list[Piece] = []
        ways: list[Iterator[Piece]] = [self._next_pieces((0, 0, 0))]
        failed: set[_Places] = set()
        while any(self.words) and ways:
            piece = next(ways[-1], None)
            if piece is None:  # no candidate at this place leads to the end: backtrack
                ways.pop()
                if pieces:
                    failed.add(pieces.pop().ends)
            elif piece.ends not in failed:
                pieces.append(piece)
                if piece.ends == tuple(map(len, self.words)):
                    return pieces
                ways.append(self._next_pieces(piece.ends))
        return None if any(self.words) else []

    def _next_pieces(self, places: _Places) -> Iterator[Piece]:
        """Yield candidates for the next piece.

        The longest common sequence is the only candidate if there is one. Otherwise they are
        repeated pieces, the shortest first, then one event that grows.
        """
        if common := self._common_length(places):
            yield Piece(places, common, repeats=False)
            return
        (first, second, third), (here, there, beyond) = self.words, places
        longest = min(len(second) - there, (len(third) - beyond) // 2)
        for length in range(1, longest + 1):
            if second[there + length - 1] is not third[beyond + length - 1]:
                break
            # The third run must have the piece twice: its second copy begins like the second run's.
            if third[beyond + length] is not second[there]:
                continue
            again = third[beyond + length : beyond + 2 * length]
            if again == second[there : there + length]:
                yield Piece(places, length, repeats=True)
        is_over = here == len(first) or there == len(second) or beyond == len(third)
        if not is_over and self._is_growing([first[here], second[there], third[beyond]]):
            yield Piece(places, 1, repeats=False)

    def _common_length(self, places: _Places) -> int:
        """Return the number of equal events in all three runs from these places on."""
        (first, second, third), (here, there, beyond) = self.words, places
        longest = min(len(first) - here, len(second) - there, len(third) - beyond)
        number = 0
        while (
            number < longest
            and first[here + number] is second[there + number] is third[beyond + number]
        ):
            number += 1
        return number


Seen = tuple[tuple[int, int], ...]  # an event's occurrences: the run's number and the position


def _event_occurrences(pieces: Sequence[Piece], times: int) -> Iterator[Seen]:
    """Yield the events of a run with `times` more blocks than the first, by their occurrences."""
    for piece in pieces:
        once = [tuple(piece.occurrences(offset)) for offset in range(piece.length)]
        for _ in range(times if piece.repeats else 1):
            yield from once


def _is_even(sizes: Sequence[int]) -> bool:
    """Return True if three sizes grow by equal amounts."""
    first, second, third = sizes
    return third - second == second - first


# -- calls

Calls = Sequence[Traffic]


def repeated_calls(
    runs: Sequence[Calls], times: int, sent: Callable[[Traffic], int]
) -> tuple[Traffic, ...] | None:
    """Return the collectives of a run with more blocks.

    Args:
        runs: The collectives of three runs with one more block each.
        times: The number of blocks more than in the first run.
        sent: Returns the bytes that a rank sends for a call's payload.

    Returns:
        None if no repeated piece explains the three runs.
    """

    def grows(calls: Calls) -> bool:
        is_one_kind = len({(call.key, call.calls) for call in calls}) == 1
        # Buckets of states have a size limit. One that grows with three runs may be full with more
        # blocks.
        if any(call.key.state in _IN_BUCKETS for call in calls):
            return False
        is_by_the_rule = all(call.sent_bytes == sent(call) for call in calls)
        return is_one_kind and is_by_the_rule and _is_even([call.payload_bytes for call in calls])

    if (pieces := ThreeRuns(runs, grows).pieces()) is None:
        return None
    calls = []
    for (run, place), (later, there), *_ in _event_occurrences(pieces, times):
        call = runs[run][place]
        more = runs[later][there].payload_bytes - call.payload_bytes
        if more:
            call = replace(call, payload_bytes=call.payload_bytes + times * more)
            call = replace(call, sent_bytes=sent(call))
        calls.append(call)
    return tuple(calls)


# -- storages

Events = Sequence[Event]
_STEP_BEGINS = Begin(Phase.SETUP, 0)  # separates resident storages from the events of the step


class End(StrEnum):
    """The end from which a freed storage is counted among live storages of its kind and size."""

    YOUNGEST = "youngest"
    OLDEST = "oldest"


@dataclass(frozen=True, slots=True)
class KeylessEvent:
    """An event without a key; a freed storage has its place among equal ones instead."""

    event: Event
    end: End | None = None
    place: int = 0


def repeated_storages(streams: Sequence[MemoryStream], times: int) -> MemoryStream | None:
    """Return the allocations and frees of a run with more blocks.

    Args:
        streams: The streams of three runs with one more block each.
        times: The number of blocks more than in the first run.

    Returns:
        None if no repeated piece explains the three runs, or it is unknown which storage is freed.
    """
    runs = _strip_keys([(*stream.resident, _STEP_BEGINS, *stream.events) for stream in streams])
    if (pieces := ThreeRuns(runs, _is_growing).pieces()) is None:
        return None
    seen = (
        [runs[run][place] for run, place in places] for places in _event_occurrences(pieces, times)
    )
    try:
        events = list(_assign_keys(_scaled_event(event, times) for event in seen))
    except LookupError:
        return None
    begin = events.index(_STEP_BEGINS)
    older = tuple(event for event in events[:begin] if isinstance(event, Change))
    return MemoryStream(resident=older, events=tuple(events[begin + 1 :]))


def _strip_keys(runs: Sequence[Events]) -> list[list[KeylessEvent]]:
    """Return the events of each run without keys.

    Storages of one kind and size are freed in the order that is the same in all runs: youngest
    first, as a backward pass frees them, or oldest first.
    """
    # Keys number all storages, so that they differ between runs of different length. A place among
    # equal live storages does not.
    goings = [list(_freed_places(run)) for run in runs]
    seen: dict[End, list[defaultdict[Kind, set[int]]]] = {
        end: [defaultdict(set) for _ in runs] for end in End
    }
    for number, (run, going) in enumerate(zip(runs, goings, strict=True)):
        for event, places in zip(run, going, strict=True):
            for end, place in places.items():
                seen[end][number][_storage_key(event)].add(place)

    def end_of(kind: Kind) -> End:
        first, *others = (places[kind] for places in seen[End.OLDEST])
        return End.OLDEST if all(other == first for other in others) else End.YOUNGEST

    ends = {kind: end_of(kind) for kinds in seen[End.OLDEST] for kind in [*kinds]}
    return [
        [
            KeylessEvent(_without_key(event), end := ends[_storage_key(event)], places[end])
            if places
            else KeylessEvent(_without_key(event))
            for event, places in zip(run, going, strict=True)
        ]
        for run, going in zip(runs, goings, strict=True)
    ]


Kind = tuple[StorageKind, int] | None


def _storage_key(event: Event) -> Kind:
    """Return the kind and size of a storage; None for the beginning of a phase."""
    return (event.kind, abs(event.size)) if isinstance(event, Change) else None


def _freed_places(run: Events) -> Iterator[dict[End, int]]:
    """Yield for each event the freed storage's place among equal live ones, from either end.

    The result of an event is empty if nothing is freed, or the storage is unknown.
    """
    living: defaultdict[Kind, list[int]] = defaultdict(list)
    for event in run:
        places: dict[End, int] = {}
        if isinstance(event, Change):
            keys = living[_storage_key(event)]
            if event.size > 0:
                keys.append(event.key)
            elif event.key in keys:
                place = keys.index(event.key)
                del keys[place]
                places = {End.OLDEST: place, End.YOUNGEST: len(keys) - place}
        yield places


def _without_key(event: Event) -> Event:
    return replace(event, key=0) if isinstance(event, Change) else event


def _is_growing(seen: Sequence[KeylessEvent]) -> bool:
    """Return True if three events are one change that grows evenly, outside of buckets."""
    changes = [token.event for token in seen if isinstance(token.event, Change)]
    is_alike = len({(token.end, token.place) for token in seen}) == 1
    if len(changes) < len(seen) or len({change.kind for change in changes}) > 1 or not is_alike:
        return False
    is_in_bucket = any(change.kind.state in _IN_BUCKETS for change in changes)
    return not is_in_bucket and _is_even([change.size for change in changes])


def _scaled_event(seen: Sequence[KeylessEvent], times: int) -> KeylessEvent:
    """Return the event with its size in a run with `times` more blocks than the first."""
    first, second = (token.event for token in seen[:2])
    if isinstance(first, Change) and isinstance(second, Change) and first.size != second.size:
        larger = replace(first, size=first.size + times * (second.size - first.size))
        return replace(seen[0], event=larger)
    return seen[0]


def _assign_keys(tokens: Iterable[KeylessEvent]) -> Iterator[Event]:
    """Yield the events with new keys.

    Raises:
        LookupError: If it is unknown which storage is freed, or there is none.
    """
    living: defaultdict[Kind, list[int]] = defaultdict(list)
    for key, token in enumerate(tokens):
        if not isinstance(token.event, Change):
            yield token.event
            continue
        keys = living[_storage_key(token.event)]
        if token.event.size > 0:
            keys.append(key)
            yield replace(token.event, key=key)
            continue
        if token.end is None or token.place >= len(keys):
            raise LookupError("the order of freed storages is unknown")
        place = token.place if token.end is End.OLDEST else len(keys) - 1 - token.place
        yield replace(token.event, key=keys.pop(place))


Row = TypeVar("Row", Footprint, Operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The collectives and allocations of one rank in a steady step.

    Attributes:
        resident: Bytes by state.
        peaks: The most live bytes by phase.
        attention: The attention kernels that ran.
        before: The collectives of the previous step.
    """

    resident: tuple[Footprint, ...]
    peaks: tuple[Peak, ...]
    operations: Operations
    attention: tuple[str, ...]
    before: tuple[Traffic, ...]
    calls: tuple[Traffic, ...]
    stream: MemoryStream


def extrapolate_run(
    spec: Spec, runs: tuple[StepRecord, StepRecord, StepRecord], times: int
) -> StepRecord | None:
    """Return the record of a run with `times` more blocks than the first of three.

    Args:
        spec: The spec with all blocks, for the degrees of its axes.
        runs: Three runs with one more block each.
        times: The number of further blocks.

    Returns:
        None if the three runs differ by more than a repeated piece.
    """
    sent = partial(_sent_bytes, spec)
    resident = _extrapolate_rows([run.resident for run in runs], times)
    operations = _extrapolate_rows([(run.operations,) for run in runs], times)
    before = repeated_calls([run.before for run in runs], times, sent)
    calls = repeated_calls([run.calls for run in runs], times, sent)
    if resident is None or operations is None or before is None or calls is None:
        return None
    streams = [run.stream for run in runs]
    stream = repeated_storages(streams, times)
    if stream is None or len({course.fullest_backward() for course in (stream, *streams)}) > 1:
        # Activations are read at the fullest backward pass. If that is a different one with more
        # blocks, their size is not linear in the number of blocks.
        return None
    (rank,) = {peak.rank for peak in runs[0].peaks}
    peaks = tuple(
        Peak(phase=phase, rank=rank, device_bytes=size) for phase, size in stream.peaks().items()
    )
    return StepRecord(
        resident=resident,
        peaks=peaks,
        operations=operations[0],
        attention=runs[0].attention,
        before=before,
        calls=calls,
        stream=stream,
    )


def _sent_bytes(spec: Spec, call: Traffic) -> int:
    """Return the bytes that a rank sends for a call."""
    degrees = {factor.axis.value: factor.degree for factor in spec.factors}
    if not call.key.axes or not degrees.keys() >= {*call.key.axes}:
        return 0  # a copy between tiers
    ranks = prod(degrees[axis] for axis in call.key.axes)
    return ring_bytes(call.key.collective, call.payload_bytes, ranks)


def _extrapolate_rows(rows: Sequence[Sequence[Row]], times: int) -> tuple[Row, ...] | None:
    """Return the rows of a run with `times` more blocks than the first.

    The result is None if a number does not grow by equal amounts.
    """
    # operations have no state
    if len({tuple(getattr(row, "state", None) for row in of_run) for of_run in rows}) > 1:
        return None
    grown = []
    for of_runs in zip(*rows, strict=True):
        first, second, third = map(_row_numbers, of_runs)
        more = {field: number - first[field] for field, number in second.items()}
        if any(third[field] - second[field] != step for field, step in more.items()):
            return None
        numbers: Any = {field: first[field] + times * step for field, step in more.items()}
        grown.append(replace(of_runs[0], **numbers))
    return tuple(grown)


def _row_numbers(row: Row) -> dict[str, int]:
    """Return the integer fields of a row, without its rank."""
    names = (field.name for field in fields(row) if field.name != "rank")
    return {name: value for name in names if isinstance(value := getattr(row, name), int)}
