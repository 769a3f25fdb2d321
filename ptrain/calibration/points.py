"""How much is measured: shapes and sizes, on processors, on GPUs, and to see that it works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ptrain.spec.precision import DType

KIB, MIB = 2**10, 2**20
_MORE = 4  # times as many operations as of all combinations
_TINY = (1, 8, 8, 8)  # a dispatch, and next to nothing else

ProductShape = tuple[int, int, int, int]
AttentionShape = tuple[int, int, int, int]  # samples, heads, tokens, features of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Products with all combinations of `sides` of up to so many operations, by dtype, and `also`
    some; attention; bytes of operators, collectives and copies; (elements, tensors) of updates.
    `units`: wrapped units of the modules on which hooks are measured, `rounds` times; `late`:
    passes of a layer ahead of a collective."""

    sides: dict[DType, tuple[int, ...]]
    flops: dict[DType, float]
    also: tuple[ProductShape, ...]
    attention: tuple[AttentionShape, ...]
    sizes: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    copied: tuple[int, ...]
    most_of_others: int = 2**40  # bytes, in other dtypes than the first
    units: int = 8
    rounds: int = 9
    late: tuple[int, ...] = (1, 4, 16)

    def operator_sizes(self) -> list[tuple[int, DType]]:
        """Return the bytes of operators by dtype, smallest first."""
        first = next(iter(self.sides))
        return [
            (size, dtype)
            for size in self.sizes
            for dtype in self.sides
            if dtype is first or size <= self.most_of_others
        ]

    def products(self) -> list[tuple[DType, ProductShape]]:
        """Return the shapes, smallest first: what is left out for want of time is large."""
        shapes = [(dtype, shape) for dtype in self.sides for shape in self._of_dtype(dtype)]
        return sorted(shapes, key=lambda known: operations(known[1]))

    def _of_dtype(self, dtype: DType) -> Iterator[ProductShape]:
        sides = self.sides[dtype]
        yield _TINY
        for shape in product(sides, sides, sides):
            if 2 * shape[0] * shape[1] * shape[2] <= self.flops[dtype]:
                yield (1, *shape)
        yield from (shape for shape in self.also if operations(shape) <= _MORE * self.flops[dtype])


def factors_of(shape: ProductShape) -> int:
    """Numbers in both factors of a product."""
    matrices, rows, inner, columns = shape
    return matrices * (rows * inner + inner * columns)


def operations(shape: ProductShape) -> int:
    """Floating-point operations of a product."""
    matrices, rows, inner, columns = shape
    return 2 * matrices * rows * inner * columns


# Of the dtypes of `rates.measured.CALIBRATED`.
PROCESSORS = Points(
    sides={DType.FP32: (64, 128, 256, 512, 960, 1920), DType.BF16: (64, 256, 1024)},
    flops={DType.FP32: 5.4e8, DType.BF16: 1.4e8},
    also=(
        (1, 1024, 1024, 1024),
        (1, 512, 512, 4096),
        (1, 4096, 512, 512),
        (1, 512, 4096, 512),
        (1, 512, 256, 8192),
        (1, 8192, 512, 256),
        (16, 64, 32, 64),
        (16, 256, 32, 256),
        (16, 256, 256, 32),
        (64, 128, 64, 128),
    ),
    attention=(
        (16, 2, 32, 16),
        (4, 4, 64, 32),
        (2, 4, 128, 32),
        (2, 8, 128, 64),
        (4, 4, 256, 32),
        (2, 8, 256, 64),
        (1, 8, 1024, 64),
    ),
    sizes=(256, 4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 24 * MIB, 40 * MIB),
    updates=((64, 1), (16_384, 1), (10**6, 1), (4096, 64), (10**6, 64), (8 * 10**6, 8)),
    sent=(64, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    copied=(64, 64 * KIB, 8 * MIB),
    most_of_others=4 * MIB,
)
GPUS = Points(
    sides=dict.fromkeys((DType.BF16, DType.FP32), (256, 1024, 4096, 16384)),
    flops={DType.FP32: 3e11, DType.BF16: 2.2e12},
    also=(
        (128, 1024, 64, 1024),
        (128, 1024, 1024, 64),
        (32, 4096, 128, 4096),
        (1, 8192, 1024, 50_257),
        (1, 8192, 50_257, 1024),
        (1, 64, 4096, 16_384),
    ),
    attention=((8, 12, 1024, 64), (1, 32, 4096, 128), (1, 32, 8192, 128), (16, 8, 256, 64)),
    sizes=(KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
    updates=((1024, 1), (10**6, 1), (16 * 10**6, 1), (10**6, 256), (256 * 10**6, 64)),
    sent=(KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    copied=(64 * KIB, 4 * MIB, 256 * MIB),
)
BRIEF = Points(
    sides={DType.FP32: (16, 64)},
    flops={DType.FP32: 1e6},
    also=((4, 16, 16, 16),),
    attention=((2, 2, 16, 16),),
    sizes=(256, 64 * KIB),
    updates=((64, 1), (4096, 8)),
    sent=(64, 64 * KIB),
    copied=(4 * KIB,),
    units=2,
    rounds=3,
    late=(1,),
)
