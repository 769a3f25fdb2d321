"""The bytes that forward leaves for backward, from a timeline or a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import Setting, evaluate_table
from ptrain.timeline import Item, Repeated, Run, Timeline

if TYPE_CHECKING:  # tests of the pure half read timelines only, without torch
    from ptrain.models.trace import Recording, StorageAllocated


def saved_storages(recording: Recording) -> tuple[StorageAllocated, ...]:
    """Return the allocations of forward that are alive at its end, in order."""
    from ptrain.models.trace import StorageAllocated, StorageFreed

    dead = {event.id for event in recording.forward if isinstance(event, StorageFreed)}
    return tuple(
        e for e in recording.forward if isinstance(e, StorageAllocated) and e.id not in dead
    )


def saved_bytes(timeline: Timeline) -> int:
    """Return the bytes that forward leaves alive: |A| of one micro-batch."""
    return sum(map(_net, timeline.forward))


def _net(item: Item) -> int:
    match item:
        case Run(_, net):
            return net
        case Repeated(times, items):
            return times * sum(map(_net, items))
        case _:
            return 0


def torch_version(setting: Setting) -> str:
    """Return the version of torch that was traced."""
    version: str = evaluate_table(TablePart.PASSES, setting).content["torch"]
    return version
