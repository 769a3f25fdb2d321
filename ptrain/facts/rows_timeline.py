"""A timeline whose sizes depend on where tokens go: a formula of the rows that the experts of each
layer get, of which any routing makes a timeline in bytes.

A storage has a size of its own, or is as large as rows of one layer are: nothing in between, which
whoever traces it makes sure of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ptrain.timeline import Boundary, Complete, Item, Run, Timeline, run

NO_LAYER = -1


@dataclass(frozen=True, slots=True)
class RowsSize:
    """`number` bytes, or as many of each row that the experts of a layer get: one of those that
    have experts, first to last."""

    number: int
    layer: int = NO_LAYER

    def at(self, rows: Sequence[int]) -> int:
        """Return the bytes where the layers get so many rows."""
        return self.number if self.layer == NO_LAYER else self.number * rows[self.layer]


@dataclass(frozen=True, slots=True)
class StorageEvent:
    """A storage is allocated, or `is_freed`."""

    size: RowsSize
    is_freed: bool


@dataclass(frozen=True, slots=True)
class StorageEvents:
    """What is allocated and freed between two boundaries, in order."""

    events: tuple[StorageEvent, ...]

    def at(self, rows: Sequence[int]) -> Run:
        """Return it in bytes."""
        deltas = ((-1 if event.is_freed else 1) * event.size.at(rows) for event in self.events)
        known = run(deltas)
        assert known is not None, "something happens"
        return known


RowsItem = Boundary | Complete | StorageEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsTimeline:
    """One micro-batch, as a `Timeline`."""

    forward: tuple[RowsItem, ...]
    backward: tuple[RowsItem, ...]
    saved: tuple[tuple[str, RowsSize], ...] = ()
    moved: tuple[tuple[str, RowsSize], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    def at(self, rows: Sequence[int]) -> Timeline:
        """Return the timeline where the experts of each layer get so many rows."""
        return Timeline(
            forward=tuple(_at(self.forward, rows)),
            backward=tuple(_at(self.backward, rows)),
            saved=tuple((operator, size.at(rows)) for operator, size in self.saved),
            moved=tuple((tier, size.at(rows)) for tier, size in self.moved),
            repeated=self.repeated,
        )


def _at(items: Sequence[RowsItem], rows: Sequence[int]) -> Iterator[Item]:
    for item in items:
        yield item.at(rows) if isinstance(item, StorageEvents) else item
