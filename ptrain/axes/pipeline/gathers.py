"""How often a stage's units are gathered in a step: by the order of its schedule, and by when
`sync` gives them back.

Backward takes a unit's parameters for the gradients of its inputs: a whole backward or its input
half; the weight half multiplies what forward and that half left, and takes none.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.data.cost import GatherCounts
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.spec.dials import SyncPolicy
from ptrain.timeline import Kind


def stage_gathers(
    schedule: Schedule, stage: int, sync: SyncPolicy, *, is_root: bool = False
) -> GatherCounts:
    """Return how often each unit of a stage, or its root, is gathered in a step: where a pass finds
    it sharded, at first and after every reshard. With one micro-batch after the other it is
    `data.costs.gathers`."""
    times = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD), 0)
    gives_back = {
        Kind.FORWARD: bool(sync.after_forward(is_root=is_root)),
        Kind.BACKWARD: sync.reshard_after_backward,
    }
    is_sharded = True
    for kind in _passes(schedule, stage):
        times[kind] += is_sharded
        is_sharded = gives_back[kind]
        if not any(gives_back.values()):
            break  # whoever gathered it, it stays
    return GatherCounts(times[Kind.FORWARD], times[Kind.BACKWARD])


def _passes(schedule: Schedule, stage: int) -> Iterator[Kind]:
    """Forward and backward, in the order in which the stage's rank computes them."""
    for step in schedule.orders[schedule.rank_of[stage]]:
        for part in step.parts:
            if part.stage == stage and part.kind is not Kind.WEIGHT:
                yield Kind.FORWARD if part.kind is Kind.FORWARD else Kind.BACKWARD
