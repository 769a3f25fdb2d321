"""The shapes of grouped matrix products on fake tensors (torch/_meta_registrations)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, _meta_registrations

from ptrain.internals.part import PrivatePart

SHAPES = _meta_registrations, "_meta_grouped_mm_common"


def empty_product(first: Tensor, second: Tensor, others: dict[str, Any]) -> Tensor:
    """Return an uninitialized result of a grouped product."""
    output: Tensor = _meta_registrations._create_grouped_mm_output_tensor(
        first, second, others["offs"], others["out_dtype"]
    )
    return output


PARTS = (
    PrivatePart(
        owner=_meta_registrations,
        members=("_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"),
    ),
)
