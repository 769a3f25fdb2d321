"""The model of the closed forms of the data axes: the sizes of its units, in a chain.

A forward pass is root(block 1, …, block n), and a backward pass the reverse: the root is used first
and released last. Of its gradients the head's come first and the embedding's last. Activations of
the model are not included."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ptrain.cost import State
from ptrain.spec.placement import Tier

Shape = tuple[int, ...]
Resident = dict[State, Counter[Tier]]  # bytes


class NoClosedForm(ValueError):
    """An error for a setting without a formula, with the reason."""


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """A wrap unit: the shapes of its tensors, in elements. `is_apart` marks a layer's experts,
    which differ between the ranks of one axis."""

    shapes: tuple[Shape, ...]
    is_root: bool = False
    is_apart: bool = False

    @property
    def numels(self) -> tuple[int, ...]:
        """Return the elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Return the elements of all tensors."""
        return sum(self.numels)

    def is_hidden(self, shape: Shape) -> bool:
        """Return True for a matrix within the model, which Muon updates."""
        return len(shape) == 2 and not self.is_root


@dataclass(frozen=True, slots=True)
class UnitChain:
    """`blocks` first to last and the `root` around them; `head` are the indices of the root's
    tensors whose gradients are complete before any block's, the others come after all of them.

    `arrival` are the elements of all tensors in the order in which their gradients are complete.
    `is_fresh`: autograd's gradient of a parameter is a tensor of its own until it is added to
    another; otherwise it is part of the model's activations and copied where it is kept.
    """

    blocks: tuple[ChainUnit, ...]
    root: ChainUnit
    head: frozenset[int]
    arrival: tuple[int, ...]
    is_fresh: bool = False

    @property
    def units(self) -> tuple[ChainUnit, ...]:
        """Return the units in the order of wrapping and update: the root last."""
        return (*self.blocks, self.root)

    @property
    def tensors(self) -> tuple[Shape, ...]:
        """Return the shapes of all tensors, unit by unit."""
        return tuple(shape for unit in self.units for shape in unit.shapes)

    @property
    def numel(self) -> int:
        """Return P, the number of parameters."""
        return sum(unit.numel for unit in self.units)


@dataclass(frozen=True, slots=True)
class MicroBatchPlace:
    """The position of a micro-batch in a step: first, last, in between, or only. All in between
    start and end in equal states."""

    is_first: bool
    is_last: bool


def micro_batches(count: int) -> tuple[MicroBatchPlace, ...]:
    """Return the distinct positions of `count` micro-batches, in order."""
    if count == 1:
        return (MicroBatchPlace(True, True),)
    between = (MicroBatchPlace(False, False),) if count > 2 else ()
    return (MicroBatchPlace(True, False), *between, MicroBatchPlace(False, True))
