"""The roles of the built-in families' modules."""

from __future__ import annotations

from typing import assert_never

from ptrain.spec.model import Family, ModelShape
from ptrain.spec.role import Role, Roles


def roles_of(shape: ModelShape) -> Roles:
    """Return the roles of a built-in family's modules, in the order of a forward pass."""
    columns: dict[str, tuple[str, ...]] = {"attention": ("query", "key", "value")}
    positions: Roles = ()
    match shape.family:
        case Family.LLAMA:
            columns["mlp"] = ("gate", "up")
        case Family.GPT:
            columns["mlp"] = ("up",)
            positions = (("positions", Role.POSITIONS),)
        case family:
            assert_never(family)
    rows = {"attention": "output", "mlp": "down"}
    blocks = tuple(
        pair
        for part, names in columns.items()
        for pair in (
            (f"blocks.*.{part}_norm", Role.NORM),
            (f"blocks.*.{part}", Role.WHOLE_INPUT),
            *((f"blocks.*.{part}.{name}", Role.COLUMN) for name in names),
            (f"blocks.*.{part}.{rows[part]}", Role.ROW),
        )
    )
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)
