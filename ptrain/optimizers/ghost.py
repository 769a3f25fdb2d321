"""torch's optimizers on ghosts: what they allocate while they step.

A fused one updates in place, with nothing beside it. Others have temporaries: they work through
their tensors one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from ptrain.facts.model import Operator
from ptrain.rooms.ghost import Ghost, Reader, Storage
from ptrain.rooms.room import OptimizerLeaf, Shape
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind

_ITERATIONS = 5


class GhostLeaf:
    """What an optimizer of ghosts knows a tensor by."""

    __slots__ = ("gradient", "state", "value")

    def __init__(self, value: Ghost) -> None:
        self.value = value
        self.gradient: Ghost | None = None
        self.state: dict[str, Ghost] = {}


class GhostFused:
    """An update in place, which allocates nothing."""

    def __init__(self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], reader: Reader) -> None:
        self.rule, self.leaves, self.reader = rule, leaves, reader

    def step(self, lr: float, scalars: tuple[Ghost | None, Ghost] | None) -> None:
        """Values change, sizes do not."""
        _tell(self.rule, self.leaves, self.reader)


class GhostByTensor(GhostFused):
    """An update of a tensor after the other; `temporaries`: bytes that one has beside it at once,
    of a scaled loss or not."""

    def __init__(
        self,
        rule: str,
        leaves: Sequence[OptimizerLeaf[Ghost]],
        reader: Reader,
        temporaries: Callable[[Ghost, bool], int],
    ) -> None:
        super().__init__(rule, leaves, reader)
        self.temporaries = temporaries

    def step(self, lr: float, scalars: tuple[Ghost | None, Ghost] | None) -> None:
        super().step(lr, scalars)
        for leaf in self.leaves:
            if leaf.gradient is not None and leaf.value.tier is Tier.DEVICE:
                size = self.temporaries(leaf.value, scalars is not None)
                self.reader.allocated(size, Tier.DEVICE)
                self.reader.allocated(-size, Tier.DEVICE)


class GhostScale:
    """A loss's scale, beside what is updated: scalars of its own, which are there always; their
    copies between tiers are the wrap's."""

    def __init__(self, reader: Reader) -> None:
        self._scalar = Ghost(Storage(0, Tier.DEVICE, None, "", reader), DType.FP32, ())

    def beside(self, tensor: Ghost) -> tuple[Ghost, Ghost]:
        return self._scalar, self._scalar


class GhostRules:
    """By name, as `optimizers.build` knows them, on a processor or on GPUs."""

    def __init__(self, reader: Reader, *, is_cpu: bool = True) -> None:
        self.reader, self.is_cpu = reader, is_cpu

    def leaf(self, like: Ghost, dtype: DType) -> GhostLeaf:
        return GhostLeaf(Ghost(Storage(0, like.tier, None, "", self.reader), dtype, (0,)))

    def leaf_of(self, tensor: Ghost) -> GhostLeaf:
        return GhostLeaf(tensor)

    def optimizer(
        self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], spec: OptimizerSpec
    ) -> GhostFused:
        if (temporaries := self._temporaries(rule, leaves, spec)) is None:
            return GhostFused(rule, leaves, self.reader)
        return GhostByTensor(rule, leaves, self.reader, temporaries)

    def _temporaries(
        self, rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], spec: OptimizerSpec
    ) -> Callable[[Ghost, bool], int] | None:
        row = OPTIMIZERS[rule]
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


def _tell(rule: str, leaves: Sequence[OptimizerLeaf[Ghost]], reader: Reader) -> None:
    """The reader hears what is updated, which is all on one tier."""
    if values := [leaf.value for leaf in leaves if leaf.gradient is not None]:
        shapes = [value.shape for value in values]
        reader.updated(rule, values[0].dtype, values[0].tier, shapes)


def muon_temporaries(shape: tuple[int, ...], updated: DType, *, scaled: bool) -> int:
    """Bytes that are alive at once at most, beside the matrix, its gradient and its momentum: the
    Newton-Schulz iteration's operators, one after the other. `scaled`: of a scaled loss, where the
    gradient is divided and both outcomes are computed."""
    return max(accumulate(_newton_schulz(shape, updated, scaled=scaled)))


def _newton_schulz(shape: tuple[int, ...], updated: DType, *, scaled: bool) -> Iterator[int]:
    """Bytes that come and (negative) go, in order."""
    rows, columns = shape
    iterated = DType.FP64 if updated is DType.FP64 else DType.BF16
    whole, matrix = rows * columns * updated.itemsize, rows * columns * iterated.itemsize
    gram = min(rows, columns) ** 2 * iterated.itemsize
    if scaled:
        yield 3 * whole  # the gradient without its scale, the momentum and the matrix ahead
    yield whole  # the gradient ahead of its momentum
    cast = matrix if iterated is not updated else 0
    yield cast
    yield from (2 * iterated.itemsize, -2 * iterated.itemsize)  # the norm, and its lower bound
    yield iterated.itemsize
    yield matrix  # of norm 1
    yield -cast - iterated.itemsize
    for iteration in range(_ITERATIONS):
        yield gram
        if iteration:
            yield -gram  # the one before
        yield from (gram + matrix, -gram - matrix)  # its polynomial, and the next matrix
    yield -gram - whole
    if scaled:
        yield 1  # whether it is skipped
        yield from (whole, -whole)


def muon_operators(shape: Shape, updated: DType) -> Iterator[Operator]:
    """Yield what Muon computes of a matrix, in its order (`optimizers.muon`)."""
    rows, columns = sorted(shape)
    iterated = DType.FP64 if updated is DType.FP64 else DType.BF16
    whole, matrix = rows * columns * updated.itemsize, rows * columns * iterated.itemsize
    yield Operator(OperatorKind.POINTWISE, updated, (3 * whole,), 2)  # both momenta
    if iterated is not updated:
        yield Operator(OperatorKind.COPY, updated, (whole + matrix,))
    yield Operator(OperatorKind.NORM, iterated, (matrix,))
    yield Operator(OperatorKind.POINTWISE, iterated, (2 * matrix,))
    for factor, width in ((columns, rows), (rows, rows), (rows, columns)):
        yield Operator(OperatorKind.PRODUCT, iterated, (1, rows, factor, width), _ITERATIONS)
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole,))  # the decay
    yield Operator(OperatorKind.POINTWISE, updated, (2 * whole + matrix,))
