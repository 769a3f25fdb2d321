"""What attention keeps on GPUs beside its output: the rows of a CPU's kernel, one fp32 a row, batch
and head, are there too, up to a multiple of rows, and beside them seed and offset of its dropout,
used or not. Which kernel runs depends on the GPU's compute capability, the dtype and head_dim
(`traces.attention_kernels` asks torch; no GPU has confirmed it).
"""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div

# Torch goes operator by operator where it is given fewer heads of keys (`sdp_utils.cpp`).
_NOT_GROUPED = ("efficient",)
MULTIPLE = 8  # of head_dim: kernels take no other


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a kernel keeps: statistics of a multiple of `rows`, of `sequence` tokens, and `beside`
    so many bytes."""

    sequence: int
    rows: int
    beside: int

    def of(self, size: int) -> int:
        """Return the bytes in place of a CPU's `size`."""
        padded = ceil_div(self.sequence, self.rows) * self.rows
        return size // self.sequence * padded + self.beside


def row_name(dtype: DType, *, drops: bool) -> str:
    """Return the name of a row of the table."""
    return f"{dtype}-dropout" if drops else str(dtype)


def statistics(
    sm: int | None,
    dtype: DType,
    head_dim: int,
    sequence: int,
    *,
    drops: bool,
    is_grouped: bool = False,
) -> Statistics | None:
    """Return what the kernel keeps that torch takes on GPUs of this compute capability; None where
    nobody asked it. `is_grouped`: it is given fewer heads of keys than of queries."""
    table = archive.table(TablePart.KERNEL, "attention")
    rows = table["choice"].get(str(sm), {}).get(row_name(dtype, drops=drops), [])
    if head_dim % MULTIPLE or sequence == 1:
        return None
    for first, last, kernel in rows:
        if first <= head_dim <= last and not (is_grouped and kernel in _NOT_GROUPED):
            return Statistics(sequence, *table["kernels"][kernel])
    return None


def statistics_of(spec: Spec) -> Statistics | None:
    """Return what a built-in model's attention keeps on a spec's GPUs; None where they are a CPU's
    or nobody asked."""
    shape = spec.model
    if not spec.is_for_cuda or not isinstance(shape, ModelShape):
        return None
    if shape.attention is not Attention.SDPA:
        return None
    return statistics(
        spec.cluster.sm if spec.cluster else None,
        spec.precision.effective.parameters,
        shape.head_dim,
        spec.batch.sequence,
        drops=shape.dropout > 0,
    )
