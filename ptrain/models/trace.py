"""Traces: the memory events of a micro-batch, or of its separate passes, on one device.

Between two boundaries (a unit starts or ends, in forward or backward) events record allocations,
frees, and completed gradients of parameters. A wrapper allocates at those boundaries, so a plan is
replayed by interleaving its allocations with the events.

Operators such as `nonzero`, `masked_select` and indexing by a mask select elements by values. Later
sizes depend on data if the selection does: on tokens, or on parameters, which train. A router's
selection does; a mask made of positions does not. Such a model is traced at two extents, with all
elements selected and with one. If allocations grow with the selection, every step lies between the
two. Each selection is treated separately, so the upper extent is wide if several selections share
rows (each of a router's experts is given all of them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ptrain import timeline
from ptrain.models.work import OperatorWork, PassKind, RecordedCollective
from ptrain.timeline import Boundary, Item, Timeline


class Extent(StrEnum):
    """The number of elements that data-dependent operators select in a trace."""

    GIVEN = "given"  # as the values select
    MOST = "most"  # all
    LEAST = "least"  # one
    FIRST = "first"  # one at a module's first selection, then none: other experts get no token


BOUNDS = (Extent.MOST, Extent.LEAST)  # for models whose sizes depend on data

_SELECTS_BY = {"aten::nonzero": 0, "aten::masked_select": 1}  # index of the argument that selects
_INDEX = "aten::index"
_VALUES = ("aten::_local_scalar_dense", "aten::equal")  # operators that return a value to Python
_MASKS = (torch.bool, torch.uint8)
_OF_SHAPES = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDependence:
    """The data-dependent part of a trace.

    Attributes:
        modules: Modules in which elements were selected by data.
        operators: Names of the operators that selected them.
        unbounded: Operators whose extent is unknown.
        reads: True if Python read a value that depends on data.
    """

    modules: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    has_reads: bool = False


class Selection:
    """The tracker of storages whose values depend on data; it overwrites masks to set the
    extent."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        # A dictionary without values keeps the order of first selection, which a set would not.
        self._modules: dict[str, None] = {}
        self._operators: dict[str, None] = {}
        self._unbounded: dict[str, None] = {}
        self._reads = False
        self._given: set[int] = set()
        self._dependent: set[int] = set()

    @property
    def result(self) -> DataDependence:
        """The selections so far."""
        return DataDependence(
            modules=tuple(self._modules),
            operators=tuple(self._operators),
            unbounded=tuple(self._unbounded),
            has_reads=self._reads,
        )

    def depends_on(self, tensor: Tensor) -> None:
        """Register an input tensor: everything computed from it depends on data."""
        self._given.add(_storage_key(tensor))
        self._dependent.add(_storage_key(tensor))

    def forget(self, key: int) -> None:
        """Remove a freed storage, whose key may be reused.

        Args:
            key: The storage's key, the address of the C++ storage.
        """
        self._given.discard(key)
        self._dependent.discard(key)

    def mark_read(self, tree: object) -> None:
        """Register tensors whose values Python reads."""
        self._reads |= self._is_dependent(tree)

    def before_operator(self, function: Any, arguments: tuple[Any, ...], module: str) -> None:
        """Record an operator's data-dependent selections before it runs, and overwrite their masks.

        Masks that are inputs of the model are not overwritten.

        Args:
            function: The operator. Without the tag `dynamic_output_shape` it selects nothing.
            arguments: Its positional arguments.
            module: The dotted name of the module that runs it.
        """
        name = function._schema.name
        if name in _VALUES:
            self.mark_read(arguments)
        if torch.Tag.dynamic_output_shape not in function.tags:
            return
        masks = list(_selecting_arguments(name, arguments))
        if not self._is_dependent(masks if name == _INDEX or masks else arguments):
            return
        is_first = module not in self._modules
        self._operators[name] = self._modules[module] = None
        if not masks or any(_storage_key(mask) in self._given for mask in masks):
            self._unbounded[name] = None  # a mask that is an input is not overwritten either
        elif self.extent is not Extent.GIVEN:
            for mask in masks:
                _overwrite_mask(mask, self.extent, is_first=is_first)

    def after_operator(self, function: Any, arguments: object, result: object) -> None:
        """Mark results that depend on data: drawn ones, and results of dependent arguments.

        Args:
            function: The operator.
            arguments: All its arguments, as a tree.
            result: Its result, as a tree.
        """
        name = function._schema.name
        is_drawn = torch.Tag.nondeterministic_seeded in function.tags
        if is_drawn or (not name.endswith(_OF_SHAPES) and self._is_dependent(arguments)):
            self._dependent |= {_storage_key(tensor) for tensor in _iter_tensors(result)}

    def _is_dependent(self, tree: object) -> bool:
        return any(_storage_key(tensor) in self._dependent for tensor in _iter_tensors(tree))


def _selecting_arguments(name: str, arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the arguments that select elements."""
    if name in _SELECTS_BY:
        yield arguments[_SELECTS_BY[name]]
    elif name == _INDEX:
        yield from (tensor for tensor in _iter_tensors(arguments[1]) if tensor.dtype in _MASKS)


def _overwrite_mask(mask: Tensor, extent: Extent, *, is_first: bool) -> None:
    """Overwrite a mask in place, because its backward pass reads it too."""
    mask.fill_(extent is Extent.MOST)
    has_one = extent is Extent.LEAST or (extent is Extent.FIRST and is_first)
    if has_one and mask.numel():
        # The first element by address, which exists in any shape.
        mask.as_strided((1,), (1,), mask.storage_offset()).fill_(1)


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _iter_tensors(tree: object) -> Iterable[Tensor]:
    return (
        leaf
        for leaf in tree_iter(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    )


@dataclass(frozen=True, slots=True)
class StorageAllocated:
    """An operator allocates a storage of `size` bytes."""

    id: int
    size: int
    operator: str


@dataclass(frozen=True, slots=True)
class StorageFreed:
    """The storage of an earlier `StorageAllocated` is freed."""

    id: int


@dataclass(frozen=True, slots=True)
class GradientComplete:
    """A parameter's gradient is complete, in storage `id`.

    `cloned`: autograd copied it there because it could not keep the incoming tensor. `freed`:
    storages freed since the copy; autograd releases the incoming tensor before it calls a hook.
    """

    parameter: str
    id: int
    is_cloned: bool
    freed: tuple[int, ...] = ()


Event = StorageAllocated | StorageFreed | GradientComplete | Boundary
Works = tuple[tuple[int, OperatorWork], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record of one micro-batch, by pass.

    Attributes:
        passes: Events of `forward`, and of `backward` or its halves `input` and `weight`.
        sizes: Bytes of all storages by id.
        moved: Storages off the device with their tiers; they have no events.
        works: Computation and communication by pass, each with the number of events before it.
        draws: True if random numbers were drawn.
        is_opaque: True if some operator is custom, so that its computation is unknown.
        statistics: Storages that fused attention saves next to its output.
        output: Storage that a stage sends to the next one; None without stages.
        selected: The data-dependent part.
    """

    passes: Mapping[str, tuple[Event, ...]]
    sizes: Mapping[int, int]
    moved: tuple[tuple[int, str], ...] = ()
    works: Mapping[str, Works] = field(default_factory=dict)
    draws: bool = False
    is_opaque: bool = False
    statistics: frozenset[int] = frozenset()
    output: int | None = None
    selected: DataDependence = field(default_factory=DataDependence)

    @property
    def forward(self) -> tuple[Event, ...]:
        """The events of the forward pass."""
        return self.passes["forward"]

    @property
    def backward(self) -> tuple[Event, ...]:
        """The events of all other passes."""
        others = (events for name, events in self.passes.items() if name != "forward")
        return tuple(event for events in others for event in events)

    @property
    def recomputed_collectives(self) -> tuple[tuple[str, int, int], ...]:
        """The tensor-parallel collectives of forward that backward ran again, for a timeline."""
        return tuple(
            call for works in self.works.values() for call in list_recomputed_collectives(works)
        )


def list_recomputed_collectives(works: Works) -> list[tuple[str, int, int]]:
    """Return kind, full-tensor bytes and ranks of each tensor-parallel collective that ran
    again."""
    return [
        (work.record.collective.value, work.record.payload, work.record.ranks)
        for _, work in works
        if work.pass_kind is PassKind.AGAIN
        and isinstance(work.record, RecordedCollective)
        and not work.record.axis
    ]


def to_timeline(recording: Recording) -> Timeline:
    """Return the recording in bytes, with all events between two boundaries merged."""
    return Timeline(
        forward=tuple(_timeline_items(recording.forward, recording.sizes)),
        backward=tuple(_timeline_items(recording.backward, recording.sizes)),
        moved=tuple((tier, recording.sizes[number]) for number, tier in recording.moved),
        repeated=recording.recomputed_collectives,
    )


def _timeline_items(events: Sequence[Event], sizes: Mapping[int, int]) -> Iterator[Item]:
    """Yield the timeline items of a pass."""
    last = last_views(events)
    for part in between_boundaries(events):
        match part:
            case Boundary():
                yield part
            case GradientComplete():
                yield to_complete_item(part, last, sizes)
            case lives:
                deltas = (
                    sizes[e.id] if isinstance(e, StorageAllocated) else -sizes[e.id] for e in lives
                )
                merged = timeline.run(deltas)
                assert merged is not None, "there are operators"
                yield merged


def between_boundaries(
    events: Sequence[Event],
) -> Iterator[Boundary | GradientComplete | list[StorageAllocated | StorageFreed]]:
    """Yield boundaries and completed gradients, and the allocations between them as lists."""
    lives: list[StorageAllocated | StorageFreed] = []
    for event in events:
        if isinstance(event, StorageAllocated | StorageFreed):
            lives.append(event)
            continue
        if lives:
            yield lives
        lives = []
        yield event
    if lives:
        yield lives


def last_views(events: Sequence[Event]) -> dict[int, GradientComplete]:
    """Return the last completed gradient in each storage of a pass."""
    return {event.id: event for event in events if isinstance(event, GradientComplete)}


def to_complete_item(
    event: GradientComplete, last: Mapping[int, GradientComplete], sizes: Mapping[int, int]
) -> timeline.Complete:
    """Return a completed gradient in bytes.

    Gradients that are views of one storage keep it alive, so only the `last` one carries its size.

    Args:
        event: The completed gradient.
        last: The last completed gradient in each storage, by storage id.
        sizes: Bytes of all storages, by storage id.
    """
    size = sizes[event.id] if last[event.id] is event else 0
    beside = sum(sizes[number] for number in event.freed)
    return timeline.Complete(event.parameter, size, event.is_cloned, beside)
