"""What operators compute and send, beside what they allocate: floating-point operations of the
matrix products (a multiplication and an addition each), as torch's own counter has them, and
collectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ptrain.costs import Collective


class When(StrEnum):
    """Of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "again"  # of the forward pass, while backward runs


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """`size` is in operations, or for a collective in bytes of the whole tensor."""

    when: When
    collective: Collective | None
    size: int


def matrix_products(name: str, args: Any) -> tuple[int, int]:
    """(number, operations of each) of an operator's matrix products; none of any other operator.
    Of a grouped product each row meets one group's factor alone. Fused attention has two in forward
    (scores, and their product with the values) and in backward five: the scores again, and four
    gradients."""
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[1:3] if "add" in name else args[:2]
        return 1, 2 * left.numel() * right.shape[-1]
    if name == "_grouped_mm":
        left, right = args[:2]
        groups = left.shape[0] if left.dim() > right.dim() else 1
        return 1, 2 * left.numel() // groups * right.shape[-1]
    if "attention" in name and name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("backward")
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, tokens, features = query.shape
        return (5 if is_backward else 2), 2 * batch * heads * tokens * key.shape[2] * features
    return 0, 0


_COLLECTIVES = {
    "all_reduce": (Collective.ALL_REDUCE, False),
    "all_gather_into_tensor": (Collective.ALL_GATHER, True),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, False),
    "all_to_all_single": (Collective.ALL_TO_ALL, False),
}


def sent(function: Any, args: Any, result: Any) -> tuple[Collective, int] | None:
    """Return the collective that an operator is, and the bytes of the whole tensor; None of any
    other operator."""
    name = function._schema.name.split("::")[-1]
    if function.namespace != "_c10d_functional" or name not in _COLLECTIVES:
        return None
    collective, is_result = _COLLECTIVES[name]
    whole = result if is_result else args[0]
    return collective, whole.numel() * whole.itemsize
