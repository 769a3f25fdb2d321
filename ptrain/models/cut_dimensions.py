"""Which dimension of a tensor is cut, where it is a slice of the features, and which operators work
along it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch

from ptrain.models.ledger import storage_of

VIEWS = frozenset(
    f"aten::{name}"
    for name in ("split", "split_with_sizes", "chunk", "slice", "narrow", "select", "unbind")
)
_APART = VIEWS | {"aten::glu", "aten::index_select", "aten::unsafe_split", "aten::cat"}


class CutDimensions:
    """Keeps of each storage of a slice the extent, in elements, of the dimension that is cut: of
    any view the dimension that is cut is the outermost within."""

    def __init__(self) -> None:
        self._extents: dict[int, int] = {}

    def gives(self, output: torch.Tensor) -> None:
        """Declare what a column layer gives: its last dimension is cut."""
        self._keep(output, output.dim() - 1)

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._extents.pop(key, None)

    def dimension(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension that is cut; None where that is not known."""
        extent = self._extents.get(storage_of(tensor)._cdata, 0)
        strides = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        cut = [(stride, d) for d, (stride, size) in strides if 0 < stride < extent and size > 1]
        return max(cut)[1] if cut else None

    def passes_on(self, read: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """An operator made `results` of slices: where a new tensor has a dimension of the same size
        in the same place, from either end, that is cut."""
        sources = [(tensor, cut) for tensor in read if (cut := self.dimension(tensor)) is not None]
        views = {storage_of(tensor)._cdata for tensor in read}
        for result in results:
            if storage_of(result)._cdata not in views:
                places = (
                    place for tensor, cut in sources for place in _places(tensor, cut, result)
                )
                if (dimension := next(places, None)) is not None:
                    self._keep(result, dimension)

    def is_parted(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: torch.Tensor
    ) -> bool:
        """Whether an operator takes a slice apart, or puts slices together, where they are cut."""
        if function._schema.name not in _APART:
            return False
        cut = self.dimension(tensor)
        values = {
            declared.name: value if value is not None else declared.default_value
            for declared, value in zip_longest(function._schema.arguments, args)
        } | dict(kwargs)
        if cut is None or values["dim"] % tensor.dim() != cut:
            return False
        match function._schema.name:
            case "aten::cat":
                return len(values["tensors"]) > 1
            case "aten::slice":
                return not _is_of_every_part(values, tensor.shape[cut])
            case _:
                return True

    def _keep(self, tensor: torch.Tensor, dimension: int) -> None:
        extent = tensor.stride(dimension) * tensor.shape[dimension]
        self._extents[storage_of(tensor)._cdata] = extent


def _places(tensor: torch.Tensor, cut: int, result: torch.Tensor) -> Iterable[int]:
    from_end = cut - tensor.dim() + result.dim()
    for place in dict.fromkeys((from_end, cut)):
        if 0 <= place < result.dim() and result.shape[place] == tensor.shape[cut]:
            yield place


def _is_of_every_part(values: Mapping[str, Any], size: int) -> bool:
    """Whether a slice is all, or every second (third) feature: each rank has those of its own."""
    start, end, step = values["start"] or 0, values["end"], values["step"]
    return 0 <= start < step and (end is None or end >= size) and size % step == 0
