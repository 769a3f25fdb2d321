"""What attention keeps on GPUs beside its output: the rows of a CPU's kernel, one fp32 a row, batch
and head, are there too, up to a multiple of rows, and beside them seed and offset of its dropout,
used or not. Which kernel runs depends on the GPU's compute capability, the dtype, head_dim and
the version of torch, which `traces.attention_kernels` asks.
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

HEAD_DIM_MULTIPLE = 8  # kernels take no other


class Statistics(NamedTuple):
    """What a kernel keeps: statistics of a multiple of `rows`, of `sequence` tokens, and `beside`
    so many bytes."""

    sequence: int
    rows: int
    beside: int

    def of(self, size: int) -> int:
        """Return the bytes in place of a CPU's `size`."""
        padded = ceil_div(self.sequence, self.rows) * self.rows
        return size // self.sequence * padded + self.beside


class FusedAttention(NamedTuple):
    """A call of torch's fused attention: what decides which kernel computes it. `is_grouped`: keys
    have fewer heads than queries."""

    dtype: DType
    head_dim: int
    sequence: int
    drops: bool
    is_grouped: bool = False

    def kernel(self, sm: int | None) -> str | None:
        """Return the kernel that torch takes on GPUs of this compute capability; None where it
        takes none, or where it was not asked for the capability."""
        by_row = _choice(counted_torch()).get(str(sm), {})
        rows = by_row.get(row_name(self.dtype, drops=self.drops), [])
        if self.head_dim % HEAD_DIM_MULTIPLE or self.sequence == 1:
            return None
        refused = _ungrouped(counted_torch()) if self.is_grouped else ()
        for first, last, kernel in rows:
            is_refused = kernel in refused
            if first <= self.head_dim <= last and not is_refused:
                return str(kernel)
        return None

    def statistics(self, sm: int | None) -> Statistics | None:
        """Return what that kernel keeps; None where there is none, or nobody knows it."""
        if (kernel := self.kernel(sm)) is None:
            return None
        return Statistics(self.sequence, *_table("kernels")[kernel])

    def goes_by_operators(self, sm: int | None) -> bool:
        """Return whether torch was asked for this capability, and takes no kernel there though a
        kernel takes such a head_dim: nothing is padded."""
        is_known = sm in capabilities() and self.sequence > 1
        return is_known and self.head_dim % HEAD_DIM_MULTIPLE == 0 and self.kernel(sm) is None

    def has_kernel(self, sm: int | None) -> bool:
        """Return whether torch takes a kernel on GPUs of this compute capability; on any that it
        was asked for, where this one is not among them."""
        of_these = (sm,) if sm in capabilities() else capabilities()
        return any(self.kernel(capability) is not None for capability in of_these)


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities that torch was asked for, in rising order."""
    return tuple(map(int, _choice(counted_torch())))


def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = archive.read(TablePart.KERNEL, "attention", name)
    return table


@cache
def _choice(torch: str) -> dict[str, dict[str, list[list[Any]]]]:
    """By compute capability, of this version of torch; the tables' own where it was not asked."""
    versions = _table("choice")
    choice: dict[str, dict[str, list[list[Any]]]]
    choice = versions.get(torch, versions[REFERENCE_TORCH])
    return choice


@cache
def _ungrouped(torch: str) -> tuple[str, ...]:
    """The kernels in whose place this version of torch goes operator by operator where keys have
    fewer heads (`sdp_utils.cpp`): efficient attention, up to 2.13."""
    versions = _table("ungrouped")
    kernels: list[str] = versions.get(torch, versions[REFERENCE_TORCH])
    return tuple(kernels)


def most_rows() -> int:
    """Return the multiple of rows of which no kernel keeps more."""
    return max(int(rows) for rows, _ in _table("kernels").values())


def row_name(dtype: DType, *, drops: bool) -> str:
    """Return the name of a row of the table."""
    return f"{dtype}-dropout" if drops else str(dtype)


def attention_of(spec: Spec) -> FusedAttention | None:
    """Return the call that a built-in model's blocks make on a spec's GPUs; None where they make
    none."""
    shape = spec.model
    if not spec.is_for_cuda or not isinstance(shape, ModelShape) or not shape.is_fused:
        return None
    return FusedAttention(
        dtype=spec.precision.effective.parameters,
        head_dim=shape.head_dim,
        sequence=spec.batch.sequence,
        drops=shape.dropouts.attention > 0,
    )


def capability(spec: Spec) -> int | None:
    """Return the compute capability whose kernels are counted: None where nobody says it, or torch
    was not asked for it, or activations leave the device: what attention keeps for its dropout
    stays there, in a storage of its own, which no table has."""
    return None if leaves_device(spec) or spec.sm not in capabilities() else spec.sm


def is_by_operators(spec: Spec) -> bool:
    """Return whether a built-in model's attention is known to be no kernel on the spec's GPUs, and
    to have its scores in memory; nobody says it where dropout is between its operators."""
    attention = attention_of(spec)
    if attention is None or attention.drops:
        return False
    return attention.goes_by_operators(capability(spec))


def may_be_fused(spec: Spec) -> bool:
    """Return whether attention may be a kernel of its own: nobody knows of a model's own code, nor
    of a class that has the choice."""
    model = spec.model
    if isinstance(model, ModelShape):
        return model.is_fused
    return isinstance(model, ExternalModel) or model.attention in (None, Attention.SDPA)


def leaves_device(spec: Spec) -> bool:
    """Return whether activations of any block leave the device."""
    return any(kept.tier is not Tier.DEVICE for kept in spec.activations.modes)


def statistics_of(spec: Spec, tokens: int) -> Statistics | None:
    """Return what a built-in model's attention of so many tokens keeps on a spec's GPUs; None where
    they are a CPU's or nobody knows."""
    if (attention := attention_of(spec)) is None:
        return None
    return attention._replace(sequence=tokens).statistics(capability(spec))
