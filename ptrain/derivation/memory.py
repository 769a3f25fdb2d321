"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.

At start-up a rank makes its part of the initial parameters on the host (`startup_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import inf

from ptrain.axes.context.attention import held_buffers, held_tokens
from ptrain.axes.ring import Calls, group_over
from ptrain.by_rank import ByRank, KeyT, rows_by_rank
from ptrain.cost import Collective, Footprint, Peak, Phase, State, Traffic
from ptrain.derivation.ghosts.wrapping import Wrapping
from ptrain.derivation.tape import Tape, TooLarge
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import COUNTS
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.step import Plan

Rows = tuple[Footprint, ...]

_TOKEN_BYTES = 8  # int64
_DRAWN_BYTES = 4  # of an element: initial values are drawn in fp32, on the CPU
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # of a scaled loss: its scale, the steps since it grew, whether it overflowed


def by_shard(ghost: Wrapping) -> tuple[list[Rows], list[int]]:
    """The rows of each kind of rank, and by a rank's place along `differing_axes` its kind."""
    spec, plan, facts = ghost.wrapped.spec, ghost.wrapped.plan, ghost.wrapped.facts
    other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
    kinds = [*map(ghost.kind_of_shard, range(ranks_over(spec, plan.differing_axes)))]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    rows = [(*ghost.footprints(kinds.index(kind)), other) for kind in numbers]
    return rows, [*map(numbers.__getitem__, kinds)]


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """The model's buffers (reals in fp32, or fp64 where the model computes in it), one step's
    samples, and the scalar in which a step adds up its loss."""
    scale = 2 if spec.precision.effective.parameters is DType.FP64 else 1
    if (sample := facts.sample_bytes) is None:
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
    shapes = {shape for unit in facts.units for shape in unit.shapes}
    return _DRAWN_BYTES * max(map(math.prod, shapes), default=0)


def ranks_per_node(spec: Spec) -> int:
    """Return the number of ranks on a node: all of them, if the spec names no cluster."""
    cluster = spec.cluster
    return min(spec.world_size, cluster.devices_per_node) if cluster else spec.world_size


# Peaks: what lives for the whole step, and what a phase has above it.


Phases = Mapping[Phase, int]

_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # what lives for the whole step


def always(base: ByRank[Footprint]) -> list[int]:
    """Return by rank the device bytes that live for the whole step."""
    return base.totals(lambda row: row.device_bytes if row.state in _BASE else 0)


def least_above(base: ByRank[Footprint], limit: float) -> float:
    """Return how many bytes above what lives always are too many on every rank. Raises TooLarge if
    on some rank that alone is."""
    if limit == inf:
        return inf
    lives = always(base)
    if max(lives) > limit:
        raise TooLarge
    return limit - min(lives)


def peaks(lives: Sequence[int], keys: Sequence[KeyT], above: Mapping[KeyT, Phases]) -> ByRank[Peak]:
    """Return by rank each phase's peak: what lives always, and what the rank's key has above it."""
    first: dict[Hashable, KeyT] = {}
    like = {key: first.setdefault(tuple(phases.items()), key) for key, phases in above.items()}
    return rows_by_rank(
        zip(lives, map(like.__getitem__, keys), strict=True),
        lambda pair: [
            Peak(phase=phase, rank=0, device_bytes=pair[0] + more)
            for phase, more in above[pair[1]].items()
        ],
    )


# What routers' biases cost: counts of choices that ranks keep, and what is sent to add them up.


def counts_bytes(facts: ModelFacts) -> int:
    """Return the bytes of a model's counts, or those of a part of it, which all ranks keep that
    have the part."""
    return sum(size for name, size in facts.buffers if name.endswith(f".{COUNTS}"))


def summed(spec: Spec, plan: Plan, parts: Iterable[ModelFacts]) -> Iterator[Traffic]:
    """Yield what a rank that has these parts of the model sends in a step: one all-reduce of all
    counts, where there are any and other ranks have tokens of their own."""
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if step is not None and step.axes and size:
        calls = Calls(Collective.ALL_REDUCE, State.OTHER, Phase.UPDATE)
        yield calls.over(group_over(spec, step.axes), size)


def sum_in_time(plan: Plan, tape: Tape, parts: Iterable[ModelFacts]) -> None:
    """The same on a tape whose clock goes along. What is computed is a few hundred numbers."""
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if tape.clock is not None and step is not None and step.axes and size:
        tape.clock.send(Collective.ALL_REDUCE, step.axes, size).wait()
