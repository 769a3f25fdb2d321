"""The state of the torch runtime and of the fake runtime after each statement of a program.

A program is a generator over a runtime. After every statement it yields the tensors to inspect, and
a note records the live bytes of each tier, their maximum since the last note, the traffic and
copies, and the size, dtype and device of each tensor."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ptrain.cost import Collective, State
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.ledger import Ledger, tier_of
from ptrain.runtime.comm import Mesh
from ptrain.runtime.ghost import Ghost, GhostRuntime
from ptrain.runtime.interface import Axes, Shape, T, TensorRuntime
from ptrain.runtime.torch import TorchRuntime
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType

MOVES = {
    (Tier.HOST, Tier.DEVICE): Collective.HOST_TO_DEVICE,
    (Tier.DEVICE, Tier.HOST): Collective.DEVICE_TO_HOST,
    (Tier.FILE, Tier.HOST): Collective.FILE_READ,
    (Tier.FILE, Tier.DEVICE): Collective.FILE_READ,
    (Tier.HOST, Tier.FILE): Collective.FILE_WRITE,
    (Tier.DEVICE, Tier.FILE): Collective.FILE_WRITE,
}
Call = tuple[Collective, tuple[str, ...], State, int, str]


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor as observed. `storage` numbers the storages of a note in order of appearance, so
    that aliases have the same number; `start` is in elements."""

    numel: int
    dtype: DType
    shape: Shape
    tier: Tier
    storage: int
    start: int
    storage_bytes: int
    state: State | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """The state after a statement."""

    live: Mapping[Tier, int]
    peak: int
    calls: tuple[Call, ...]
    looks: tuple[TensorView, ...]


class WatchedRuntime(Protocol[T]):
    """A runtime whose storages are tracked."""

    room: TensorRuntime[T]
    peak: int

    def live(self) -> Mapping[Tier, int]: ...

    def calls(self) -> Sequence[Call]: ...

    def tier(self, tensor: T) -> Tier: ...

    def storage(self, tensor: T) -> tuple[int, int, int]:
        """Its identity, the tensor's start in it, and its bytes."""
        ...

    def tag(self, tensor: T) -> tuple[State | None, str]: ...


Program = Callable[[WatchedRuntime[Any]], Iterator[Sequence[Any]]]


class WatchedFakeRuntime:
    """A fake runtime and its reader."""

    def __init__(self, degrees: Mapping[Axis, int], places: Mapping[Axis, int]) -> None:
        self.levels: Counter[Tier] = Counter()
        self.peak = 0
        self.rows: list[Call] = []
        self.room: GhostRuntime = GhostRuntime(self, degrees, places)

    def record_allocation(self, size: int, tier: Tier) -> None:
        self.levels[tier] += size
        self.peak = max(self.peak, self.levels.total())

    def record_collective(
        self,
        collective: Collective,
        axes: Axes,
        state: State,
        payload: int,
        via: str,
        *,
        is_awaited: bool,
    ) -> None:
        named = tuple(map(str, self.room.sort_axes(axes)))
        self.rows.append((collective, named, state, payload, via))

    def record_operator(self, *_: object) -> None:
        """What operators take is no storage."""

    record_update = record_operator

    def record_copy(self, source: Tier, target: Tier, state: State, size: int) -> None:
        self.rows.append((MOVES[source, target], (), state, size, ""))

    def live(self) -> Mapping[Tier, int]:
        return {tier: self.levels[tier] for tier in Tier}

    def calls(self) -> Sequence[Call]:
        return self.rows

    def tier(self, tensor: Ghost) -> Tier:
        return tensor.tier

    def storage(self, tensor: Ghost) -> tuple[int, int, int]:
        return id(tensor.storage), tensor.start, tensor.storage.size

    def tag(self, tensor: Ghost) -> tuple[State | None, str]:
        return tensor.storage.state, tensor.storage.name


class WatchedTorchRuntime(Ledger):
    """A torch runtime while it is entered; earlier storages are not attributed."""

    def __init__(self, mesh: Mesh, path: str | None = None) -> None:
        super().__init__()
        self.room = TorchRuntime(mesh, mesh.registry, path)
        self.peak = self._level = 0
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        if mesh.axes:
            mesh.group(mesh.axes)  # so that the meter knows it by its axes
        self.meter = TrafficMeter(mesh.registry, mesh.axes_by_group())

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        self._born[key] = weakref.ref(storage)
        self._rise(storage.nbytes())

    def on_resize(self, key: int, storage: torch.UntypedStorage, before: int) -> None:
        self._rise(storage.nbytes() - before)

    def on_free(self, key: int, size: int) -> None:
        if self._born.pop(key, None) is not None:
            self._rise(-size)

    def _rise(self, size: int) -> None:
        self._level += size
        self.peak = max(self.peak, self._level)

    def live(self) -> Mapping[Tier, int]:
        levels: Counter[Tier] = Counter()
        for key, reference in self._born.items():
            storage = reference()
            assert storage is not None, "a storage that died is not listed"
            levels[tier_of(storage)] += self.sizes[key]
        return {tier: levels[tier] for tier in Tier}

    def calls(self) -> Sequence[Call]:
        return [
            (row.key.collective, row.key.axes, row.key.state, row.payload_bytes, row.key.via or "")
            for row in self.meter.calls()
        ]

    def tier(self, tensor: torch.Tensor) -> Tier:
        return tier_of(tensor.untyped_storage())

    def storage(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        storage = tensor.untyped_storage()
        return storage._cdata, tensor.storage_offset(), storage.nbytes()

    def tag(self, tensor: torch.Tensor) -> tuple[State | None, str]:
        tag = self.room.registry.tag_of(tensor)
        return (None, "") if tag is None else (tag.state, tag.name)


def notes(program: Program, watched: WatchedRuntime[Any], settle: Callable[[], None]) -> list[Note]:
    """Run a program; `settle` waits until finished collectives have released their tensors."""
    kept: list[Note] = []
    for tensors in program(watched):
        settle()
        kept.append(_note(watched, tensors))
        watched.peak = sum(kept[-1].live.values())
        del tensors
    settle()
    kept.append(_note(watched, ()))
    return kept


def _note(watched: WatchedRuntime[T], tensors: Sequence[T]) -> Note:
    numbers: dict[int, int] = {}
    looks = []
    for tensor in tensors:
        identity, start, size = watched.storage(tensor)
        state, name = watched.tag(tensor)
        looks.append(
            TensorView(
                numel=watched.room.numel(tensor),
                dtype=watched.room.dtype(tensor),
                shape=watched.room.shape(tensor),
                tier=watched.tier(tensor),
                storage=numbers.setdefault(identity, len(numbers)),
                start=start,
                storage_bytes=size,
                state=state,
                name=name,
            )
        )
    calls = tuple(watched.calls())
    return Note(live=watched.live(), peak=watched.peak, calls=calls, looks=tuple(looks))


def notes_of_tensors(
    program: Program, mesh: Mesh, path: str | None, settle: Callable[[], None] = lambda: None
) -> list[Note]:
    """Run a program on torch as this rank."""
    watched = WatchedTorchRuntime(mesh, path)
    with torch.no_grad(), watched.meter, watched:
        return notes(program, watched, settle)


def notes_of_fake_tensors(program: Program, mesh: Mesh) -> list[Note]:
    """Run a program on fake tensors at the same coordinates."""
    places = {axis: mesh.coordinate(axis) for axis in mesh.axes}
    return notes(program, WatchedFakeRuntime(mesh.degrees, places), lambda: None)


class CallRecorder(GhostRuntime):
    """A runtime that records the names of its called methods."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.names: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name != "names" and not name.startswith("_"):
            self.names.add(name)
        return super().__getattribute__(name)
