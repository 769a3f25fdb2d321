"""Optimizers on fake tensors: the memory that torch's optimizers allocate while they step.

A fused optimizer updates in place and allocates nothing. All others update one tensor after the
other and allocate temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from ptrain.facts.model import Operator
from ptrain.runtime.ghost import EventReceiver, Ghost, Storage
from ptrain.runtime.interface import OptimizerLeaf, Shape
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType

# as `optimizers.build.ITERATIONS`, which needs torch
_ITERATIONS = 5


class GhostLeaf:
    """A parameter of a fake optimizer with its value, gradient and state."""

    __slots__ = ("gradient", "state", "value")

    def __init__(self, value: Ghost) -> None:
        self.value = value
        self.gradient: Ghost | None = None
        self.state: dict[str, Ghost] = {}


class GhostFused:
    """An optimizer that updates in place and allocates nothing."""

    def __init__(
        self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], reader: EventReceiver
    ) -> None:
        self.rule, self.leaves, self.reader = rule, leaves, reader

    def step(self, lr: float, scalars: tuple[Ghost | None, Ghost] | None) -> None:
        """Report the update to the reader. No memory is allocated.

        Args:
            lr: The learning rate, which is not used.
            scalars: Loss scale and skip flag, which are not used.
        """
        _report_update(self.rule, self.leaves, self.reader)


class GhostByTensor(GhostFused):
    """An optimizer that updates one tensor after the other, with temporaries.

    `temporaries(value, is_scaled)` returns the highest number of temporary bytes that are live at
    once while a value is updated.
    """

    def __init__(
        self,
        rule: str,
        leaves: Sequence[OptimizerLeaf[Ghost]],
        reader: EventReceiver,
        temporaries: Callable[[Ghost, bool], int],
    ) -> None:
        super().__init__(rule, leaves, reader)
        self.temporaries = temporaries

    def step(self, lr: float, scalars: tuple[Ghost | None, Ghost] | None) -> None:
        """Report the update, and allocate and free the temporaries of each tensor on the device.

        Args:
            lr: The learning rate, which is not used.
            scalars: Loss scale and skip flag. Some rules need more temporary bytes with them than
                with None.
        """
        super().step(lr, scalars)
        for leaf in self.leaves:
            if leaf.gradient is not None and leaf.value.tier is Tier.DEVICE:
                size = self.temporaries(leaf.value, scalars is not None)
                self.reader.record_allocation(size, Tier.DEVICE)
                self.reader.record_allocation(-size, Tier.DEVICE)


class GhostScale:
    """The scale and the skip flag of a scaled loss, as resident scalars of no bytes.

    The wrap accounts for their copies between tiers.
    """

    def __init__(self, reader: EventReceiver) -> None:
        self._scalar = Ghost(Storage(0, Tier.DEVICE, None, "", reader), DType.FP32, ())

    def scalars_for(self, tensor: Ghost) -> tuple[Ghost, Ghost]:
        """Return scale and skip flag for the device of `tensor`."""
        return self._scalar, self._scalar


class GhostOptimizerFactory:
    """The factory of fake optimizers by rule, for CPUs or GPUs."""

    def __init__(self, reader: EventReceiver, *, is_cpu: bool = True) -> None:
        self.reader, self.is_cpu = reader, is_cpu

    def create_leaf(self, like: Ghost, dtype: DType) -> GhostLeaf:
        return GhostLeaf(Ghost(Storage(0, like.tier, None, "", self.reader), dtype, (0,)))

    def wrap_leaf(self, tensor: Ghost) -> GhostLeaf:
        return GhostLeaf(tensor)

    def create_optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], spec: OptimizerSpec
    ) -> GhostFused:
        if (temporaries := self._temporary_bytes(rule, leaves, spec)) is None:
            return GhostFused(rule, leaves, self.reader)
        return GhostByTensor(rule, leaves, self.reader, temporaries)

    def _temporary_bytes(
        self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], spec: OptimizerSpec
    ) -> Callable[[Ghost, bool], int] | None:
        """Return the function that counts a rule's temporary bytes, None for an update in place."""
        row = OPTIMIZERS[rule]
        if row.factors:
            return lambda value, _: adafactor_temporaries(value.shape) * value.dtype.itemsize
        if not row.is_elementwise:
            return lambda value, is_scaled: muon_temporaries(
                value.shape, value.dtype, scaled=is_scaled
            )
        if row.temporaries:
            return lambda value, _: row.temporaries * value.nbytes
        numbers = row.numbers_in_16_bits if self.is_cpu else None
        if numbers and any(leaf.value.dtype.itemsize == 2 for leaf in leaves):
            return lambda *_: numbers[bool(spec.momentum)] * DType.FP32.itemsize
        return None


def _report_update(
    rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], reader: EventReceiver
) -> None:
    """Report the updated shapes to the reader; all leaves of an optimizer are on one tier."""
    if values := [leaf.value for leaf in leaves if leaf.gradient is not None]:
        shapes = [value.shape for value in values]
        reader.record_update(rule, values[0].dtype, values[0].tier, shapes)


def muon_temporaries(shape: tuple[int, ...], updated: DType, *, scaled: bool) -> int:
    """Return the peak of live bytes within Muon's update of one matrix.

    The matrix, its gradient and its momentum are not included.

    Args:
        shape: Rows and columns of the matrix.
        updated: Dtype of the matrix.
        scaled: The loss has a scale: the gradient is divided by it, and both outcomes are computed.
    """
    return max(accumulate(_newton_schulz(shape, updated, scaled=scaled)))


def _newton_schulz(shape: tuple[int, ...], updated: DType, *, scaled: bool) -> Iterator[int]:
    """Yield the changes of live bytes within Muon's update, in order: negative for freed bytes."""
    rows, columns = shape
    iterated = DType.FP64 if updated is DType.FP64 else DType.BF16
    whole, matrix = rows * columns * updated.itemsize, rows * columns * iterated.itemsize
    gram = min(rows, columns) ** 2 * iterated.itemsize
    if scaled:
        yield 3 * whole  # the unscaled gradient, the next momentum and the next matrix
    yield whole  # the Nesterov interpolation of gradient and momentum
    cast = matrix if iterated is not updated else 0
    yield cast
    yield from (2 * iterated.itemsize, -2 * iterated.itemsize)  # the norm, and its lower bound
    yield iterated.itemsize
    yield matrix  # the matrix divided by its norm
    yield -cast - iterated.itemsize
    for iteration in range(_ITERATIONS):
        yield gram
        if iteration:
            yield -gram  # the Gram matrix of the previous iteration
        # the polynomial of the Gram matrix, and the next matrix
        yield from (gram + matrix, -gram - matrix)
    yield -gram - whole
    if scaled:
        yield 1  # the skip flag
        yield from (whole, -whole)


def adafactor_temporaries(shape: Shape) -> int:
    """Return the most elements of temporaries that torch's Adafactor has at once for a tensor.

    `_single_tensor_adafactor` (torch/optim/_adafactor.py, 2.13) keeps its variables until it
    returns. Of a matrix: the means of squared rows and columns, the estimate of the variance, which
    becomes the update, and a mean of `row_var` or the update's norm. Of a vector: the squared
    gradient, the estimate, and the update's norm.

    Args:
        shape: The tensor's shape. Of more than two dimensions, the last two are factored.
    """
    whole = math.prod(shape)
    if len(shape) < 2:
        return 2 * whole + 1
    matrices = math.prod(shape[:-2])
    return matrices * (shape[-2] + shape[-1]) + whole + max(matrices, 1)


def update_operators(rule: str, shape: Shape, updated: DType) -> Iterator[Operator]:
    """Return the operators of an update that is not elementwise, in order.

    Args:
        rule: The optimizer: Muon, or one with factored moments.
        shape: The tensor's shape; a matrix's for Muon.
        updated: Dtype of the tensor.
    """
    if not OPTIMIZERS[rule].factors:
        return muon_operators(shape, updated)
    return adafactor_operators(shape, updated)


def adafactor_operators(shape: Shape, updated: DType) -> Iterator[Operator]:
    """Yield the operators of torch's Adafactor on one tensor with the size of the tensor.

    Args:
        shape: The tensor's shape.
        updated: Dtype of the tensor.
    """
    whole = math.prod(shape) * updated.itemsize
    yield Operator(OperatorKind.NORM, updated, (whole,))
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,))  # weight decay
    if len(shape) > 1:
        yield Operator(OperatorKind.NORM, updated, (whole,), 2)  # of rows and of columns
        sides = (math.prod(shape[:-2]), shape[-2], 1, shape[-1])
        yield Operator(OperatorKind.PRODUCT, updated, sides)
        yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,))  # divided by the mean
    else:
        yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,))  # the squared gradient
        yield Operator(OperatorKind.POINTWISE, updated, (3 * whole,))  # its average
        yield Operator(OperatorKind.COPY, updated, (2 * whole,))
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,), 2)  # bounded, and its root
    yield Operator(OperatorKind.POINTWISE, updated, (3 * whole,))  # times the gradient
    yield Operator(OperatorKind.NORM, updated, (whole,))
    yield Operator(OperatorKind.POINTWISE, updated, (3 * whole,))


def muon_operators(shape: Shape, updated: DType) -> Iterator[Operator]:
    """Yield the operators that Muon's update of one matrix runs, in order.

    The update is `optimizers.build.Muon`.

    Args:
        shape: Rows and columns of the matrix.
        updated: Dtype of the matrix. The iteration runs in bf16, or in fp64 for fp64.
    """
    rows, columns = sorted(shape)
    iterated = DType.FP64 if updated is DType.FP64 else DType.BF16
    whole, matrix = rows * columns * updated.itemsize, rows * columns * iterated.itemsize
    yield Operator(OperatorKind.POINTWISE, updated, (3 * whole,), 2)  # momentum and Nesterov step
    if iterated is not updated:
        yield Operator(OperatorKind.COPY, updated, (whole + matrix,))
    yield Operator(OperatorKind.NORM, iterated, (matrix,))
    yield Operator(OperatorKind.POINTWISE, iterated, (2 * matrix,))
    for factor, width in ((columns, rows), (rows, rows), (rows, columns)):
        yield Operator(OperatorKind.PRODUCT, iterated, (1, rows, factor, width), _ITERATIONS)
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,))  # weight decay
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole + matrix,))
