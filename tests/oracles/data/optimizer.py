"""The state that an optimizer keeps for a tensor, and the temporaries of its update.

AdamW keeps two moments and counts its steps in one fp32 scalar per tensor; SGD keeps one moment if
it has momentum; Muon one of a hidden matrix, and is AdamW for all others (torch.optim.*, the
docstrings' algorithms).
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import DType, Layout
from ptrain.spec.spec import Spec
from ptrain.steps.step import LONG_NORM, Plan
from tests.oracles.data.chain import ChainUnit, NoClosedForm, UnitChain

COUNTER_BYTES = 4


def is_by_tensor(optimizer: OptimizerSpec) -> bool:
    """Return True if the update needs full tensors, as Muon's orthogonalization does."""
    return not optimizer.properties.is_elementwise


def num_moments(optimizer: OptimizerSpec, *, is_hidden: bool = False) -> int:
    """Return the number of state tensors as large as the parameter, without master copies."""
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 1 if is_by_tensor(optimizer) and is_hidden else 2


def has_counter(optimizer: OptimizerSpec, *, is_hidden: bool = False) -> bool:
    """Return True if the steps of a tensor are counted, as AdamW does and Muon for tensors that are
    not hidden."""
    return optimizer.name != "sgd" and not (is_by_tensor(optimizer) and is_hidden)


def num_casts(optimizer: OptimizerSpec, layout: Layout, *, is_hidden: bool = False) -> int:
    """Return the number of tensors that the update of one tensor casts to its compute dtype."""
    moments = 0
    if layout.moments is not layout.update_dtype:
        moments = num_moments(optimizer, is_hidden=is_hidden)
    return moments + (layout.gradients is not layout.update_dtype)


def orthogonalization(shape: tuple[int, ...], layout: Layout) -> int:
    """Bytes that Muon's Newton-Schulz iteration has at once for a matrix of `shape`.

    The gradient ahead of its momentum in the updated dtype, and in bf16 (fp64 where that is
    updated) the matrix X and its successor, the gram X X^T of its smaller side and a polynomial of
    it. Of a scaled loss the unscaled gradient and both outcomes stand beside them.
    """
    rows, columns = shape
    iterated = DType.FP64 if layout.update_dtype is DType.FP64 else DType.BF16
    whole = rows * columns * layout.update_dtype.itemsize
    iterate = (rows * columns + min(rows, columns) ** 2) * iterated.itemsize
    return whole * (4 if layout.scales_loss else 1) + 2 * iterate


def norm(spec: Spec, plan: Plan, chain: UnitChain, tensors: int) -> tuple[int, int]:
    """(bytes at once, bytes that stay until the step is over) of the norm of so many gradients:
    a scalar each and all of them stacked, or these and their norm. Without it a scaled loss's scale
    of 1, with which overflows are asked for."""
    if plan.clip is None:
        return COUNTER_BYTES * plan.update.layout.scales_loss, 0
    if plan.clip.operator_axes:
        raise NoClosedForm("clip within tp: norms of runs of tensors that are cut and of others")
    if not spec.is_for_cuda and chain.numel > LONG_NORM:
        raise NoClosedForm("clip of tensors that a processor adds up row by row")
    scalar = max(4, plan.update.layout.gradients.itemsize)
    return max(2 * tensors, tensors + 1) * scalar, scalar


def scalars(spec: Spec, layout: Layout) -> int:
    """Return the scalar bytes of an update: for SGD in 16 bits on a CPU, ptrain's kernel has a step
    flag in fp32 and the momentum factors."""
    is_own = spec.optimizer.name == "sgd" and layout.update_dtype.itemsize == 2
    count = 3 if spec.optimizer.momentum else 1
    return COUNTER_BYTES * count if is_own and not spec.is_for_cuda else 0


def update_casts(spec: Spec, layout: Layout, unit: ChainUnit, numels: Sequence[int]) -> int:
    """Return the bytes of the casts and scalars of an in-place update of tensors with `numels`
    elements each."""
    optimizer = spec.optimizer
    casts = sum(
        numel * num_casts(optimizer, layout, is_hidden=unit.is_hidden(shape))
        for numel, shape in zip(numels, unit.shapes, strict=True)
    )
    matrices = [shape for shape in unit.shapes if unit.is_hidden(shape)]
    if not is_by_tensor(optimizer):
        matrices = []
    largest = max((orthogonalization(shape, layout) for shape in matrices), default=0)
    return casts * layout.update_dtype.itemsize + max(largest, scalars(spec, layout))
