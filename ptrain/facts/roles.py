"""The roles of a built-in model's modules."""

from __future__ import annotations

from ptrain.spec.block import Positions
from ptrain.spec.model import ModelShape
from ptrain.spec.role import Role, Roles


def roles_of(shape: ModelShape) -> Roles:
    """Return the roles of a built-in model's modules, in the order of a forward pass. Norms of
    heads are used on a rank's own heads, all other norms between the sub-blocks."""
    is_learned = shape.positions is Positions.LEARNED
    columns = {
        "attention": ("query", "key", "value"),
        "mlp": ("gate", "up") if shape.activation.is_gated else ("up",),
    }
    rows = {"attention": "output", "mlp": "down"}
    shared = {"attention": ("query_norm", "key_norm") if shape.qk_norm else (), "mlp": ()}
    blocks = tuple(
        pair
        for part, names in columns.items()
        for pair in (
            *((f"blocks.*.{name}", Role.NORM) for name in _norms(shape, part)),
            (f"blocks.*.{part}", Role.WHOLE_INPUT),
            *((f"blocks.*.{part}.{name}", Role.COLUMN) for name in names),
            *((f"blocks.*.{part}.{name}", Role.SHARED) for name in shared[part]),
            (f"blocks.*.{part}.{rows[part]}", Role.ROW),
        )
    )
    positions = (("positions", Role.POSITIONS),) if is_learned else ()
    head = () if shape.tied else (("head", Role.HEAD),)
    return (("embed", Role.VOCABULARY), *positions, *blocks, ("norm", Role.LAST_NORM), *head)


def _norms(shape: ModelShape, part: str) -> tuple[str, ...]:
    """Names of the norms in front of a sub-block and behind it."""
    has_own = part == "attention" or not shape.parallel
    return (*([f"{part}_norm"] * has_own), *([f"{part}_post_norm"] * shape.post_norm))
