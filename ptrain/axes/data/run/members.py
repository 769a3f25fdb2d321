"""The tensors of one flat unit as a module's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ptrain.axes.data.run.target import Parameter, axes_of
from ptrain.spec.placement import Axis
from ptrain.units import ceil_div

# Writes a parameter's rows, by its canonical name, from the `first` on to a tensor of their shape;
# rows are those of the part of it that this rank stores.
RowWriter = Callable[[str, Parameter, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The values of parameters that have none yet: those in the `stretches` of a unit's whole
    buffer, (start, end) of its elements, which are all that this rank keeps of it."""

    write: RowWriter
    stretches: Sequence[tuple[int, int]]

    def fill(self, name: str, parameter: Parameter, start: int, piece: torch.Tensor) -> None:
        """Write the rows that a stretch reaches to a parameter's `piece` of the buffer, in which it
        starts there; others keep what they have. A piece without dimensions is one row."""
        piece = torch.atleast_1d(piece)
        row = max(1, math.prod(piece.shape[1:]))
        for begin, end in self.stretches:
            first = max(begin - start, 0) // row
            behind = min(ceil_div(max(end - start, 0), row), len(piece))
            if first < behind:
                self.write(name, parameter, first, piece[first:behind])


class ParameterMembers:
    """`named` are parameters, or the parts of them that this rank stores, by canonical name;
    `values` is what gives them values, where they have none and no memory yet."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.values: OwnRows | None = None
        self.named = list(named)
        self.names = [name for name, _ in named]
        self.shapes = [tuple(parameter.shape) for _, parameter in named]
        axes = {axes for _, parameter in named if (axes := axes_of(parameter))}
        assert len(axes) <= 1, "what is cut over other axes is of another unit"
        self.cutting_axes: tuple[Axis, ...] = next(iter(axes), ())
        self.are_cut = [bool(axes_of(parameter)) for _, parameter in named]
        self._starts = [0, *accumulate(map(math.prod, self.shapes))]
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]

    def pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of a unit's whole buffer."""
        return [self._piece(whole, index) for index in range(len(self.named))]

    def _piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """One call, where a slice and then its view are two: this is called for every gradient."""
        start = whole.storage_offset() + self._starts[index]
        return whole.as_strided(self.shapes[index], self._strides[index], start)

    def adopt(self, whole: torch.Tensor) -> None:
        for index, (name, parameter) in enumerate(self.named):
            piece = self._piece(whole, index)
            if self.values is None:
                piece.copy_(parameter.detach())
            else:
                self.values.fill(name, parameter, self._starts[index], piece)
            parameter.data = piece

    def write(self, index: int, whole: torch.Tensor, *, is_bound: bool) -> None:
        _, parameter = self.named[index]
        piece = self._piece(whole, index)
        if parameter.grad is None:
            piece.zero_()
        else:
            piece.copy_(parameter.grad)
        parameter.grad = piece if is_bound else None

    def collect(self, index: int, whole: torch.Tensor) -> None:
        _, parameter = self.named[index]
        if parameter.grad is not None:
            self._piece(whole, index).add_(parameter.grad)
            parameter.grad = None

    def unbind(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None
