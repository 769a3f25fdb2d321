"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.
"""

from __future__ import annotations

from ptrain.algebra.layout import positions, ranks_over
from ptrain.costs import Footprint, State
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.ghosts.table import wrapping
from ptrain.facts.model import ModelFacts
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan

_TOKEN_BYTES = 8  # int64
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # of a scaled loss: its scale, the steps since it grew, whether it overflowed


def resident(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[Footprint, ...]:
    """Rows of parameters, optimizer state, gradients and the rest, rank by rank."""
    shards = by_shard(spec, plan, facts)
    return tuple(
        row.of_rank(rank)
        for rank, index in enumerate(positions(spec, differing_axes(plan)))
        for row in shards[index]
    )


def by_shard(spec: Spec, plan: Plan, facts: ModelFacts) -> list[tuple[Footprint, ...]]:
    """The rows of a rank, by its place along `differing_axes`."""
    ghost = wrapping(spec, plan, facts)
    other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
    shards = ranks_over(spec, differing_axes(plan))
    if ghost.is_alike:
        return [(*ghost.footprints(0), other)] * shards
    return [(*ghost.footprints(shard), other) for shard in range(shards)]


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """The model's buffers (fp32, or fp64 with the rest), one step's tokens and targets, and the
    scalar in which a step adds up its loss."""
    scale = 2 if spec.precision.compute_fp64 else 1
    samples = spec.batch.accumulate * spec.batch.micro
    tokens = samples * (spec.batch.sequence + 1)
    buffers = sum(size for _, size in facts.buffers)
    scaling = _SCALING_BYTES if spec.precision.effective.scales_loss else 0
    return scale * (buffers + _LOSS_BYTES) + tokens * _TOKEN_BYTES + scaling
