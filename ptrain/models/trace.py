"""A trace: the events of a micro-batch, or of its passes by themselves, on one device.

Between two boundaries (a unit is entered or left, in forward and in backward) events record what is
allocated and freed, and where each parameter's gradient is complete. A wrapper's own allocations
happen at those boundaries, so replaying a plan means to interleave the two.

Operators such as `nonzero`, `masked_select` and indexing by a mask select elements by values. The
sizes after them depend on data if the selection does: on tokens, or on parameters, which train. A
router's selection does; a mask made of positions alone does not. Such a model is traced at two
extents, all elements and one, between which every step lies if its allocations grow with the
selection. Every selection is taken by itself, so the upper extent is wide where several share rows
(each of a router's experts is given all).
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
from ptrain.models.work import OperatorWork, SentTensor, When
from ptrain.timeline import Boundary, Item, Timeline


class Extent(StrEnum):
    """How many elements a trace lets operators select by data."""

    GIVEN = "given"  # as many as its values say
    MOST = "most"  # all
    LEAST = "least"  # one
    FIRST = "first"  # one where a module selects first, and then none: no token for other experts


BOUNDS = (Extent.MOST, Extent.LEAST)  # of a model whose sizes depend on data

_SELECTS_BY = {"aten::nonzero": 0, "aten::masked_select": 1}  # the place of what says which
_INDEX = "aten::index"
_VALUES = ("aten::_local_scalar_dense", "aten::equal")  # which give Python a value
_MASKS = (torch.bool, torch.uint8)
_OF_SHAPES = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What of a trace depends on data: the `modules` within which something was selected by data,
    and by which `operators`; of those that are `unbounded` no extent is known. `reads`: Python was
    given a value that depends on data."""

    modules: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    reads: bool = False


class Selection:
    """Follows which storages hold what depends on data, and overwrites what operators select by."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self._modules: dict[str, None] = {}
        self._operators: dict[str, None] = {}
        self._unbounded: dict[str, None] = {}
        self._reads = False
        self._given: set[int] = set()
        self._dependent: set[int] = set()

    @property
    def selected(self) -> Selected:
        """Return what was selected so far."""
        return Selected(
            modules=tuple(self._modules),
            operators=tuple(self._operators),
            unbounded=tuple(self._unbounded),
            reads=self._reads,
        )

    def depends_on(self, tensor: Tensor) -> None:
        """Declare a tensor that somebody else fills: what is made of it depends on data."""
        self._given.add(_key(tensor))
        self._dependent.add(_key(tensor))

    def forget(self, key: int) -> None:
        """Another storage may have this key from now on."""
        self._given.discard(key)
        self._dependent.discard(key)

    def read(self, tree: object) -> None:
        """Declare tensors whose values Python is given."""
        self._reads |= self._is_dependent(tree)

    def before(self, function: Any, arguments: tuple[Any, ...], module: str) -> None:
        """An operator is about to run within a module."""
        name = function._schema.name
        if name in _VALUES:
            self.read(arguments)
        if torch.Tag.dynamic_output_shape not in function.tags:
            return
        masks = list(_masks(name, arguments))
        if not self._is_dependent(masks if name == _INDEX or masks else arguments):
            return
        is_first = module not in self._modules
        self._operators[name] = self._modules[module] = None
        if not masks or any(_key(mask) in self._given for mask in masks):
            self._unbounded[name] = None  # nor is what is not its own overwritten
        elif self.extent is not Extent.GIVEN:
            for mask in masks:
                _select(mask, self.extent, is_first=is_first)

    def after(self, function: Any, arguments: object, result: object) -> None:
        """An operator has run: its results depend on what it was given, unless only on shapes."""
        name = function._schema.name
        is_drawn = torch.Tag.nondeterministic_seeded in function.tags
        if is_drawn or (not name.endswith(_OF_SHAPES) and self._is_dependent(arguments)):
            self._dependent |= {_key(tensor) for tensor in _tensors(result)}

    def _is_dependent(self, tree: object) -> bool:
        return any(_key(tensor) in self._dependent for tensor in _tensors(tree))


def _masks(name: str, arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield what says which elements an operator selects."""
    if name in _SELECTS_BY:
        yield arguments[_SELECTS_BY[name]]
    elif name == _INDEX:
        yield from (tensor for tensor in _tensors(arguments[1]) if tensor.dtype in _MASKS)


def _select(mask: Tensor, extent: Extent, *, is_first: bool) -> None:
    """Overwrite the mask itself, since its backward pass reads it too."""
    mask.fill_(extent is Extent.MOST)
    has_one = extent is Extent.LEAST or (extent is Extent.FIRST and is_first)
    if has_one and mask.numel():
        mask.as_strided((1,), (1,), mask.storage_offset()).fill_(1)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: object) -> Iterable[Tensor]:
    return (
        leaf
        for leaf in tree_iter(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    )


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
                assert merged is not None, "there are operators"
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
