"""The product of scaled fp8 matrices (torch/_meta_registrations.py, meta_scaled_mm)."""

from __future__ import annotations

import torch
from torch import Tensor

from ptrain.internals.part import PrivatePart


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


PARTS = (PrivatePart(owner=torch, members=("_scaled_mm",)),)
