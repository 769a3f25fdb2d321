"""When a model allocates, frees and completes gradients: one micro-batch as a list of items.

A timeline holds only what the model does on one device. Wrappers act at its boundaries and where a
gradient completes; `derivation.computing` interleaves the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from ptrain.word import Word


class Mark(Word):
    """Where a unit begins and ends: its forward, and its part of the backward pass."""

    ENTER = "enter"
    LEAVE = "leave"
    PRE_BACKWARD = "pre"
    POST_BACKWARD = "post"


class Kind(Word):
    """What a pass computes."""

    FORWARD = "F"
    BACKWARD = "B"  # whole: gradients of the inputs and of the weights
    INPUT = "I"  # gradients of the inputs alone: the stage before waits for them
    WEIGHT = "W"  # gradients of the weights alone: nobody waits for them


class Boundary(NamedTuple):
    """`unit` is an index into the wrap units, inner before outer, the root last."""

    mark: Mark
    unit: int


class Run(NamedTuple):
    """Allocations and frees between two boundaries: `net` bytes are left, and in between up to
    `rise` bytes more than before were alive."""

    rise: int
    net: int

    def then(self, other: Run) -> Run:
        """Both as one."""
        return Run(max(self.rise, self.net + other.rise), self.net + other.net)


class Complete(NamedTuple):
    """A parameter's gradient is complete: `size` bytes that stand alive, unless `cloned`: then
    they are allocated here where the gradient is kept, and not where it is added to another.
    `beside`: bytes that lived while the copy was made and are gone here, as what it is made of."""

    parameter: str
    size: int
    cloned: bool = False
    beside: int = 0


class Repeated(NamedTuple):
    """Items that come `times` times, one after the other, each time as the time before: those of
    one block, which stands for the equal ones behind it."""

    times: int
    items: tuple[Item, ...]


Item = Boundary | Run | Complete | Repeated


class Timeline(NamedTuple):
    """One micro-batch. `moved`: what forward takes off the device, (tier, bytes) of each storage,
    and backward brings back; `repeated`: the collectives of forward that backward runs again, with
    the whole tensor's bytes."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    moved: tuple[tuple[str, int], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()


def boundaries(items: Iterable[Item]) -> Iterator[Boundary]:
    """The boundaries among items, of what is repeated once."""
    for item in items:
        if isinstance(item, Boundary):
            yield item
        elif isinstance(item, Repeated):
            yield from boundaries(item.items)


def gradient_order(timeline: Timeline) -> tuple[str, ...]:
    """The parameters in the order in which their gradients are complete."""
    return tuple(item.parameter for item in timeline.backward if isinstance(item, Complete))


def run(deltas: Iterable[int]) -> Run | None:
    """Signed sizes as one run; None where nothing happens."""
    levels = [*accumulate(deltas)]
    return Run(max(0, *levels), levels[-1]) if levels else None
