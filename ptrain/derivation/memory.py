"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from ptrain.algebra.layout import position, ranks_over
from ptrain.axes.data.costs import local_rows, padded_rows
from ptrain.costs import Footprint, State
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.flat_memory import flat_elements
from ptrain.derivation.optimizer_state import Elements, optimizer_bytes
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate
from ptrain.spec.spec import Spec

_TOKEN_BYTES = 8  # int64
_LOSS_BYTES = 4  # fp32


def resident(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[Footprint, ...]:
    """Rows of parameters, optimizer state, gradients and the rest, rank by rank."""
    axes = plan.wrap.shard_axes if isinstance(plan.wrap, FullyShard) else ()
    by_shard = [_rows(spec, plan, facts, index) for index in range(ranks_over(spec, axes))]
    return tuple(
        Footprint(state=state, rank=rank, device_bytes=size)
        for rank in range(spec.world_size)
        for state, size in by_shard[position(spec, rank, axes)]
    )


def elements(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> Elements:
    """What the rank with shard `index` stores."""
    match plan.wrap:
        case LocalGradients() | Replicate():
            size = facts.numel
            return Elements(
                parameters=size, gradients=size, updated=size, tensors=len(facts.tensors)
            )
        case FullyShard():
            return _fully_sharded(facts, ranks_over(spec, plan.wrap.shard_axes), index)
        case FlatUnits():
            return flat_elements(spec, plan.wrap, facts)
        case _:
            assert_never(plan.wrap)


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """The model's buffers (fp32, or fp64 with the rest), one step's tokens and targets, and the
    scalar in which a step adds up its loss."""
    scale = 2 if spec.precision.compute_fp64 else 1
    samples = spec.batch.accumulate * spec.batch.micro
    tokens = samples * (spec.batch.sequence + 1)
    buffers = sum(size for _, size in facts.buffers)
    return scale * (buffers + _LOSS_BYTES) + tokens * _TOKEN_BYTES


def _rows(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> tuple[tuple[State, int], ...]:
    layout = plan.update.layout
    held = elements(spec, plan, facts, index)
    return (
        (State.PARAMETERS, held.parameters * layout.parameters.itemsize),
        (State.OPTIMIZER, optimizer_bytes(spec.optimizer, layout, held.updated, held.tensors)),
        (State.GRADIENTS, held.gradients * layout.gradients.itemsize),
        (State.OTHER, other_bytes(spec, facts)),
    )


def _fully_sharded(facts: ModelFacts, ranks: int, index: int) -> Elements:
    """Rows of each tensor, padded to equal shards; gradients are views of the padded reduction."""
    shapes = Counter(tensor.shape for tensor in facts.tensors)
    stored = sum(times * padded_rows(shape, ranks) for shape, times in shapes.items())
    return Elements(
        parameters=stored,
        gradients=stored,
        updated=sum(times * local_rows(shape, ranks, index) for shape, times in shapes.items()),
        tensors=len(facts.tensors),
    )
