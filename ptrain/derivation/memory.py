"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.

At start-up a rank makes its part of the initial parameters on the host (`startup_bytes`).
"""

from __future__ import annotations

from collections.abc import Hashable

from ptrain.axes.context.form import held_buffers, held_tokens
from ptrain.by_rank import ByRank
from ptrain.costs import Footprint, State
from ptrain.derivation.balancing import counts_bytes
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.facts.model import ModelFacts
from ptrain.spec.layout import positions, ranks_over
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

Rows = tuple[Footprint, ...]

_TOKEN_BYTES = 8  # int64
_DRAWN_BYTES = 4  # of an element: initial values are drawn in fp32, on the CPU
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # of a scaled loss: its scale, the steps since it grew, whether it overflowed


def resident(ghost: Wrapping) -> ByRank[Footprint]:
    """Rows of parameters, optimizer state, gradients and the rest, rank by rank."""
    kinds, kind_of = by_shard(ghost)
    places = positions(ghost.wrapped.spec, differing_axes(ghost.wrapped.plan))
    return ByRank((kinds, [kind_of[shard] for shard in places]))


def by_shard(ghost: Wrapping) -> tuple[list[Rows], list[int]]:
    """The rows of each kind of rank, and by a rank's place along `differing_axes` its kind."""
    spec, plan, facts = ghost.wrapped.spec, ghost.wrapped.plan, ghost.wrapped.facts
    other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
    kinds: dict[Hashable, int] = {}
    rows: list[Rows] = []
    kind_of = []
    for shard in range(ranks_over(spec, differing_axes(plan))):
        kind_of.append(kinds.setdefault(ghost.kind_of_shard(shard), len(kinds)))
        if len(rows) < len(kinds):
            rows.append((*ghost.footprints(shard), other))
    return rows, kind_of


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """The model's buffers (reals in fp32, or fp64 where the model computes in it), one step's
    samples, and the scalar in which a step adds up its loss."""
    scale = 2 if spec.precision.effective.parameters is DType.FP64 else 1
    sample = facts.sample_bytes
    if sample is None:
        sample = held_tokens(spec) * _TOKEN_BYTES
    samples = spec.batch.accumulate * spec.batch.micro * sample
    counts = counts_bytes(facts)
    reals = sum(size for _, size in held_buffers(spec, facts.buffers)) - counts
    scaling = _SCALING_BYTES if spec.precision.effective.scales_loss else 0
    return scale * (reals + _LOSS_BYTES) + counts + samples + scaling


def startup_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the host bytes that a rank needs at start-up, besides the states that it keeps.

    Args:
        spec: The spec whose ranks start.
        facts: Its model; `facts.built_whole` tells whether each rank builds the full model.

    Returns:
        The full model, if a rank builds it. Else the largest tensor, since a rank draws tensors one
        by one. Zero for a folder: its files are mapped a few MiB at a time.
    """
    if facts.built_whole:
        return facts.numel * _DRAWN_BYTES
    if spec.model.pretrained is not None:
        return 0
    return _DRAWN_BYTES * max((tensor.numel for tensor in facts.tensors), default=0)


def ranks_per_node(spec: Spec) -> int:
    """Return the number of ranks on a node: all of them, if the spec names no cluster."""
    cluster = spec.cluster
    return min(spec.world_size, cluster.devices_per_node) if cluster else spec.world_size
