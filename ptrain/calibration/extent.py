"""How much is measured: shapes and sizes, on processors, on GPUs, and to see that it works."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from ptrain.spec.precision import DType

KIB, MIB = 2**10, 2**20
_TINY = (1, 8, 8, 8)  # a dispatch, and next to nothing else

ProductShape = tuple[int, int, int, int]
AttentionShape = tuple[int, int, int, int]  # samples, heads, tokens, features of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Products of all sides in `sides` up to so many operations, by dtype, and `batched` ones;
    attention; bytes of operators, collectives and copies; (elements, tensors) of updates. `units`:
    wrapped units of the modules on which hooks are measured."""

    sides: tuple[int, ...]
    flops: dict[DType, float]
    batched: tuple[ProductShape, ...]
    attention: tuple[AttentionShape, ...]
    sizes: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    copied: tuple[int, ...]
    units: int = 8
    rounds: int = 9
    also: tuple[ProductShape, ...] = field(default=())

    def products(self, dtype: DType) -> list[ProductShape]:
        """Return the shapes, smallest first: what is left out for want of time is large."""
        sides = self.sides
        plain: list[ProductShape] = [(1, *shape) for shape in product(sides, sides, sides)]
        shapes = [_TINY, *plain, *self.batched, *self.also]
        most = self.flops[dtype]
        fitting = [shape for shape in shapes if operations(shape) <= most]
        return sorted(fitting, key=operations)


def operations(shape: ProductShape) -> int:
    """Floating-point operations of a product."""
    matrices, rows, inner, columns = shape
    return 2 * matrices * rows * inner * columns


PROCESSORS = Extent(
    sides=(64, 256, 1024, 4096),
    flops={DType.FP32: 2.2e9, DType.BF16: 2e8},
    batched=((16, 64, 32, 64), (16, 256, 32, 256), (16, 256, 256, 32), (64, 128, 64, 128)),
    attention=((4, 4, 64, 32), (4, 4, 256, 32), (2, 8, 256, 64), (1, 8, 1024, 64), (16, 2, 32, 16)),
    sizes=(256, 4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB),
    updates=((64, 1), (16_384, 1), (10**6, 1), (4096, 64), (10**6, 64), (8 * 10**6, 8)),
    sent=(64, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    copied=(64, 64 * KIB, 8 * MIB),
)
GPUS = Extent(
    sides=(256, 1024, 4096, 16_384),
    flops={DType.FP32: 3e11, DType.BF16: 2.2e12},
    batched=((128, 1024, 64, 1024), (128, 1024, 1024, 64), (32, 4096, 128, 4096)),
    also=((1, 8192, 1024, 50_257), (1, 8192, 50_257, 1024), (1, 64, 4096, 16_384)),
    attention=((8, 12, 1024, 64), (1, 32, 4096, 128), (1, 32, 8192, 128), (16, 8, 256, 64)),
    sizes=(KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
    updates=((1024, 1), (10**6, 1), (16 * 10**6, 1), (10**6, 256), (256 * 10**6, 64)),
    sent=(KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    copied=(64 * KIB, 4 * MIB, 256 * MIB),
)
BRIEF = Extent(
    sides=(16, 64),
    flops={DType.FP32: 1e6},
    batched=((4, 16, 16, 16),),
    attention=((2, 2, 16, 16),),
    sizes=(256, 64 * KIB),
    updates=((64, 1), (4096, 8)),
    sent=(64, 64 * KIB),
    copied=(4 * KIB,),
    units=2,
    rounds=3,
)
