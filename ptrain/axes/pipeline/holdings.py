"""What follows from a schedule's order alone, whatever its costs: whose activations a rank holds,
and what it sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ptrain.axes.data.cost import GatherCounts
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.costs import Collective, Phase
from ptrain.spec.dials import SyncPolicy
from ptrain.timeline import Kind

_LAST_USE = (Kind.BACKWARD, Kind.WEIGHT)  # a split backward needs activations until its weight half


def held(schedule: Schedule, rank: int) -> Iterator[dict[int, int]]:
    """While each step of a rank runs: of how many micro-batches it holds activations, by stage.

    A micro-batch counts from its forward to its whole backward or to its weight half, both of
    these steps included.
    """
    counts = dict.fromkeys(schedule.stages_of(rank), 0)
    for step in schedule.orders[rank]:
        for part in step.parts:
            counts[part.stage] += part.kind is Kind.FORWARD
        yield dict(counts)
        for part in step.parts:
            counts[part.stage] -= part.kind in _LAST_USE


def most_held(schedule: Schedule, rank: int, sizes: dict[int, int] | None = None) -> int:
    """The most that a rank holds at once: micro-batches over all of its stages; with `sizes`, by
    stage, of one micro-batch's activations, in their unit."""
    return max(
        sum(count * (sizes[stage] if sizes else 1) for stage, count in counts.items())
        for counts in held(schedule, rank)
    )


def most_held_of(schedule: Schedule, stage: int) -> int:
    """The most micro-batches whose activations one stage holds at once."""
    return max(counts[stage] for counts in held(schedule, schedule.rank_of[stage]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one rank sends or receives over a boundary in a step: activations forward, gradients
    backward, one call a micro-batch. Boundary b is between the stages b and b + 1."""

    rank: int
    peer: int
    boundary: int
    collective: Collective
    phase: Phase
    calls: int


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Return what the ranks send and receive over boundaries, by rank and boundary, forward before
    backward. A boundary within a rank has no transfer."""
    counts = Counter(
        (part.stage, part.kind)
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    rows = [row for b in range(schedule.stages - 1) for row in _over(schedule, b, counts)]
    return tuple(sorted(rows, key=lambda row: (row.rank, row.boundary)))


def _over(
    schedule: Schedule, boundary: int, counts: Counter[tuple[int, Kind]]
) -> Iterator[Transfer]:
    if not schedule.is_crossed(boundary):
        return
    before, after = schedule.rank_of[boundary], schedule.rank_of[boundary + 1]
    forward = counts[boundary, Kind.FORWARD]
    backward = counts[boundary + 1, Kind.BACKWARD] + counts[boundary + 1, Kind.INPUT]
    for phase, calls, sender, receiver in (
        (Phase.FORWARD, forward, before, after),
        (Phase.BACKWARD, backward, after, before),
    ):
        for rank, peer, collective in (
            (sender, receiver, Collective.SEND),
            (receiver, sender, Collective.RECV),
        ):
            yield Transfer(
                rank=rank,
                peer=peer,
                boundary=boundary,
                collective=collective,
                phase=phase,
                calls=calls,
            )


# How often a stage's units are gathered in a step: by the order of its schedule, and by when
# `sync` gives them back.
#
# Backward takes a unit's parameters for the gradients of its inputs: a whole backward or its input
# half; the weight half multiplies what forward and that half left, and takes none.


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
