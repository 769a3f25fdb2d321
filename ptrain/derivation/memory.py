"""Resident bytes by state and rank: the `exact` column of Theorem 1.

Parameters, optimizer state and other memory are counted after the update, gradients at the end of
the last backward pass. Ranks differ only in the rows of a tensor that they hold without padding.

At start-up a rank builds its part of the initial parameters on the host (`startup_bytes`).
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
from ptrain.derivation.tape import PeakExceeded, Tape
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import COUNTS
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.step import Plan

Rows = tuple[Footprint, ...]

_TOKEN_BYTES = 8  # int64
_DRAWN_BYTES = 4  # per element: initial values are drawn in fp32, on the CPU
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # loss scaling: the scale, the steps since it grew, the overflow flag


def by_shard(ghost: Wrapping) -> tuple[list[Rows], list[int]]:
    """Return the rows of each kind of rank, and the kind of each place along `differing_axes`."""
    spec, plan, facts = ghost.wrapped.spec, ghost.wrapped.plan, ghost.wrapped.facts
    other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
    kinds = [*map(ghost.kind_of_shard, range(ranks_over(spec, plan.differing_axes)))]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    rows = [(*ghost.footprints(kinds.index(kind)), other) for kind in numbers]
    return rows, [*map(numbers.__getitem__, kinds)]


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the bytes of memory other than parameters, optimizer state, gradients and activations.

    These are the model's buffers, the samples of one step, the scalar that accumulates the loss,
    and the state of loss scaling. Reals are fp32, or fp64 if the model computes in fp64.
    """
    # `models.initialize` keeps floating-point buffers in fp32, and in fp64 for a model in fp64.
    scale = 2 if spec.precision.effective_layout.parameters is DType.FP64 else 1
    if (sample := facts.sample_bytes) is None:
        sample = held_tokens(spec) * _TOKEN_BYTES
    samples = spec.batch.accumulate * spec.batch.micro * sample
    counts = counts_bytes(facts)
    reals = sum(size for _, size in held_buffers(spec, facts.buffers)) - counts
    scaling = _SCALING_BYTES if spec.precision.effective_layout.scales_loss else 0
    return scale * (reals + _LOSS_BYTES) + counts + samples + scaling


def startup_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the host bytes that a rank needs at start-up, in addition to the states that it keeps.

    Args:
        spec: The spec whose ranks start.
        facts: Its model. `facts.built_whole` is True if each rank builds the full model.

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


# Peaks: memory that lives for the full step, plus the additional memory of a phase.


Phases = Mapping[Phase, int]

_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # live for the full step


def always(base: ByRank[Footprint]) -> list[int]:
    """Return the device bytes that live for the full step, by rank."""
    return base.totals(lambda row: row.device_bytes if row.state in _BASE else 0)


def least_above(base: ByRank[Footprint], limit: float) -> float:
    """Return the largest peak above resident memory that fits on any rank.

    Raises:
        PeakExceeded: The resident memory of some rank exceeds `limit`.
    """
    if limit == inf:
        return inf
    lives = always(base)
    if max(lives) > limit:
        raise PeakExceeded
    return limit - min(lives)


def peaks(lives: Sequence[int], keys: Sequence[KeyT], above: Mapping[KeyT, Phases]) -> ByRank[Peak]:
    """Return each phase's peak by rank: resident bytes plus the further bytes of its key."""
    first: dict[Hashable, KeyT] = {}
    like = {key: first.setdefault(tuple(phases.items()), key) for key, phases in above.items()}
    return rows_by_rank(
        zip(lives, map(like.__getitem__, keys), strict=True),
        lambda pair: [
            Peak(phase=phase, rank=0, device_bytes=pair[0] + more)
            for phase, more in above[pair[1]].items()
        ],
    )


# Cost of routers' balancing biases: ranks keep counts of choices, which are summed over ranks.


def counts_bytes(facts: ModelFacts) -> int:
    """Return the bytes of the routers' counts in a model or a part of it. All ranks with the part
    keep them."""
    return sum(size for name, size in facts.buffers if name.endswith(f".{COUNTS}"))


def summed(spec: Spec, plan: Plan, parts: Iterable[ModelFacts]) -> Iterator[Traffic]:
    """Yield the all-reduce of all counts that a rank with these parts of the model sends in a step.

    There is none without counts, or if all ranks have the same tokens.
    """
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if step is not None and step.axes and size:
        calls = Calls(Collective.ALL_REDUCE, State.OTHER, Phase.UPDATE)
        yield calls.traffic(group_over(spec, step.axes), size)


def sum_in_time(plan: Plan, tape: Tape, parts: Iterable[ModelFacts]) -> None:
    """Time the all-reduce of `summed` on a tape with a clock.

    The compute on a few hundred numbers is not timed.
    """
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if tape.clock is not None and step is not None and step.axes and size:
        tape.clock.send_payload(Collective.ALL_REDUCE, step.axes, size).wait()
