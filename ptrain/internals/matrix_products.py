"""Grouped matrix products and products of scaled fp8 matrices (torch/_meta_registrations.py, which
has their shapes on fake tensors)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, _meta_registrations

from ptrain.internals.part import PrivatePart

SHAPES = _meta_registrations, "_meta_grouped_mm_common"


def empty_product(first: Tensor, second: Tensor, others: dict[str, Any]) -> Tensor:
    """Return an uninitialized result of a grouped product."""
    output: Tensor = _meta_registrations._create_grouped_mm_output_tensor(
        first, second, others["offs"], others["out_dtype"]
    )
    return output


def scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> Tensor:
    """Return the product of two fp8 matrices, divided by their scales.

    Args:
        left: The left matrix, stored by rows.
        right: The right matrix, stored by columns.
        left_scale: One fp32 factor, or one per row.
        right_scale: One fp32 factor, or one per column.
        dtype: The dtype of the product.
        is_fast: Sum in the tensor cores, with fewer bits.
    """
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


PARTS = (
    PrivatePart(
        owner=_meta_registrations,
        members=("_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"),
    ),
    PrivatePart(owner=torch, members=("_scaled_mm",)),
)
