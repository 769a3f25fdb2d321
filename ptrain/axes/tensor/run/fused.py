"""Projections that are several in one, one behind the other: a rank has its slice of each.

As a DTensor knows slices of one piece alone, such a tensor is held with its rows in another order,
the first rank's slices of all projections before the second rank's; whoever takes it off a program
gets it in the model's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ptrain.axes.data.run.target import Named, rows_of
from ptrain.axes.tensor.cost import cut_dims
from ptrain.models.window import Window
from ptrain.spec.role import fits
from ptrain.steps.step import Parallelize


def held_order(lengths: Sequence[int], degree: int) -> list[int]:
    """Return the features of projections of these lengths in the order in which `degree` ranks hold
    them."""
    return list(_places(lengths, degree))


def _places(lengths: Sequence[int], degree: int) -> Iterator[int]:
    for rank in range(degree):
        start = 0
        for length in lengths:
            part = length // degree
            yield from range(start + rank * part, start + (rank + 1) * part)
            start += length


def _consecutive(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of numbers that follow one another: the first and how many."""
    start = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[start], index - start
            start = index


class FusedOrder:
    """The order in which the tensors of fused projections are held, by their names in the model."""

    def __init__(self, step: Parallelize | None = None, degree: int = 1) -> None:
        self.step = step
        self.degree = degree

    def canonical(self, named: Named) -> Named:
        """Return tensors in the model's order, cut as they were. Collective over the ranks that
        have parts of them."""
        return {name: self._ordered(name, tensor, back=True) for name, tensor in named.items()}

    def held(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return what `canonical` was given. Collective too."""
        return {name: self._ordered(name, tensor, back=False) for name, tensor in named.items()}

    def held_features(self, path: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what a module gives, with the features of a fused projection in the order of the
        ranks."""
        lengths = self._lengths(f"{path}.weight")
        if not lengths:
            return whole
        order = torch.tensor(held_order(lengths, self.degree), device=whole.device)
        return whole.index_select(-1, order)

    def pieces(
        self, name: str, shape: Sequence[int], window: Window, part: torch.Tensor
    ) -> Iterator[tuple[Window, torch.Tensor]]:
        """Yield the windows in the model's order that make up a window of a tensor as it is held,
        each with its place in `part`."""
        lengths, place = self._lengths(name), 0
        if not lengths or self.step is None or not shape:
            yield window, part
            return
        dim = cut_dims(self.step, [(name, tuple(shape))])[name]
        first, count = window[dim]
        places = held_order(lengths, self.degree)[first : first + count]
        for start, size in _consecutive(places):
            yield (*window[:dim], (start, size), *window[dim + 1 :]), part.narrow(dim, place, size)
            place += size

    @torch.no_grad()
    def reorder(self, path: str, module: nn.Module) -> None:
        """Put the tensors of a fused projection, which are whole, into the order of the ranks."""
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            parameter.data = self._ordered(name, parameter.data, back=False)

    def _ordered(self, name: str, tensor: torch.Tensor, *, back: bool) -> torch.Tensor:
        lengths = self._lengths(name)
        if not lengths or tensor.dim() == 0 or self.step is None:
            return tensor
        dim = cut_dims(self.step, [(name, tuple(tensor.shape))])[name]
        order = torch.tensor(held_order(lengths, self.degree), device=tensor.device)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ordered = whole.index_select(dim, order.argsort() if back else order)
        if not isinstance(tensor, DTensor):
            return ordered
        return DTensor.from_local(
            rows_of(ordered, tensor).contiguous(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _lengths(self, name: str) -> tuple[int, ...]:
        module = name.rpartition(".")[0]
        fusions = self.step.fusions if self.step else ()
        return next((lengths for pattern, lengths in fusions if fits(pattern, module)), ())
