"""What the closed forms of the data axes know of a model: the sizes of its units, in a chain.

A forward pass is root(block 1, …, block n), a backward pass the reverse: the root is used first and
given up last, and of its gradients the head's come first and the embedding's last. The model's own
activations are nobody's here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ptrain.cost import State
from ptrain.spec.placement import Tier

Shape = tuple[int, ...]
Resident = dict[State, Counter[Tier]]  # bytes


class NoClosedForm(ValueError):
    """A setting for which there is no formula; the message says why."""


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """What is gathered and reduced together: the shapes of its tensors, in elements. `is_apart`: it
    is a layer's experts, of which along one axis each rank has others."""

    shapes: tuple[Shape, ...]
    is_root: bool = False
    is_apart: bool = False

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self.numels)

    def is_hidden(self, shape: Shape) -> bool:
        """Return whether a tensor of this shape is a matrix within the model: what Muon is for."""
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
        """In the order in which they are wrapped and updated: the root last."""
        return (*self.blocks, self.root)

    @property
    def tensors(self) -> tuple[Shape, ...]:
        """The shapes of all tensors, unit by unit."""
        return tuple(shape for unit in self.units for shape in unit.shapes)

    @property
    def numel(self) -> int:
        """P, the number of parameters."""
        return sum(unit.numel for unit in self.units)


@dataclass(frozen=True, slots=True)
class MicroBatchPlace:
    """A micro-batch of a step: the first, the last, one between them, or the only one. All between
    the first and the last find and leave the same."""

    is_first: bool
    is_last: bool


def micro_batches(count: int) -> tuple[MicroBatchPlace, ...]:
    """The different ones of `count` micro-batches, in order."""
    if count == 1:
        return (MicroBatchPlace(True, True),)
    between = (MicroBatchPlace(False, False),) if count > 2 else ()
    return (MicroBatchPlace(True, False), *between, MicroBatchPlace(False, True))
