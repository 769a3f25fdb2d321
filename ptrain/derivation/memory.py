"""Resident bytes by state and rank, to the byte: the `exact` column of Theorem 1.

Parameters, optimizer state and the rest are read after the update, gradients at the end of the
last backward pass. Ranks differ only in the rows of a tensor that they really hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import assert_never

from ptrain.algebra.layout import positions, ranks_over
from ptrain.axes.data.costs import local_rows, padded_rows, spread
from ptrain.costs import Footprint, State
from ptrain.derivation.differing import differing_axes
from ptrain.derivation.flat_rows import flat_elements, flat_footprints
from ptrain.derivation.optimizer_state import (
    Elements,
    Kept,
    is_hidden,
    kept_tensors,
    needs_whole_tensors,
    optimizer_bytes,
)
from ptrain.facts.model import ModelFacts
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec
from ptrain.steps.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate

_TOKEN_BYTES = 8  # int64
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # of a scaled loss: its scale, the steps since it grew, whether it overflowed


def resident(spec: Spec, plan: Plan, facts: ModelFacts) -> tuple[Footprint, ...]:
    """Rows of parameters, optimizer state, gradients and the rest, rank by rank."""
    shards = by_shard(spec, plan, facts)
    return tuple(
        replace(row, rank=rank)
        for rank, index in enumerate(positions(spec, differing_axes(plan)))
        for row in shards[index]
    )


def by_shard(spec: Spec, plan: Plan, facts: ModelFacts) -> list[tuple[Footprint, ...]]:
    """The rows of a rank, by its place along `differing_axes`."""
    if isinstance(plan.wrap, FlatUnits):
        other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
        rows = (*flat_footprints(spec, plan, plan.wrap, facts), other)
        return [rows] * ranks_over(spec, differing_axes(plan))
    return [
        tuple(
            Footprint(state=state, rank=0, device_bytes=size)
            for state, size in _rows(spec, plan, facts, index)
        )
        for index in range(ranks_over(spec, differing_axes(plan)))
    ]


def elements(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> Elements:
    """What the rank with shard `index` stores."""
    match plan.wrap:
        case LocalGradients():
            return _whole(facts)
        case Replicate():
            whole = _whole(facts)
            if not plan.wrap.zero_redundancy:
                return whole
            return _spread(whole, owned(facts, ranks_over(spec, plan.wrap.axes))[index])
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
    scaling = _SCALING_BYTES if spec.precision.effective.scales_loss else 0
    return scale * (buffers + _LOSS_BYTES) + tokens * _TOKEN_BYTES + scaling


def owned(facts: ModelFacts, ranks: int) -> list[list[int]]:
    """Elements of the tensors that each rank updates, where whole tensors are spread over ranks."""
    numels = [tensor.numel for tensor in facts.tensors]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for numel, owner in zip(numels, spread(numels, ranks), strict=True):
        mine[owner].append(numel)
    return mine


def spread_buckets(layout: Layout, mine: list[list[int]]) -> list[int]:
    """Bytes of the bucket that each owner sends; one element of fp32 where it owns nothing."""
    return [sum(numels) * layout.parameters.itemsize or DType.FP32.itemsize for numels in mine]


def _rows(spec: Spec, plan: Plan, facts: ModelFacts, index: int) -> tuple[tuple[State, int], ...]:
    layout, wrap = plan.update.layout, plan.wrap
    held = elements(spec, plan, facts, index)
    parameters = held.parameters * layout.parameters.itemsize
    optimizer = _optimizer_bytes(spec, plan, facts, held)
    if isinstance(wrap, FullyShard) and wrap.materialized:  # the shards are the master copies
        assert layout.master is not None
        parameters, optimizer = 0, optimizer + held.parameters * layout.master.itemsize
    elif isinstance(wrap, Replicate) and wrap.zero_redundancy:
        parameters = sum(spread_buckets(layout, owned(facts, ranks_over(spec, wrap.axes))))
    return (
        (State.PARAMETERS, parameters),
        (State.OPTIMIZER, optimizer),
        (State.GRADIENTS, held.gradients * layout.gradients.itemsize),
        (State.OTHER, other_bytes(spec, facts)),
    )


def _optimizer_bytes(spec: Spec, plan: Plan, facts: ModelFacts, held: Elements) -> int:
    layout = plan.update.layout
    if isinstance(plan.wrap, FullyShard) and plan.wrap.materialized:
        layout = replace(layout, master=None)
    if not needs_whole_tensors(spec.optimizer):
        return optimizer_bytes(spec.optimizer, layout, held.updated, held.tensors)
    return sum(
        kept.dtype.itemsize * (1 if kept.is_scalar else tensor.numel)
        for unit in facts.units
        for tensor in unit.tensors
        for kept in (
            *kept_tensors(spec.optimizer, layout, is_hidden=is_hidden(unit, tensor)),
            *((Kept(dtype=layout.master),) if layout.master else ()),
        )
    )


def _whole(facts: ModelFacts) -> Elements:
    size = facts.numel
    return Elements(parameters=size, gradients=size, updated=size, tensors=len(facts.tensors))


def _spread(whole: Elements, mine: list[int]) -> Elements:
    return replace(whole, updated=sum(mine), tensors=len(mine))


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
