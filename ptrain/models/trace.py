"""A trace: the events of a micro-batch, or of its passes by themselves, on one device.

Between two boundaries (a unit is entered or left, in forward and in backward) events say what is
allocated and freed, and where each parameter's gradient is complete. A wrapper's own allocations
happen at those boundaries, so replaying a plan means to interleave the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ptrain import timeline
from ptrain.models.selection import Selected
from ptrain.models.work import OperatorWork, SentTensor, When
from ptrain.timeline import Boundary, Item, Timeline


@dataclass(frozen=True, slots=True)
class Born:
    """A storage is allocated by an operator."""

    id: int
    size: int
    operator: str


@dataclass(frozen=True, slots=True)
class Died:
    """The storage of an earlier `Born` is freed."""

    id: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A parameter's gradient is complete and lies in storage `id`; `cloned` where autograd had to
    copy it there because it could not keep the tensor that arrived. `freed` are the storages that
    died since: before a hook is called autograd has let go of what arrived."""

    parameter: str
    id: int
    cloned: bool
    freed: tuple[int, ...] = ()


Event = Born | Died | Completion | Boundary
Works = tuple[tuple[int, OperatorWork], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The events of one micro-batch by pass: `forward`, and `backward` or its halves `input` and
    `weight`; `sizes` of all storages by id. `moved` are those off the device, each with its tier:
    no event speaks of them. `works`: what operators computed and sent by pass, each with the number
    of the pass's events before it. `draws`: random numbers were drawn. `is_opaque`:
    some operator is not torch's own, and what it computes is not known. `statistics` are the
    storages that fused attention keeps beside its output; `output` the one that a stage hands on.
    `selected` is what of it depends on data."""

    passes: Mapping[str, tuple[Event, ...]]
    sizes: Mapping[int, int]
    moved: tuple[tuple[int, str], ...] = ()
    works: Mapping[str, Works] = field(default_factory=dict)
    draws: bool = False
    is_opaque: bool = False
    statistics: frozenset[int] = frozenset()
    output: int | None = None
    selected: Selected = field(default_factory=Selected)

    @property
    def forward(self) -> tuple[Event, ...]:
        return self.passes["forward"]

    @property
    def backward(self) -> tuple[Event, ...]:
        """All that is not forward."""
        others = (events for name, events in self.passes.items() if name != "forward")
        return tuple(event for events in others for event in events)

    @property
    def saved(self) -> tuple[Born, ...]:
        """What forward allocated and left alive for the backward pass, in order."""
        dead = {event.id for event in self.forward if isinstance(event, Died)}
        return tuple(
            event for event in self.forward if isinstance(event, Born) and event.id not in dead
        )

    @property
    def repeated(self) -> tuple[tuple[str, int], ...]:
        """The collectives over tp of forward that backward ran again, as a timeline has them."""
        return tuple(pair for works in self.works.values() for pair in sent_again(works))


def sent_again(works: Works) -> list[tuple[str, int]]:
    """Return which collectives over tp of forward ran again, with the whole tensor's bytes."""
    return [
        (work.what.collective.value, work.what.payload)
        for _, work in works
        if work.when is When.AGAIN and isinstance(work.what, SentTensor) and not work.what.axis
    ]


def to_timeline(recording: Recording) -> Timeline:
    """The recording in bytes, with what happens between two boundaries as one run."""
    return Timeline(
        forward=tuple(_items(recording.forward, recording.sizes)),
        backward=tuple(_items(recording.backward, recording.sizes)),
        saved=tuple((event.operator, event.size) for event in recording.saved),
        moved=tuple((tier, recording.sizes[number]) for number, tier in recording.moved),
        repeated=recording.repeated,
    )


def _items(events: Sequence[Event], sizes: Mapping[int, int]) -> Iterator[Item]:
    last = last_views(events)
    for part in between_boundaries(events):
        match part:
            case Boundary():
                yield part
            case Completion():
                yield completion(part, last, sizes)
            case lives:
                deltas = (sizes[e.id] if isinstance(e, Born) else -sizes[e.id] for e in lives)
                merged = timeline.run(deltas)
                assert merged is not None, "something happens"
                yield merged


def between_boundaries(
    events: Sequence[Event],
) -> Iterator[Boundary | Completion | list[Born | Died]]:
    """Yield boundaries and completed gradients, and what happens between two of them together."""
    lives: list[Born | Died] = []
    for event in events:
        if isinstance(event, Born | Died):
            lives.append(event)
            continue
        if lives:
            yield lives
        lives = []
        yield event
    if lives:
        yield lives


def last_views(events: Sequence[Event]) -> dict[int, Completion]:
    """Return by storage the last gradient of a pass that is complete in it."""
    return {event.id: event for event in events if isinstance(event, Completion)}


def completion(
    event: Completion, last: Mapping[int, Completion], sizes: Mapping[int, int]
) -> timeline.Complete:
    """Return it in bytes. Gradients that are views of one storage keep it until the `last` of them
    goes."""
    size = sizes[event.id] if last[event.id] is event else 0
    beside = sum(sizes[number] for number in event.freed)
    return timeline.Complete(event.parameter, size, event.cloned, beside)
