"""Simulate many equal blocks by running few: a job of 80 layers runs with 4, 5 and 6 of them.

The three runs are compared. If the second has a piece that the first lacks, the third must have
it twice; everything else must be the same in all three, except tensors that grow by equal amounts
(a list of norms by parameter). The piece is then repeated for the remaining blocks. If something
fits neither (a bucket that ends within a block, a bucket that still grows), every block is run.

Note: that the remaining blocks behave like the last two is inferred from three runs, not observed.

The stream of a step lists in order which bytes come and go, of which state, and when a phase
begins. It has several readers: the course of memory, the composition of its peak, and the view of
an allocator.
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
    """What a storage is, in a few words, and of which state; `micro_batch`: of which it was born,
    `stream`: which one has its memory, `is_moment`: whether it is an optimizer's own state, which
    torch's make with their first update, `is_within`: whether a kernel takes it within itself,
    where an allocator alone sees it."""

    what: str
    state: State
    micro_batch: int = 0
    stream: str = COMPUTING
    is_moment: bool = False
    is_within: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """So many device bytes of a storage come, or go (negative). One storage has one `key`."""

    kind: StorageKind
    size: int
    key: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Begin:
    """A phase begins."""

    phase: Phase
    micro_batch: int


Event = Change | Begin


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """What lives before a step, and what happens in it."""

    resident: tuple[Change, ...]
    events: tuple[Event, ...]

    def peaks(self) -> dict[Phase, int]:
        """Return the most bytes that live at once in each phase."""
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

    def fullest(self) -> int:
        """Return at the begin of which backward pass, counted from 0, most activations live."""
        live = sum(change.size for change in self.resident if _is_activation(change))
        begun: list[int] = []
        for event in self.events:
            if isinstance(event, Change):
                live += event.size if _is_activation(event) else 0
            elif event.phase is Phase.BACKWARD:
                begun.append(live)
        return max(range(len(begun)), key=begun.__getitem__, default=0)

    def history(self, rank: int) -> MemoryHistory:
        """Return the course of memory over the step."""
        moments = tuple(self._moments())
        peak = max(moments, key=lambda moment: moment.total)
        return MemoryHistory(
            rank=rank, moments=moments, peak=peak, held=tuple(held(self._living(peak.event)))
        )

    def _moments(self) -> Iterator[MemorySample]:
        """One before all changes and one after each of them."""
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

    def _living(self, changes: int) -> Iterable[Change]:
        """Return every storage with its bytes after so many changes."""
        living: dict[int, Change] = {}
        seen = (event for event in self.events if isinstance(event, Change))
        counted = [change for change in seen if not change.kind.is_within]
        for change in (*self.resident, *counted[:changes]):
            before = living[change.key].size if change.key in living else 0
            living[change.key] = replace(change, size=before + change.size)
        return living.values()

    def allocated(self) -> AllocatedStep:
        """Return what an allocator would see."""
        step = AllocatedStep()
        for change in self.resident:
            older = step.moments if change.kind.is_moment else step.resident
            older.append(AllocatorEvent(change.key, change.size))
        for event in self.events:
            if isinstance(event, Change):
                step.events.append(AllocatorEvent(event.key, event.size, event.kind.stream))
            elif event.phase is Phase.UPDATE:
                step.update = len(step.events)
        return step


def _is_activation(change: Change) -> bool:
    return change.kind.state is State.ACTIVATIONS


def held(living: Iterable[Change]) -> list[LiveStorages]:
    """Return one row per kind, the largest first."""
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
    """`length` events from `starts` on in each of three runs. If it `repeats` they are in none of
    the first, in the second once and in the third twice."""

    starts: _Places
    length: int
    repeats: bool

    @property
    def ends(self) -> _Places:
        """Where the three go on."""
        first, second, third = self.starts
        if self.repeats:
            return first, second + self.length, third + 2 * self.length
        return first + self.length, second + self.length, third + self.length

    def occurrences(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield in which runs its event at `offset` is, and where."""
        first, second, third = (start + offset for start in self.starts)
        if not self.repeats:
            yield 0, first
        yield 1, second
        yield 2, third
        if self.repeats:
            yield 2, third + self.length


class ThreeRuns(Generic[Token]):
    """What happened in three runs. `grows` says whether an event of each is one that has become
    larger evenly."""

    def __init__(
        self, words: Sequence[Sequence[Token]], grows: Callable[[Sequence[Token]], bool]
    ) -> None:
        known: dict[Token, Token] = {}  # equal ones become the same object
        first, second, third = (
            tuple(known.setdefault(token, token) for token in word) for word in words
        )
        self.words = first, second, third
        self._grows = grows

    def pieces(self) -> list[Piece] | None:
        """Return the pieces that the runs are made of, in order; None where they are not. Of
        several that may repeat the shortest is tried first."""
        pieces: list[Piece] = []
        ways: list[Iterator[Piece]] = [self._next((0, 0, 0))]
        failed: set[_Places] = set()
        while any(self.words) and ways:
            piece = next(ways[-1], None)
            if piece is None:  # none of these leads to the end
                ways.pop()
                if pieces:
                    failed.add(pieces.pop().ends)
            elif piece.ends not in failed:
                pieces.append(piece)
                if piece.ends == tuple(map(len, self.words)):
                    return pieces
                ways.append(self._next(piece.ends))
        return None if any(self.words) else []

    def _next(self, places: _Places) -> Iterator[Piece]:
        """What may come next: as long as all go on alike, all of that; else what repeats, or one
        event that grows."""
        if common := self._common(places):
            yield Piece(places, common, repeats=False)
            return
        (first, second, third), (here, there, beyond) = self.words, places
        longest = min(len(second) - there, (len(third) - beyond) // 2)
        for length in range(1, longest + 1):
            if second[there + length - 1] is not third[beyond + length - 1]:
                break
            if third[beyond + length] is not second[there]:
                continue
            again = third[beyond + length : beyond + 2 * length]
            if again == second[there : there + length]:
                yield Piece(places, length, repeats=True)
        is_over = here == len(first) or there == len(second) or beyond == len(third)
        if not is_over and self._grows([first[here], second[there], third[beyond]]):
            yield Piece(places, 1, repeats=False)

    def _common(self, places: _Places) -> int:
        """How many events are the same in all three from here on."""
        (first, second, third), (here, there, beyond) = self.words, places
        longest = min(len(first) - here, len(second) - there, len(third) - beyond)
        number = 0
        while (
            number < longest
            and first[here + number] is second[there + number] is third[beyond + number]
        ):
            number += 1
        return number


Seen = tuple[tuple[int, int], ...]  # in which runs an event is, and where


def _written(pieces: Sequence[Piece], times: int) -> Iterator[Seen]:
    """Yield the events of a run with `times` blocks more than the first one, by where they are."""
    for piece in pieces:
        once = [tuple(piece.occurrences(offset)) for offset in range(piece.length)]
        for _ in range(times if piece.repeats else 1):
            yield from once


def _is_even(sizes: Sequence[int]) -> bool:
    first, second, third = sizes
    return third - second == second - first


# -- calls

Calls = Sequence[Traffic]


def repeated_calls(
    runs: Sequence[Calls], times: int, sent: Callable[[Traffic], int]
) -> tuple[Traffic, ...] | None:
    """Return the calls of a run with `times` blocks more than the first of three; None where no
    piece that repeats explains these. `sent`: the bytes that a rank sends of a call's payload."""

    def grows(calls: Calls) -> bool:
        is_one_kind = len({(call.key, call.calls) for call in calls}) == 1
        if any(call.key.state in _IN_BUCKETS for call in calls):
            return False
        is_by_the_rule = all(call.sent_bytes == sent(call) for call in calls)
        return is_one_kind and is_by_the_rule and _is_even([call.payload_bytes for call in calls])

    if (pieces := ThreeRuns(runs, grows).pieces()) is None:
        return None
    calls = []
    for (run, place), (later, there), *_ in _written(pieces, times):
        call = runs[run][place]
        more = runs[later][there].payload_bytes - call.payload_bytes
        if more:
            call = replace(call, payload_bytes=call.payload_bytes + times * more)
            call = replace(call, sent_bytes=sent(call))
        calls.append(call)
    return tuple(calls)


# -- storages

Events = Sequence[Event]
_STEP_BEGINS = Begin(Phase.SETUP, 0)  # between what is older and what happens


class End(StrEnum):
    """From which of the living storages of its kind and size the one that goes is counted."""

    YOUNGEST = "youngest"
    OLDEST = "oldest"


@dataclass(frozen=True, slots=True)
class Nameless:
    """An event without the name of its storage; of what goes its place among those like it."""

    event: Event
    end: End | None = None
    place: int = 0


def repeated_storages(streams: Sequence[MemoryStream], times: int) -> MemoryStream | None:
    """Return what comes and goes in a run with `times` blocks more than the first of three; None
    where no piece that repeats explains these, or nobody can say which storage goes when."""
    runs = _nameless([(*stream.resident, _STEP_BEGINS, *stream.events) for stream in streams])
    if (pieces := ThreeRuns(runs, _grows).pieces()) is None:
        return None
    seen = ([runs[run][place] for run, place in places] for places in _written(pieces, times))
    try:
        events = list(_named(_sized(event, times) for event in seen))
    except LookupError:
        return None
    begin = events.index(_STEP_BEGINS)
    older = tuple(event for event in events[:begin] if isinstance(event, Change))
    return MemoryStream(resident=older, events=tuple(events[begin + 1 :]))


def _nameless(runs: Sequence[Events]) -> list[list[Nameless]]:
    """The events of each run. Storages of one kind and size go from the end that says the same in
    all runs: the youngest first, as backward does, or the oldest."""
    goings = [list(_goings(run)) for run in runs]
    seen: dict[End, list[defaultdict[Kind, set[int]]]] = {
        end: [defaultdict(set) for _ in runs] for end in End
    }
    for number, (run, going) in enumerate(zip(runs, goings, strict=True)):
        for event, places in zip(run, going, strict=True):
            for end, place in places.items():
                seen[end][number][_kind(event)].add(place)

    def end_of(kind: Kind) -> End:
        first, *others = (places[kind] for places in seen[End.OLDEST])
        return End.OLDEST if all(other == first for other in others) else End.YOUNGEST

    ends = {kind: end_of(kind) for kinds in seen[End.OLDEST] for kind in [*kinds]}
    return [
        [
            Nameless(_without_key(event), end := ends[_kind(event)], places[end])
            if places
            else Nameless(_without_key(event))
            for event, places in zip(run, going, strict=True)
        ]
        for run, going in zip(runs, goings, strict=True)
    ]


Kind = tuple[StorageKind, int] | None


def _kind(event: Event) -> Kind:
    return (event.kind, abs(event.size)) if isinstance(event, Change) else None


def _goings(run: Events) -> Iterator[dict[End, int]]:
    """Of each event where the storage that goes stands among those like it, from either end; empty
    where none goes, and where it is none of these."""
    living: defaultdict[Kind, list[int]] = defaultdict(list)
    for event in run:
        places: dict[End, int] = {}
        if isinstance(event, Change):
            keys = living[_kind(event)]
            if event.size > 0:
                keys.append(event.key)
            elif event.key in keys:
                place = keys.index(event.key)
                del keys[place]
                places = {End.OLDEST: place, End.YOUNGEST: len(keys) - place}
        yield places


def _without_key(event: Event) -> Event:
    return replace(event, key=0) if isinstance(event, Change) else event


def _grows(seen: Sequence[Nameless]) -> bool:
    changes = [token.event for token in seen if isinstance(token.event, Change)]
    is_alike = len({(token.end, token.place) for token in seen}) == 1
    if len(changes) < len(seen) or len({change.kind for change in changes}) > 1 or not is_alike:
        return False
    is_in_bucket = any(change.kind.state in _IN_BUCKETS for change in changes)
    return not is_in_bucket and _is_even([change.size for change in changes])


def _sized(seen: Sequence[Nameless], times: int) -> Nameless:
    """The event; what grows is as large as it is with so many blocks."""
    first, second = (token.event for token in seen[:2])
    if isinstance(first, Change) and isinstance(second, Change) and first.size != second.size:
        larger = replace(first, size=first.size + times * (second.size - first.size))
        return replace(seen[0], event=larger)
    return seen[0]


def _named(tokens: Iterable[Nameless]) -> Iterator[Event]:
    """Yield the events with names of their own. Raises LookupError where it is open which storage
    goes, or where there is none."""
    living: defaultdict[Kind, list[int]] = defaultdict(list)
    for key, token in enumerate(tokens):
        if not isinstance(token.event, Change):
            yield token.event
            continue
        keys = living[_kind(token.event)]
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
    """What one rank did in a steady step: what it called and what came and went. `before`: what it
    called in the step before it; `resident`: its bytes by state; `peaks`: the most by phase;
    `attention`: which kernels of it ran."""

    resident: tuple[Footprint, ...]
    peaks: tuple[Peak, ...]
    operations: Operations
    attention: tuple[str, ...]
    before: tuple[Traffic, ...]
    calls: tuple[Traffic, ...]
    stream: MemoryStream


def replayed(
    spec: Spec, runs: tuple[StepRecord, StepRecord, StepRecord], times: int
) -> StepRecord | None:
    """Return what a run with `times` blocks more than the first of these would do; None where the
    three do not differ by what repeats alone."""
    sent = partial(_sent, spec)
    resident = _grown([run.resident for run in runs], times)
    operations = _grown([(run.operations,) for run in runs], times)
    before = repeated_calls([run.before for run in runs], times, sent)
    calls = repeated_calls([run.calls for run in runs], times, sent)
    if resident is None or operations is None or before is None or calls is None:
        return None
    streams = [run.stream for run in runs]
    stream = repeated_storages(streams, times)
    if stream is None or len({course.fullest() for course in (stream, *streams)}) > 1:
        return None  # activations are read where most of them live: a maximum is no line
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


def _sent(spec: Spec, call: Traffic) -> int:
    degrees = {factor.axis.value: factor.degree for factor in spec.factors}
    if not call.key.axes or not degrees.keys() >= {*call.key.axes}:
        return 0  # a copy between tiers
    ranks = prod(degrees[axis] for axis in call.key.axes)
    return ring_bytes(call.key.collective, call.payload_bytes, ranks)


def _grown(rows: Sequence[Sequence[Row]], times: int) -> tuple[Row, ...] | None:
    """The rows of many blocks: each number as much larger for each block more as it is in the
    second and in the third; None where that is not the same."""
    if len({tuple(map(_name, of_run)) for of_run in rows}) > 1:
        return None
    grown = []
    for of_runs in zip(*rows, strict=True):
        first, second, third = map(_numbers, of_runs)
        more = {field: number - first[field] for field, number in second.items()}
        if any(third[field] - second[field] != step for field, step in more.items()):
            return None
        numbers: Any = {field: first[field] + times * step for field, step in more.items()}
        grown.append(replace(of_runs[0], **numbers))
    return tuple(grown)


def _name(row: Row) -> State | None:
    return row.state if isinstance(row, Footprint) else None


def _numbers(row: Row) -> dict[str, int]:
    names = (field.name for field in fields(row) if field.name != "rank")
    return {name: value for name in names if isinstance(value := getattr(row, name), int)}
