"""What one micro-batch allocates on a stage, pass by pass.

A pass knows nothing of what crosses the stage's boundaries: the hidden states that it is given and
the gradient of its output lived before, its own output and the gradient of its input live on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ptrain.facts.rows_timeline import RowsTimeline
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


def passes_of(
    whole: Timeline, halves: Timeline | None, *, is_first: bool, output: int, hidden: int
) -> Passes:
    """Return the passes of a stage by the timelines of its whole passes and, behind the first one
    and where backward passes are in halves, of these."""
    items = {Kind.FORWARD: whole.forward, Kind.BACKWARD: whole.backward}
    if is_first:
        passes = of_first_stage(items, output=output)
    else:
        if halves is not None:
            items |= {Kind.INPUT: halves.forward, Kind.WEIGHT: halves.backward}
        passes = of_later_stage(items, output=output, hidden=hidden)
    return replace(passes, moved=whole.moved, repeated=whole.repeated)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPasses:
    """The same as a formula of the rows that the experts of its `layers` get."""

    layers: tuple[str, ...]
    whole: RowsTimeline
    halves: RowsTimeline | None
    is_first: bool
    output: int
    hidden: int

    def at(self, rows: Sequence[int]) -> Passes:
        """Return the passes where the layers get so many rows."""
        return passes_of(
            self.whole.at(rows),
            self.halves.at(rows) if self.halves else None,
            is_first=self.is_first,
            output=self.output,
            hidden=self.hidden,
        )


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
