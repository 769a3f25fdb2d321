"""What one micro-batch allocates on a stage, pass by pass.

A pass knows nothing of what crosses the stage's boundaries: the hidden states that it is given and
the gradient of its output lived before, its own output and the gradient of its input live on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ptrain.timeline import Complete, Item, Kind, Repeated, Run, Timeline

Items = tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Of one micro-batch on one stage: the items of each kind of pass; bytes of what it hands on
    (hidden states, or logits) and of hidden states. `moved` and `repeated` as a timeline's."""

    items: Mapping[Kind, Items]
    output: int
    hidden: int
    moved: tuple[tuple[str, int], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    @property
    def loss(self) -> int:
        """Bytes of one micro-batch that outlive its whole backward pass and cross no boundary."""
        return _left(self, Kind.BACKWARD)

    @property
    def timeline(self) -> Timeline:
        """Forward and whole backward."""
        return Timeline(forward=self.items[Kind.FORWARD], backward=self.items[Kind.BACKWARD])


def of_first_stage(items: Mapping[Kind, Items], *, output: int) -> Passes:
    """Nobody waits for gradients of tokens, and the half of the weights is the whole."""
    whole = {**items, Kind.INPUT: (), Kind.WEIGHT: items[Kind.BACKWARD]}
    return Passes(items=whole, output=output, hidden=0)


def of_later_stage(items: Mapping[Kind, Items], *, output: int, hidden: int) -> Passes:
    """Return the passes of a stage behind the first. What both halves leave of the graph goes in
    the end of the second."""
    passes = Passes(items=items, output=output, hidden=hidden)
    if Kind.WEIGHT not in items:
        return passes
    left = _left(passes, Kind.INPUT, Kind.WEIGHT) - passes.loss
    assert left >= 0, "halves of a backward pass that free what is not there"
    ended = {**items, Kind.WEIGHT: (*items[Kind.WEIGHT], Run(0, -left))}
    return Passes(items=ended, output=output, hidden=hidden)


def _left(passes: Passes, *backward: Kind) -> int:
    """Return the bytes of one micro-batch that outlive these passes and cross no boundary."""
    items = (item for kind in (Kind.FORWARD, *backward) for item in passes.items[kind])
    return sum(map(net, items)) - passes.output - passes.hidden


def net(item: Item) -> int:
    """Bytes that stay, but for gradients, which are the wrap's."""
    match item:
        case Run():
            return item.net
        case Complete(_, size, cloned):
            return 0 if cloned else -size
        case Repeated(times, items):
            return times * sum(map(net, items))
        case _:
            return 0
