"""Memory that fused attention keeps on GPUs in addition to its output.

A GPU kernel keeps the statistics that a CPU kernel keeps (one fp32 for each row, batch and head),
but pads their rows to a multiple. It also keeps the seed and the offset of its dropout, used or
not. The kernel depends on the compute capability of the GPU, the dtype, head_dim and the torch
version. `traces.attention_kernels` determines it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ptrain.derivation import archive
from ptrain.derivation.archive import TablePart
from ptrain.installed import counted_torch
from ptrain.spec.model import Attention, ExternalModel, ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.units import ceil_div
from ptrain.version import REFERENCE_TORCH

HEAD_DIM_MULTIPLE = 8  # kernels support only multiples of it


class Statistics(NamedTuple):
    """The statistics that an attention kernel keeps for the backward pass.

    Attributes:
        sequence: Tokens of a sample.
        rows: Multiple to which the kernel pads the tokens.
        beside: Additional bytes, for the seed and the offset of dropout.
    """

    sequence: int
    rows: int
    beside: int

    def of(self, size: int) -> int:
        """Return the bytes that replace the `size` bytes of a CPU kernel."""
        padded = ceil_div(self.sequence, self.rows) * self.rows
        return size // self.sequence * padded + self.beside


class FusedAttention(NamedTuple):
    """A call of `scaled_dot_product_attention`, with the properties that select its kernel.

    `is_grouped` is True if keys have fewer heads than queries.
    """

    dtype: DType
    head_dim: int
    sequence: int
    drops: bool
    is_grouped: bool = False

    def kernel(self, sm: int | None) -> str | None:
        """Return the kernel that torch selects on GPUs of compute capability `sm`.

        Returns:
            The kernel's name. None if torch selects no kernel, or the table does not have `sm`.
        """
        by_row = _choice(counted_torch()).get(str(sm), {})
        rows = by_row.get(row_name(self.dtype, drops=self.drops), [])
        if self.head_dim % HEAD_DIM_MULTIPLE or self.sequence == 1:
            return None
        refused = _kernels_without_groups(counted_torch()) if self.is_grouped else ()
        for first, last, kernel in rows:
            is_refused = kernel in refused
            if first <= self.head_dim <= last and not is_refused:
                return str(kernel)
        return None

    def statistics(self, sm: int | None) -> Statistics | None:
        """Return the statistics that the kernel keeps, or None if there is no known kernel."""
        if (kernel := self.kernel(sm)) is None:
            return None
        return Statistics(self.sequence, *_read_table("kernels")[kernel])

    def goes_by_operators(self, sm: int | None) -> bool:
        """Return True if torch is known to run separate operators, although a kernel supports
        head_dim.

        The head_dim is then a multiple that kernels accept, so that nothing is padded.
        """
        is_known = sm in capabilities() and self.sequence > 1
        return is_known and self.head_dim % HEAD_DIM_MULTIPLE == 0 and self.kernel(sm) is None

    def has_kernel(self, sm: int | None) -> bool:
        """Return True if torch selects a kernel on GPUs of compute capability `sm`.

        If the table does not have `sm`, return True if any of its capabilities has a kernel.
        """
        of_these = (sm,) if sm in capabilities() else capabilities()
        return any(self.kernel(capability) is not None for capability in of_these)


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities of the table, ascending."""
    return tuple(map(int, _choice(counted_torch())))


def _read_table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = archive.read(TablePart.KERNEL, "attention", name)
    return table


@cache
def _choice(torch: str) -> dict[str, dict[str, list[list[Any]]]]:
    """Return the kernels of this torch version, by compute capability.

    Versions without a table use the table of the reference version.
    """
    versions = _read_table("choice")
    choice: dict[str, dict[str, list[list[Any]]]]
    choice = versions.get(torch, versions[REFERENCE_TORCH])
    return choice


@cache
def _kernels_without_groups(torch: str) -> tuple[str, ...]:
    """Return the kernels that this torch version does not use if keys have fewer heads than
    queries.

    torch runs separate operators instead (`sdp_utils.cpp`). Up to 2.13 this is efficient attention.
    """
    versions = _read_table("ungrouped")
    kernels: list[str] = versions.get(torch, versions[REFERENCE_TORCH])
    return tuple(kernels)


def most_rows() -> int:
    """Return the largest multiple to which any kernel pads its rows."""
    return max(int(rows) for rows, _ in _read_table("kernels").values())


def row_name(dtype: DType, *, drops: bool) -> str:
    """Return the name of a table row for a dtype, with or without dropout."""
    return f"{dtype}-dropout" if drops else str(dtype)


def attention_of(spec: Spec) -> FusedAttention | None:
    """Return the attention call of a built-in model's blocks on a spec's GPUs.

    Returns:
        The call. None without GPUs, for other models, and for models without fused attention.
    """
    shape = spec.model
    if not spec.is_for_cuda or not isinstance(shape, ModelShape) or not shape.is_fused:
        return None
    return FusedAttention(
        dtype=spec.precision.effective_layout.parameters,
        head_dim=shape.head_dim,
        sequence=spec.batch.sequence,
        drops=shape.dropouts.attention > 0,
    )


def capability(spec: Spec) -> int | None:
    """Return the compute capability whose kernels are counted.

    Returns:
        The compute capability of the spec's GPUs. None if it is unknown, if the table does not have
        it, or if activations leave the device. In the last case, the dropout state of attention
        stays on the device in a separate storage, which no table has.
    """
    return None if leaves_device(spec) or spec.sm not in capabilities() else spec.sm


def is_by_operators(spec: Spec) -> bool:
    """Return True if a built-in model's attention is known to run as separate operators on the
    GPUs.

    The scores are then in memory. Attention with dropout is unknown and gives False.
    """
    attention = attention_of(spec)
    if attention is None or attention.drops:
        return False
    return attention.goes_by_operators(capability(spec))


def may_be_fused(spec: Spec) -> bool:
    """Return True if attention may run as one fused kernel.

    Custom models, and classes that can choose between implementations, may use a kernel.
    """
    model = spec.model
    if isinstance(model, ModelShape):
        return model.is_fused
    return isinstance(model, ExternalModel) or model.attention in (None, Attention.SDPA)


def leaves_device(spec: Spec) -> bool:
    """Return True if the activations of any block leave the device."""
    return any(kept.tier is not Tier.DEVICE for kept in spec.activations.modes)


def statistics_of(spec: Spec, tokens: int) -> Statistics | None:
    """Return the statistics that a built-in model's attention of `tokens` tokens keeps on a spec's
    GPUs.

    Returns:
        The statistics. None if the size is that of a CPU kernel or unknown.
    """
    if (attention := attention_of(spec)) is None:
        return None
    return attention._replace(sequence=tokens).statistics(capability(spec))
