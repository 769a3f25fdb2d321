"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import assert_never

from ptrain.algebra.layout import position, ranks_over
from ptrain.axes.data.costs import local_rows, padded_flat, padded_rows
from ptrain.axes.data.rules import keeps_state
from ptrain.costs import Footprint, State
from ptrain.derivation.facts import ModelFacts
from ptrain.plan.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate
from ptrain.spec.axis import Axis
from ptrain.spec.precision import Layout
from ptrain.spec.spec import OptimizerSpec, Spec

_STEP_BYTES = 4  # AdamW counts its steps in one fp32 scalar per tensor
_TOKEN_BYTES = 8  # int64
_LOSS_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """What one rank stores: parameter and gradient elements, elements that the optimizer updates
    (padding that no parameter has is not among them), and in how many tensors."""

    parameters: int
    gradients: int
    updated: int
    tensors: int


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
            return _flat(spec, plan.wrap, facts)
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


def optimizer_bytes(optimizer: OptimizerSpec, layout: Layout, numel: int, tensors: int) -> int:
    """Master copies, moments and step counters of `numel` updated elements in `tensors`."""
    counters = _STEP_BYTES * tensors if optimizer.name == "adamw" else 0
    return numel * optimizer_itemsize(optimizer, layout) + counters


def optimizer_itemsize(optimizer: OptimizerSpec, layout: Layout) -> int:
    """Bytes of optimizer state per updated element: 12 for AdamW with a master copy in fp32."""
    moments = (1 if optimizer.name == "sgd" else 2) if keeps_state(optimizer) else 0
    master = layout.master.itemsize if layout.master else 0
    return master + moments * layout.moments.itemsize


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


def _flat(spec: Spec, wrap: FlatUnits, facts: ModelFacts) -> Elements:
    """One padded buffer per unit, cut alike for all ranks."""
    buffers = flat_buffers(spec, wrap, facts)
    total = sum(times * padded for padded, times in buffers.items())
    return Elements(
        parameters=total // ranks_over(spec, wrap.parameters),
        gradients=total // ranks_over(spec, wrap.gradients),
        updated=total // ranks_over(spec, wrap.optimizer),
        tensors=sum(buffers.values()),
    )


def flat_buffers(spec: Spec, wrap: FlatUnits, facts: ModelFacts) -> Counter[int]:
    """Elements of the units' flat buffers, padded for all the axes that cut any state."""
    ranks = ranks_over(spec, cut_axes(wrap))
    return Counter(padded_flat(unit.numel, ranks) for unit in facts.units if unit.numel)


def cut_axes(wrap: FlatUnits) -> tuple[Axis, ...]:
    """The axes along which any state is a shard, in mesh order."""
    cut = {*wrap.parameters, *wrap.optimizer, *wrap.gradients}
    return tuple(axis for axis in wrap.axes if axis in cut)
