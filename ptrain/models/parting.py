"""What a model does along the features of a slice that a rank of tp cannot do: it would take apart,
or put together, its slice alone, or count heads that are not all there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ptrain.models.cut_dimensions import VIEWS, CutDimensions
from ptrain.models.projections import Projections
from ptrain.spec.role import in_any_block

Problem = tuple[str, str]  # what was found, and the remedy

_UNFLATTENED = (torch.Tensor.unflatten, torch.unflatten)
_RESHAPED = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


class Parting:
    """Judges operators and views on slices. Views of what a column layer itself gives may be its
    projections: that shows when all of them have been seen."""

    def __init__(self) -> None:
        self.projections = Projections()
        self._cut = CutDimensions()
        self._if_not_projections: list[tuple[str, int, Problem]] = []  # layer, their number

    def gives(self, column: str, output: torch.Tensor) -> None:
        """Declare what a column layer gives."""
        self.projections.gives(column, output)
        self._cut.gives(output)

    def died(self, key: int) -> None:
        """A storage is gone."""
        self.projections.died(key)
        self._cut.died(key)

    def operator(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        slices: Iterable[tuple[torch.Tensor, str]],
        where: str,
    ) -> Iterator[Problem]:
        """Yield what is wrong with an operator in the forward of `where` on slices, each beside its
        column."""
        for tensor, column in slices:
            if self._cut.is_parted(function, args, kwargs, tensor):
                name = function._schema.name
                problem = _parted(name, column, where)
                is_all = self.projections.is_whole(tensor)
                if name in VIEWS and is_all and (owner := self.projections.owner(tensor)):
                    self._if_not_projections.append((owner, 0, problem))
                else:
                    yield problem

    def passes_on(self, slices: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """An operator made `results` of slices."""
        self._cut.passes_on(list(slices), results)

    def view(
        self,
        tensor: torch.Tensor,
        sizes: tuple[int, ...],
        view: torch.Tensor,
        column: str,
        where: str,
    ) -> Iterator[Problem]:
        """Yield a problem where a slice becomes heads of a number that is written and a width that
        is not."""
        before, after = self._cut.dimension(tensor), self._cut.dimension(view)
        if before is None or after is None or -1 not in sizes[after + 1 :]:
            return
        if view.shape[after] < tensor.shape[before]:
            problem = _counted(sizes[sizes.index(-1, after) - 1], column, where)
            may_be_projections = sizes[after + 1] == -1 and self.projections.is_whole(tensor)
            if may_be_projections and (owner := self.projections.owner(tensor)):
                self._if_not_projections.append((owner, sizes[after], problem))
            else:
                yield problem

    def end(self) -> Iterator[Problem]:
        """Yield the problems of what would have been right of projections, and was of none."""
        for owner, number, problem in self._if_not_projections:
            lengths = self.projections.lengths(owner)
            if not lengths or number not in (0, len(lengths)):
                yield problem


def _parted(operator: str, column: str, where: str) -> Problem:
    verb = "puts together slices" if operator == "aten::cat" else "takes apart a slice"
    finding = f"in the forward of {where} {operator} {verb} of the features, that of {column}: "
    finding += "a rank would do so with its own alone"
    remedy = (
        f"take apart all that {in_any_block(column)} itself gives, into projections one behind "
    )
    return finding, f"{remedy}the other, or give it and its row no role"


def _counted(heads: int, column: str, where: str) -> Problem:
    finding = f"the forward of {where} makes {heads} heads of what {column} gives, of a width that "
    finding += "follows from it: of its slice a rank would make as many, and narrower ones"
    return finding, "write -1 for the heads, or give the attribute the role count"


class ViewCalls(TorchFunctionMode):
    """Sees how a model writes the sizes of views while it is entered: an operator has them without
    the -1. `judge` is given the tensor, the sizes as they are written, and the view."""

    def __init__(
        self, judge: Callable[[torch.Tensor, tuple[int, ...], torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._judge = judge

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _RESHAPED or func in _UNFLATTENED:
            tensor, *others = (*args, *(kwargs or {}).values())
            sizes = _flat(others)
            if func in _UNFLATTENED and sizes is not None:
                shape, at = tuple(tensor.shape), sizes[0] % tensor.dim()
                sizes = (*shape[:at], *sizes[1:], *shape[at + 1 :])
            if sizes is not None and isinstance(tensor, torch.Tensor):
                self._judge(tensor, sizes, result)
        return result


def _flat(written: list[Any]) -> tuple[int, ...] | None:
    """Sizes however they are written; none of them where a view is one of another dtype."""
    sizes = [
        s for value in written for s in (value if isinstance(value, list | tuple) else [value])
    ]
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else None
