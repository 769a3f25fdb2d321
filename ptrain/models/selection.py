"""How many elements operators select by values: `nonzero`, `masked_select`, indexing by a mask.

The sizes of what follows such an operator depend on data where what it selects by does: on tokens,
or on parameters, which train. A router's do; a mask that is made of positions alone does not. Such
a model is traced at two extents, between which every step of it lies, if what it allocates grows
with what is selected: all elements, and one. Every selection is taken by itself, so that the upper
extent is wide where several share rows (each of a router's experts is given all).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter


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
