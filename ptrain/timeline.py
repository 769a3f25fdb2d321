"""The timeline of one micro-batch: when a model allocates, frees and completes gradients.

A timeline describes the model on a single device. Wrappers act at its boundaries and at completed
gradients; `derivation.computing` combines the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from ptrain.word import Word


class Mark(Word):
    """A boundary of a unit: the begin or end of its forward, or of its part of backward."""

    ENTER = "enter"
    LEAVE = "leave"
    PRE_BACKWARD = "pre"
    POST_BACKWARD = "post"


class Kind(Word):
    """The kind of a pass."""

    FORWARD = "F"
    BACKWARD = "B"  # full: gradients of the inputs and of the weights
    INPUT = "I"  # only gradients of the inputs, which the stage before waits for
    WEIGHT = "W"  # only gradients of the weights, which no other stage waits for


class Boundary(NamedTuple):
    """A boundary of a wrap unit. `unit` is its index: inner before outer, the root last."""

    mark: Mark
    unit: int


class Run(NamedTuple):
    """The allocations and frees between two boundaries, reduced to two figures.

    Attributes:
        rise: The highest level above the start, in bytes.
        net: The level at the end relative to the start, in bytes.
    """

    rise: int
    net: int

    def followed_by(self, other: Run) -> Run:
        """Return this run followed by another as one run."""
        return Run(max(self.rise, self.net + other.rise), self.net + other.net)


class Complete(NamedTuple):
    """The completion of a parameter's gradient.

    Attributes:
        parameter: The name of the parameter.
        size: The bytes of the gradient.
        cloned: True if the gradient is a copy, allocated here if it is kept and not allocated if it
            is accumulated into an existing one.
        beside: The bytes of temporaries, such as the source of the copy, that are live while the
            copy is made and freed after it.
    """

    parameter: str
    size: int
    cloned: bool = False
    beside: int = 0


class Repeated(NamedTuple):
    """Items that occur `times` times in a row: one block, for all blocks equal to it."""

    times: int
    items: tuple[Item, ...]


Item = Boundary | Run | Complete | Repeated


class Timeline(NamedTuple):
    """The timeline of one micro-batch.

    Attributes:
        forward: The items of the forward pass.
        backward: The items of the backward pass.
        moved: The storages that forward moves off the device and backward moves back, as pairs
            (tier, bytes).
        repeated: The tp collectives of forward that backward runs again, as (name, bytes of the
            full tensor, ranks of the group or 0 for all).
    """

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    moved: tuple[tuple[str, int], ...] = ()
    repeated: tuple[tuple[str, int, int], ...] = ()


def boundaries(items: Iterable[Item]) -> Iterator[Boundary]:
    """Yield the boundaries among items, with repeated items counted once."""
    for item in items:
        if isinstance(item, Boundary):
            yield item
        elif isinstance(item, Repeated):
            yield from boundaries(item.items)


def gradient_order(timeline: Timeline) -> tuple[str, ...]:
    """Return the parameters in the order in which their gradients complete."""
    return tuple(item.parameter for item in timeline.backward if isinstance(item, Complete))


def run(deltas: Iterable[int]) -> Run | None:
    """Return signed sizes as one run, None if there are none."""
    levels = [*accumulate(deltas)]
    return Run(max(0, *levels), levels[-1]) if levels else None
